-- One row per profiler step and rank with its time. Columns: rank, step, measured, start_ns, length_s
CREATE VIEW step_lengths AS
SELECT rank, step, measured, start_ns, (end_ns - start_ns) / 1e9 AS length_s FROM windows WHERE step IS NOT NULL;
