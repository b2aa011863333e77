-- One row per profiler step and rank with its time: until the next step begins; the last one, after which no other is
-- marked, until its last kernel has ended. Columns: rank, step, measured, start_ns, length_s
CREATE VIEW step_lengths AS
WITH ends AS (
    SELECT rank, step, max(k.end_ns) AS end_ns FROM raw_kernels k JOIN steps s USING (rank, step)
    WHERE coalesce(k.launched_ns, k.start_ns) < s.until_ns GROUP BY ALL),
last AS (SELECT rank, max(start_ns) AS start_ns FROM steps GROUP BY rank)
SELECT s.rank, s.step, s.measured, s.start_ns,
       (if(l.start_ns IS NULL, s.until_ns, greatest(s.until_ns, coalesce(e.end_ns, s.until_ns))) - s.start_ns) / 1e9
           AS length_s
FROM steps s LEFT JOIN last l USING (rank, start_ns) LEFT JOIN ends e USING (rank, step);
