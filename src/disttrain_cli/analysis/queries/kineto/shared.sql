-- Copies marks of steps in threads of a file ($file) without a rank to every rank in it ($parts).
CREATE TEMP TABLE copied AS
WITH shared AS (
    SELECT * FROM threads WHERE file = $file
        AND id IN (SELECT thread FROM raw_events WHERE step >= 0 OR name IN (SELECT name FROM step_names)))
SELECT id AS thread, (SELECT max(id) FROM threads) + row_number() OVER (ORDER BY part.file, shared.id) AS id, part.file, process, thread_name,
       shared.thread AS number
FROM shared, (SELECT unnest($parts) AS file) part;
INSERT INTO threads SELECT id, file, process, number, thread_name FROM copied;
INSERT INTO raw_events
SELECT e.* REPLACE (c.id AS thread) FROM raw_events e JOIN copied c USING (thread)
WHERE e.step >= 0 OR e.name IN (SELECT name FROM step_names);
DROP TABLE copied;
