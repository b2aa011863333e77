-- Time of every profiler step, mean over the ranks.
SELECT step, avg(length_s) AS iteration_s FROM step_lengths GROUP BY step ORDER BY step;
