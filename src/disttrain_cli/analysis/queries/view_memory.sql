-- One row per step and rank whose memory was recorded: the most memory that the rank has held for its stage so far, on
-- its device, or on a CPU as growth of its process; after the first step of a start also what is in use on its device,
-- and what of that torch's allocator holds.
-- Columns: step, rank, host, unit, stage, replica, held_gib, device_gib, allocator_gib
CREATE VIEW memory AS
SELECT step, rank, host, unit, stage, replica, max(bytes) FILTER (coalesce(module, '') NOT IN ('device', 'allocator')) / 1024.0 ** 3 AS held_gib,
       max(bytes) FILTER (module = 'device') / 1024.0 ** 3 AS device_gib,
       max(bytes) FILTER (module = 'allocator') / 1024.0 ** 3 AS allocator_gib
FROM known WHERE operation = 'memory' GROUP BY ALL;
