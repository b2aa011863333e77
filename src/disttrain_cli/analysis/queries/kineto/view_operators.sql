-- Kernels with the innermost operator around their launch: of the operators whose depth is the number of open ones
-- then, the one that began last.
CREATE VIEW operators AS
WITH own AS (
    SELECT e.thread, e.name, e.start_ns, e.start_ns + e.duration_ns AS end_ns
    FROM raw_events e JOIN files f ON f.file = e.file AND f.kept
    JOIN categories c ON c.id = e.category AND c.class = 3
    WHERE e.duration_ns > 0),
edges AS (
    SELECT thread, start_ns AS at_ns, 1 AS change, name, start_ns, end_ns FROM own
    UNION ALL
    SELECT thread, end_ns, -1, NULL, NULL, NULL FROM own),
deep AS (
    SELECT *, sum(change) OVER (PARTITION BY thread ORDER BY at_ns, change, end_ns DESC, name
                                ROWS BETWEEN UNBOUNDED PRECEDING AND CURRENT ROW) AS depth FROM edges),
open AS (SELECT thread, at_ns, sum(sum(change)) OVER (PARTITION BY thread ORDER BY at_ns) AS depth
         FROM edges GROUP BY thread, at_ns),
launched AS (
    SELECT k.*, o.depth FROM (FROM raw_kernels WHERE launched_by IS NOT NULL) k
    ASOF JOIN open o ON o.thread = k.launched_by AND k.launched_ns >= o.at_ns)
SELECT l.rank, l.step, l.measured, n.name AS operator, d.start_ns AS operator_start_ns, d.end_ns AS operator_end_ns,
       kn.name AS kernel, l.kind, l.start_ns, l.end_ns, l.launched_ns
FROM launched l
ASOF JOIN (FROM deep WHERE change = 1) d
    ON d.thread = l.launched_by AND d.depth = l.depth AND l.launched_ns >= d.start_ns
JOIN names n ON n.id = d.name JOIN names kn ON kn.id = l.name
WHERE l.depth > 0 AND EXISTS (SELECT 1 FROM categories WHERE class = 1);
