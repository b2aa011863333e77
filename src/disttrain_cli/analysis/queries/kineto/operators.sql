-- Substitutes for kernels, if none was recorded: the events that the user's patterns name as work of a device. If there
-- are none, operators of the CPU count as kernels, and annotated collectives as communication; without operators, all
-- events.
CREATE TABLE raw_kernels AS
WITH spans AS (
    SELECT f.rank, e.name, e.device, e.thread AS stream, e.bytes, e.call, e.start_ns,
           e.start_ns + e.duration_ns AS end_ns, e.start_ns AS launched_ns, NULL::INTEGER AS launched_by, n.operation,
           CASE WHEN e.call >= 0 OR n.kind = 'communication' THEN 'communication'
                WHEN n.by_user OR c.class = 3 THEN 'compute' ELSE 'unclassified' END AS kind,
           contains(names.name, 'c10d::') OR names.name = 'record_param_comms' AS outer_call
    FROM raw_events e
    JOIN files f ON f.file = e.file AND f.kept
    JOIN categories c ON c.id = e.category
    JOIN names ON names.id = e.name
    LEFT JOIN kinds n ON n.name = e.name
    WHERE CASE WHEN (SELECT how FROM understood) = 'user' THEN n.by_user AND c.class IN (0, 3, 5)
               ELSE c.class = 3 OR (c.class = 5 AND n.kind = 'communication')
                    OR (c.class IN (0, 5) AND NOT EXISTS (FROM categories WHERE class = 3)) END
      AND e.step < 0 AND e.name NOT IN (SELECT name FROM step_names) AND NOT starts_with(names.name, 'PyTorch Profiler'))
SELECT s.* EXCLUDE (operation, kind, outer_call), t.step,
       coalesce(t.measured AND s.launched_ns < t.until_ns, s.rank NOT IN (SELECT rank FROM steps)) AS measured,
       s.kind, CASE WHEN s.call >= 0 THEN 'arguments' ELSE 'name' END AS evidence, nullif(s.operation, '') AS operation
FROM spans s
ASOF LEFT JOIN steps t ON s.rank = t.rank AND s.launched_ns >= t.start_ns
WHERE NOT (s.kind = 'communication' AND s.outer_call
           AND EXISTS (FROM spans o WHERE o.kind = 'communication' AND NOT o.outer_call))
ORDER BY s.rank, s.start_ns, s.end_ns, s.name, s.device, s.stream, s.call, s.bytes;
