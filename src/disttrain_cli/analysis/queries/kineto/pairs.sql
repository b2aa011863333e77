-- Converts begin and end marks of a thread, paired at the same depth of its stack, to events; returns the number
-- without a partner.
CREATE TEMP TABLE paired AS
WITH deep AS (
    SELECT *, rowid AS place,
           sum(CASE WHEN phase = ord('B') THEN 1 ELSE -1 END)
               OVER (PARTITION BY file, thread ORDER BY start_ns, rowid) AS depth
    FROM marks),
level AS (SELECT * EXCLUDE depth, depth + (phase = ord('E'))::INTEGER AS depth FROM deep)
SELECT * EXCLUDE (duration_ns, depth, place),
       lead(start_ns) OVER same - start_ns AS duration_ns, lead(phase) OVER same AS follows
FROM level
WINDOW same AS (PARTITION BY file, thread, depth ORDER BY start_ns, place)
QUALIFY phase = ord('B') AND follows = ord('E')
ORDER BY place;
INSERT INTO raw_events BY NAME SELECT * EXCLUDE (phase, follows) FROM paired;
SELECT (SELECT count(*) FROM marks) - 2 * (SELECT count(*) FROM paired) AS unpaired;
