-- Kernels, copies and fills of the analysed files. A kernel is of the step in which it was launched; it is measured if
-- that step is, or if its rank marks no steps. Their order is total, since row numbers break ties later.
CREATE TABLE raw_kernels AS
WITH on_device AS (
    SELECT f.rank, e.name, e.device, e.stream, e.bytes, e.call, e.start_ns, e.start_ns + e.duration_ns AS end_ns,
           c.class, coalesce(l.launched_ns, e.start_ns) AS launched_ns, l.launched_by
    FROM raw_events e
    JOIN files f ON f.file = e.file AND f.kept
    JOIN categories c ON c.id = e.category AND c.class IN (1, 2)
    LEFT JOIN launches l ON l.file = e.file AND l.correlation = e.correlation)
SELECT k.* EXCLUDE (class), s.step,
       coalesce(s.measured AND k.launched_ns < s.until_ns, k.rank NOT IN (SELECT rank FROM steps)) AS measured,
       CASE WHEN k.class = 2 THEN 'memory' WHEN k.call >= 0 THEN 'communication'
            WHEN n.kind <> 'mixed' THEN n.kind ELSE 'unclassified' END AS kind,
       CASE WHEN k.class = 2 THEN 'category' WHEN k.call >= 0 THEN 'arguments'
            WHEN n.kind IS NOT NULL THEN 'name' END AS evidence,
       nullif(n.operation, '') AS operation
FROM on_device k
ASOF LEFT JOIN steps s ON k.rank = s.rank AND k.launched_ns >= s.start_ns
LEFT JOIN kinds n ON n.name = k.name
ORDER BY k.rank, k.start_ns, k.end_ns, k.launched_ns, k.launched_by, k.class, k.name, k.device, k.stream,
         k.call, k.bytes;
