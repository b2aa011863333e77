-- One row per profiler step and rank. measured: on all ranks that mark steps, and not the first of several (warm-up).
-- Columns: rank, step, start_ns, end_ns, until_ns, measured
CREATE TABLE steps AS
WITH found AS (
    SELECT f.rank, TRY_CAST(regexp_extract(n.name, '^ProfilerStep#?\s*(\d+)', 1) AS INTEGER) AS step,
           min(e.start_ns) AS start_ns, max(e.start_ns + e.duration_ns) AS end_ns
    FROM raw_events e
    JOIN files f ON f.file = e.file AND f.kept
    JOIN names n ON n.id = e.name AND starts_with(n.name, 'ProfilerStep')
    JOIN categories c ON c.id = e.category AND c.class <> 6
    GROUP BY ALL
    HAVING step IS NOT NULL),
common AS (
    SELECT step FROM found GROUP BY step HAVING count(*) = (SELECT count(DISTINCT rank) FROM found))
SELECT rank, step, start_ns, end_ns,
       coalesce(lead(start_ns) OVER (PARTITION BY rank ORDER BY start_ns), end_ns) AS until_ns,
       step IN (SELECT step FROM common)
           AND (step > (SELECT min(step) FROM common) OR (SELECT count(*) FROM common) = 1) AS measured
FROM found
ORDER BY rank, step;
