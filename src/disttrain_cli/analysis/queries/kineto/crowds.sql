-- Files in which operators or launches of several processes were recorded: one rank has one such process.
SELECT e.file, count(DISTINCT t.process) AS processes
FROM (SELECT DISTINCT file, thread, category FROM raw_events) e
JOIN categories c ON c.id = e.category AND c.class IN (3, 4)
JOIN threads t ON t.id = e.thread
GROUP BY e.file
HAVING processes > 1
ORDER BY e.file;
