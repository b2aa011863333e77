-- Files in which several processes run operators or launch kernels, or, if no event is known as either, have events of
-- the same names: one rank has one such process.
WITH known AS (
    SELECT e.file, t.process
    FROM (SELECT DISTINCT file, thread, category FROM raw_events) e
    JOIN categories c ON c.id = e.category AND c.class IN (3, 4)
    JOIN threads t ON t.id = e.thread),
alike AS (
    SELECT e.file, unnest(list(DISTINCT t.process)) AS process
    FROM (SELECT DISTINCT file, thread, name FROM raw_events WHERE file NOT IN (SELECT file FROM known)) e
    JOIN threads t ON t.id = e.thread
    GROUP BY e.file, e.name HAVING count(DISTINCT t.process) > 1)
SELECT file, count(DISTINCT process) AS processes
FROM (FROM known UNION ALL FROM alike)
GROUP BY file
HAVING processes > 1
ORDER BY file;
