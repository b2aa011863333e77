-- One row per call of an operator whose shapes are counted: its time, and that of the kernels that it launched in
-- measured steps (for traces without a device: its own). Columns: rank, thread, start_ns, end_ns, shape, ns
CREATE TABLE counted AS
WITH calls AS (
    SELECT f.rank, e.name, e.thread, e.start_ns, e.start_ns + e.duration_ns AS end_ns, e.shape
    FROM raw_events e JOIN files f ON f.file = e.file AND f.kept
    WHERE e.shape >= 0),
launched AS (
    SELECT c.thread, c.start_ns, c.shape, sum(k.end_ns - k.start_ns)::BIGINT AS ns
    FROM (SELECT *, CASE WHEN EXISTS (SELECT 1 FROM categories WHERE class = 1) THEN launched_by ELSE stream END AS host
          FROM raw_kernels WHERE measured) k
    ASOF JOIN (SELECT thread, start_ns, arg_min(name, (end_ns, shape)) AS name, min(end_ns) AS end_ns,
                      arg_min(shape, (end_ns, shape)) AS shape
               FROM calls WHERE shape IN (SELECT id FROM shapes WHERE flops IS NOT NULL) GROUP BY thread, start_ns) c
        ON c.thread = k.host AND k.launched_ns >= c.start_ns
    WHERE k.launched_ns <= c.end_ns AND k.kind IN ('compute', 'unclassified')
      AND (EXISTS (SELECT 1 FROM categories WHERE class = 1) OR k.name = c.name)
    GROUP BY ALL)
SELECT c.*, l.ns FROM calls c LEFT JOIN launched l USING (thread, start_ns, shape);
