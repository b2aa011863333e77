-- One row per step and rank whose memory was recorded: the most memory that the rank has held for its stage so far, on
-- its device, or on a CPU as growth of its process.
-- Columns: step, rank, host, unit, stage, replica, held_gib
CREATE VIEW memory AS
SELECT step, rank, host, unit, stage, replica, max(bytes) / 1024.0 ** 3 AS held_gib
FROM known WHERE operation = 'memory' GROUP BY ALL;
