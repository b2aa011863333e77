-- Busy devices of every file with several, and the number of processes that run operators or launch kernels there. A
-- device with less than 5 % of the busiest one's kernels is not counted (a few kernels and copies on another device are
-- common).
WITH busy AS (
    SELECT e.file, e.device, sum(e.duration_ns) AS ns
    FROM raw_events e
    JOIN categories c ON c.id = e.category AND c.class = 1
    WHERE e.device >= 0
    GROUP BY ALL),
several AS (
    SELECT file, list(device ORDER BY device) AS devices
    FROM (SELECT *, max(ns) OVER (PARTITION BY file) AS most FROM busy)
    WHERE ns >= 0.05 * most
    GROUP BY file
    HAVING count(*) > 1),
hosts AS (
    SELECT e.file, count(DISTINCT t.process) AS processes
    FROM (SELECT DISTINCT file, thread, category FROM raw_events WHERE file IN (SELECT file FROM several)) e
    JOIN categories c ON c.id = e.category AND c.class IN (3, 4)
    JOIN threads t ON t.id = e.thread
    GROUP BY e.file)
SELECT file, devices, coalesce(processes, 0) AS processes
FROM several LEFT JOIN hosts USING (file)
ORDER BY file;
