-- Coordinates of every rank, its active time over the measured steps, and its wait in collectives: from its arrival to
-- that of the last member of its group.
WITH spans AS (
    SELECT rank, any_value(host) AS host, any_value(unit) AS unit, min(stage) AS stage,
           any_value(replica) AS replica, if(any_value(cp) > 1, any_value(cp_rank), NULL) AS cp_rank,
           (max(end_ns) - min(start_ns)) / 1e3 AS span_us
    FROM operations JOIN units USING (unit, pp) WHERE measured GROUP BY rank
), reductions AS (
    SELECT rank, step, unit, stage, tp_rank, start_ns, end_ns,
           row_number() OVER (PARTITION BY rank, step ORDER BY start_ns) AS place
    FROM operations WHERE measured AND operation = 'reduce' AND bytes > 0
), waits AS (
    SELECT rank, sum(wait) / 1e3 AS us FROM (
        SELECT rank, least(end_ns, max(start_ns) OVER (PARTITION BY step, unit, stage, tp_rank, place)) - start_ns AS wait
        FROM reductions) GROUP BY rank
)
SELECT spans.*, w.us AS collective_wait_us FROM spans LEFT JOIN waits w USING (rank) ORDER BY rank;
