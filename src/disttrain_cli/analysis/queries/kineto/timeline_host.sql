-- Activity of some ranks' hosts in a step ($step, or null for all): the longest of the outermost operators and calls of
-- each thread. It is empty if nothing ran on a device: operators are then drawn as compute.
WITH spans AS (
    SELECT f.rank, e.thread, e.name, e.start_ns, e.start_ns + e.duration_ns AS end_ns
    FROM raw_events e JOIN files f ON f.file = e.file AND f.kept AND list_contains($ranks, f.rank)
    JOIN categories c ON c.id = e.category AND c.class IN (3, 4)
    LEFT JOIN steps s ON s.rank = f.rank AND s.step = $step
    WHERE e.duration_ns > 0 AND ($step IS NULL OR (e.start_ns >= s.start_ns AND e.start_ns < s.until_ns))
      AND EXISTS (SELECT 1 FROM categories WHERE class = 1)),
outermost AS (
    SELECT *, max(end_ns) OVER (PARTITION BY thread ORDER BY start_ns, end_ns DESC, name
                                ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING) AS open_until
    FROM spans QUALIFY open_until IS NULL OR start_ns >= open_until),
longest AS (SELECT * FROM outermost ORDER BY end_ns - start_ns DESC, start_ns, thread LIMIT $most)
SELECT rank, 0 AS lane, n.name[:2000] AS operation, 'host' AS kind, '' AS module, -1 AS slot, start_ns,
       (end_ns - start_ns) / 1e3 AS duration_us
FROM longest JOIN names n ON n.id = longest.name ORDER BY rank, start_ns, duration_us DESC;
