-- Replaces the events of a file ($file) by those of a part for each device ($parts, $devices): kernels and copies of a
-- device, all events of the process that launched them ($launchers, null if one process launched all), else the
-- launches and operators that they came from, and, for all parts, all other events of the host.
CREATE TEMP TABLE copied AS
SELECT t.id AS thread, (SELECT max(id) FROM threads) + row_number() OVER (ORDER BY part.file, t.id) AS id, part.file, part.device,
       t.process, t.thread_name, t.thread AS number, t.process = part.launcher AS launches
FROM threads t,
     (SELECT unnest($parts) AS file, unnest($devices) AS device, unnest($launchers::VARCHAR[]) AS launcher) part
WHERE t.file = $file;
INSERT INTO threads SELECT id, file, process, number, thread_name FROM copied;
CREATE TEMP TABLE homes AS
WITH own AS (
    SELECT e.rowid AS event, e.*, c.class FROM raw_events e JOIN categories c ON c.id = e.category WHERE e.thread IN (SELECT thread FROM copied)),
launched AS (
    SELECT correlation, any_value(device) AS device FROM own
    WHERE class IN (1, 2) AND correlation > 0 GROUP BY correlation HAVING count(DISTINCT device) = 1),
asked AS (
    SELECT external_id, any_value(device) AS device FROM own
    WHERE class IN (1, 2) AND external_id > 0 GROUP BY external_id HAVING count(DISTINCT device) = 1)
SELECT own.event, own.thread,
       CASE WHEN own.class IN (1, 2) THEN own.device
            WHEN host.launches THEN host.device
            WHEN own.stream >= 0 THEN own.device
            WHEN own.class = 4 THEN launched.device
            WHEN own.class = 3 THEN asked.device END AS device
FROM own
LEFT JOIN copied host ON host.thread = own.thread AND host.launches
LEFT JOIN launched ON own.class = 4 AND launched.correlation = own.correlation
LEFT JOIN asked ON own.class = 3 AND asked.external_id = own.external_id;
CREATE TEMP TABLE shared AS
SELECT e.* REPLACE (c.id AS thread)
FROM homes h
JOIN raw_events e ON e.rowid = h.event
JOIN copied c ON c.thread = h.thread AND (h.device IS NULL OR c.device = h.device);
DELETE FROM raw_events WHERE thread IN (SELECT thread FROM copied);
INSERT INTO raw_events SELECT * FROM shared;
UPDATE raw_memory m SET thread = c.id FROM copied c WHERE c.thread = m.thread AND c.device = m.device;
DROP TABLE shared;
DROP TABLE homes;
DROP TABLE copied;
