-- When the CPU of a rank does something (operators, calls of the runtime), and when it loads data; no overlaps.
CREATE TABLE busy AS
WITH spans AS (
    SELECT f.rank, e.start_ns, e.start_ns + e.duration_ns AS end_ns,
           CASE WHEN names.name ILIKE '%dataloader%' THEN 'data' ELSE 'cpu' END AS what
    FROM raw_events e
    JOIN files f ON f.file = e.file AND f.kept
    JOIN categories c ON c.id = e.category
    JOIN names ON names.id = e.name
    WHERE c.class IN (3, 4) OR (c.class = 5 AND names.name ILIKE '%dataloader%')),
islands AS (
    SELECT *, sum(fresh) OVER (PARTITION BY rank, what ORDER BY start_ns, end_ns) AS island
    FROM (SELECT *, (start_ns > coalesce(max(end_ns) OVER (
                         PARTITION BY rank, what ORDER BY start_ns, end_ns
                         ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING), -1))::INTEGER AS fresh
          FROM spans))
SELECT rank, what, min(start_ns) AS start_ns, max(end_ns) AS end_ns
FROM islands
GROUP BY rank, what, island;
