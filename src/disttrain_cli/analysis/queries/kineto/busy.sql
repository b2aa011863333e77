-- Times when the CPU of a rank is busy (operators, calls of the runtime), loads data, or waits for other hosts; no
-- overlaps.
-- python: from the first to the last frame of a thread that launches, if frames were recorded.
CREATE TABLE busy AS
WITH named AS (
    SELECT id, name, regexp_matches(name, '\b(gloo|mpi|ucc):|\bbarrier', 'i') AS waits, name ILIKE '%synchronize%' AS syncs,
           name ILIKE '%dataloader%' AS loads, regexp_matches(name, 'dataloader\.py\(\d+\): _*(next|get_data|try_get)') AS gets
    FROM names),
spans AS (
    SELECT f.rank, e.start_ns, e.start_ns + e.duration_ns AS end_ns,
           CASE WHEN n.loads THEN 'data' WHEN n.waits AND c.class <> 4 THEN 'waits' ELSE 'cpu' END AS what
    FROM raw_events e
    JOIN files f ON f.file = e.file AND f.kept
    JOIN categories c ON c.id = e.category
    JOIN named n ON n.id = e.name
    WHERE (c.class IN (3, 4) AND NOT n.syncs) OR (c.class = 5 AND (n.loads OR n.waits)) OR (c.class = 7 AND n.gets)),
islands AS (
    SELECT *, sum(fresh) OVER (PARTITION BY rank, what ORDER BY start_ns, end_ns) AS island
    FROM (SELECT *, (start_ns > coalesce(max(end_ns) OVER (
                         PARTITION BY rank, what ORDER BY start_ns, end_ns
                         ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING), -1))::INTEGER AS fresh
          FROM spans))
SELECT rank, what, min(start_ns) AS start_ns, max(end_ns) AS end_ns
FROM islands
GROUP BY rank, what, island
UNION ALL
SELECT f.rank, 'python', min(e.start_ns), max(e.start_ns + e.duration_ns)
FROM raw_events e
JOIN files f ON f.file = e.file AND f.kept
JOIN categories c ON c.id = e.category AND c.class = 7
JOIN names n ON n.id = e.name AND contains(n.name, '.py(')
WHERE e.thread IN (SELECT launched_by FROM raw_kernels)
GROUP BY f.rank;
