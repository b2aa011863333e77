-- Recorded events that are not known as work of a device, grouped by names without numbers; the longest first.
-- Operators of the CPU are included only if there is nothing else.
SELECT coalesce(nullif(regexp_replace(n.name[:120], '\d+', '#', 'g'), ''), '(no name)') AS family,
       min(n.name) AS name, count(*) AS count, sum(e.duration_ns) / 1e9 AS s, bool_and(c.class = 3) AS operators
FROM raw_events e
JOIN files f ON f.file = e.file AND f.kept
JOIN categories c ON c.id = e.category
JOIN names n ON n.id = e.name
WHERE (c.class = 0 OR (c.class IN (3, 5) AND NOT EXISTS (
           FROM raw_events o JOIN categories k ON k.id = o.category WHERE k.class = 0 AND o.duration_ns > 0)))
  AND e.duration_ns > 0 AND e.step < 0 AND e.name NOT IN (SELECT name FROM step_names) AND n.name NOT LIKE 'PyTorch Profiler%'
GROUP BY 1 ORDER BY s DESC, 1 LIMIT 8;
