-- Time of every profiler step, of the rank that takes longest.
SELECT step, max(length_s) AS iteration_s FROM step_lengths GROUP BY step ORDER BY step;
