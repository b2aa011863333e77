-- Moves events to the file of their rank and to the clock of all files; those without a rank are left out.
CREATE TABLE placed AS
SELECT e.* REPLACE (t.file AS file, e.start_ns + f.shift_ns AS start_ns)
FROM raw_events e JOIN threads t ON t.id = e.thread JOIN files f ON f.file = t.file;
DROP TABLE raw_events;
ALTER TABLE placed RENAME TO raw_events;
CREATE TABLE placed AS
SELECT m.* REPLACE (t.file AS file, m.at_ns + f.shift_ns AS at_ns)
FROM raw_memory m JOIN threads t ON t.id = m.thread JOIN files f ON f.file = t.file;
DROP TABLE raw_memory;
ALTER TABLE placed RENAME TO raw_memory;
