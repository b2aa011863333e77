-- One row per kernel, copy or fill (for traces without a device: per operator); kind: compute, communication, memory or
-- unclassified; evidence: arguments, name, annotation, operator or category. Columns: rank, step, measured, name, kind,
-- evidence, operation, process_group, members, elements, dtype, device, stream, start_ns, end_ns, launched_ns, bytes
CREATE VIEW kernels AS
SELECT k.rank, k.step, k.measured, n.name, k.kind, k.evidence, k.operation, c.process_group, c.members, c.elements,
       c.dtype, k.device, k.stream, k.start_ns, k.end_ns, k.launched_ns, k.bytes
FROM raw_kernels k
JOIN names n ON n.id = k.name
LEFT JOIN calls c ON c.id = k.call;
