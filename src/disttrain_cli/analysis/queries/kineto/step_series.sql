-- Time of every profiler step, of the rank that takes longest.
SELECT step, max(end_ns - start_ns) / 1e9 AS iteration_s FROM steps GROUP BY step ORDER BY step;
