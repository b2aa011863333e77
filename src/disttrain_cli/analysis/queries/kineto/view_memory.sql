-- One row per change of memory, if memory was traced; device_type 0 is the CPU. Columns: rank, at_ns, device_type,
-- device, allocated_bytes, reserved_bytes
CREATE VIEW memory AS
SELECT f.rank, m.* EXCLUDE (file, thread) FROM raw_memory m JOIN files f ON f.file = m.file AND f.kept;
