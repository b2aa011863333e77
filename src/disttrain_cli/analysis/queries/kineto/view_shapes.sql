-- Calls of counted operators.
CREATE VIEW calls_with_shapes AS
SELECT c.rank, n.name AS operator, s.dims AS shapes, s.dtype, c.start_ns, c.end_ns, c.ns AS device_ns, s.flops, s.bytes
FROM counted c JOIN shapes s ON s.id = c.shape JOIN names n ON n.id = s.name
WHERE s.flops IS NOT NULL OR NOT starts_with(n.name, 'nccl:');
