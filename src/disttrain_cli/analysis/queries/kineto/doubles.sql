-- Kernels that are in the same file more than once: they, and all other duplicates in the file, are reduced to one.
CREATE TEMP TABLE doubled AS
SELECT e.file FROM raw_events e JOIN categories c ON c.id = e.category AND c.class IN (1, 2)
WHERE e.duration_ns > 0
GROUP BY e.file, e.thread, e.name, e.start_ns, e.duration_ns, e.correlation
HAVING count(*) > 1;
CREATE TEMP TABLE once AS SELECT DISTINCT * FROM raw_events WHERE file IN (FROM doubled);
CREATE TEMP TABLE twice AS
SELECT f.name, count(*) - (SELECT count(*) FROM once o WHERE o.file = e.file) AS events
FROM raw_events e JOIN files f ON f.file = e.file WHERE e.file IN (FROM doubled) GROUP BY e.file, f.name;
DELETE FROM raw_events WHERE file IN (FROM doubled);
INSERT INTO raw_events FROM once ORDER BY ALL;
SELECT name, events FROM twice ORDER BY name;
