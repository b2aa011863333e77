-- One row per rank and collective that several ranks joined, or message between two: its wait for the last one. For
-- collectives matched by order alone (without a named group), the ends must agree: else these are not of one group. A
-- sender that returned before the receiver joined waited for no rank. came_ns: start_ns on the clock of all.
-- Columns: collective, rank, step, process_group, name, message, index, ranks, start_ns, end_ns, came_ns, wait_ns,
-- transfer_ns, is_last
CREATE TABLE waits AS
WITH own AS (
    SELECT j.*, c.ahead_ns, j.start_ns - c.ahead_ns AS came_ns
    FROM joined j JOIN (SELECT rank, CASE WHEN repaired THEN ahead_ns ELSE 0 END AS ahead_ns FROM clocks) c USING (rank)
    WHERE j.even AND j.ranks > 1),
bounds AS (
    SELECT *, max(came_ns) OVER same AS latest_ns, min(came_ns) OVER same AS first_ns,
           max(end_ns - ahead_ns) OVER same AS last_end_ns, min(end_ns - ahead_ns) OVER same AS first_end_ns
    FROM own WINDOW same AS (PARTITION BY collective)),
ready AS (
    SELECT *, CASE WHEN message AND end_ns - ahead_ns < latest_ns THEN came_ns ELSE latest_ns END AS until_ns
    FROM bounds)
SELECT place, collective, rank, step, process_group, name, message, index, ranks, start_ns, end_ns, came_ns,
       until_ns - came_ns AS wait_ns, until_ns + ahead_ns AS own_latest_ns,
       greatest(last_end_ns - latest_ns, 0) AS transfer_ns,
       row_number() OVER (PARTITION BY collective ORDER BY came_ns DESC, rank) = 1 AS is_last
FROM ready
WHERE process_group <> 'stream' OR message
   OR last_end_ns - first_end_ns <= greatest(200000, 0.1 * (last_end_ns - first_ns))
ORDER BY collective, rank;
