-- Groups in the arguments of collectives, by file.
SELECT DISTINCT e.file, c.members, c.size
FROM (SELECT DISTINCT file, call FROM raw_events WHERE call >= 0) e
JOIN calls c ON c.id = e.call;
