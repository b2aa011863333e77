-- Kernels with uninformative names: the CPU's activity when it launched them.
CREATE TEMP TABLE unknown AS
SELECT rowid AS place, launched_by AS thread, launched_ns
FROM raw_kernels
WHERE kind = 'unclassified' AND evidence IS NULL AND launched_by IS NOT NULL;
CREATE TEMP TABLE around AS
SELECT e.thread, e.start_ns, e.start_ns + e.duration_ns AS end_ns, coalesce(n.kind, '') = 'communication' AS talks
FROM raw_events e
JOIN categories c ON c.id = e.category
LEFT JOIN kinds n ON n.name = e.name
WHERE e.thread IN (SELECT thread FROM unknown) AND (c.class = 3 OR (c.class = 5 AND n.kind = 'communication'));
UPDATE raw_kernels SET kind = 'compute', evidence = 'operator'
FROM (WITH outermost AS (
          SELECT *, max(end_ns) OVER (PARTITION BY thread ORDER BY start_ns, end_ns DESC
                                      ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING) AS open_until
          FROM around WHERE NOT talks
          QUALIFY open_until IS NULL OR start_ns >= open_until)
      SELECT u.place FROM unknown u
      ASOF JOIN outermost o ON u.thread = o.thread AND u.launched_ns >= o.start_ns
      WHERE u.launched_ns <= o.end_ns) inside
WHERE raw_kernels.rowid = inside.place;
UPDATE raw_kernels SET kind = 'communication', evidence = 'annotation'
FROM (SELECT u.place FROM unknown u
      ASOF JOIN (SELECT thread, start_ns, max(end_ns) AS end_ns FROM around WHERE talks GROUP BY thread, start_ns) o ON u.thread = o.thread AND u.launched_ns >= o.start_ns
      WHERE u.launched_ns <= o.end_ns) inside
WHERE raw_kernels.rowid = inside.place;
