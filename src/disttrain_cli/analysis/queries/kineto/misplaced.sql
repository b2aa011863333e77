-- Kernels, copies and fills with an impossible start are left out: CUPTI writes 0 and 0 if it could not collect a time;
-- others begin more than 3 ms before their own launch, or as far outside of all calls in their file as these last (10 s
-- at least). In 45 public traces no kernel begins before its launch; clocks of host and device are known to differ by
-- up to 2 ms. If half of a file's kernels seem misplaced its device has another clock, and none is left out.
CREATE TEMP TABLE misplaced AS
WITH calls AS (
    SELECT e.file, min(e.start_ns) AS first_ns, max(e.start_ns + e.duration_ns) AS last_ns,
           greatest(10_000_000_000, last_ns - first_ns) AS margin_ns
    FROM raw_events e
    JOIN categories c ON c.id = e.category AND c.class = 4
    GROUP BY e.file),
judged AS (
    SELECT e.rowid AS place, e.file, e.duration_ns = 0 AND e.start_ns IN (0, f.shift_ns) AS no_time,
           coalesce(e.start_ns < l.launched_ns - 3_000_000 OR e.start_ns < r.first_ns - r.margin_ns
                    OR e.start_ns > r.last_ns + r.margin_ns, false) AS outside
    FROM raw_events e
    JOIN files f ON f.file = e.file AND f.kept
    JOIN categories c ON c.id = e.category AND c.class IN (1, 2)
    LEFT JOIN calls r ON r.file = e.file
    LEFT JOIN launches l ON l.file = e.file AND l.correlation = e.correlation)
SELECT place, file FROM judged WHERE no_time
UNION ALL
SELECT j.place, j.file FROM judged j
WHERE j.outside AND NOT j.no_time AND j.file IN (
    SELECT file FROM judged WHERE NOT no_time GROUP BY file HAVING 2 * count(*) FILTER (outside) < count(*));
DELETE FROM raw_events WHERE rowid IN (SELECT place FROM misplaced);
SELECT f.name, f.rank, count(*) AS events FROM misplaced m JOIN files f USING (file) GROUP BY ALL ORDER BY events DESC, f.rank;
