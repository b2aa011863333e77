-- One row per rank and collective that several ranks joined: how long it waited for the last one. Matched by order
-- alone (no group is named), the ends must agree: else these are not of one group. Columns: collective, rank, step, process_group, name,
-- index, ranks, start_ns, end_ns, wait_ns, transfer_ns, is_last
CREATE TABLE waits AS
WITH own AS (
    SELECT j.*, CASE WHEN c.repaired THEN c.ahead_ns ELSE 0 END AS ahead_ns
    FROM joined j JOIN clocks c USING (rank)
    WHERE j.even AND j.ranks > 1),
bounds AS (
    SELECT *, max(start_ns - ahead_ns) OVER same AS latest_ns, min(start_ns - ahead_ns) OVER same AS first_ns,
           max(end_ns - ahead_ns) OVER same AS last_end_ns, min(end_ns - ahead_ns) OVER same AS first_end_ns
    FROM own WINDOW same AS (PARTITION BY collective))
SELECT place, collective, rank, step, process_group, name, index, ranks, start_ns, end_ns,
       latest_ns - (start_ns - ahead_ns) AS wait_ns, latest_ns + ahead_ns AS own_latest_ns,
       greatest(last_end_ns - latest_ns, 0) AS transfer_ns,
       row_number() OVER (PARTITION BY collective ORDER BY start_ns - ahead_ns DESC, rank) = 1 AS is_last
FROM bounds
WHERE process_group <> 'stream'
   OR last_end_ns - first_end_ns <= greatest(200000, 0.1 * (last_end_ns - first_ns))
ORDER BY collective, rank;
