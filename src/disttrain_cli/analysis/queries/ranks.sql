-- Time breakdown of every rank over the measured steps, in the definitions of HolisticTraceAnalysis: span = last
-- end − first start; compute = |union of forward and backward|; non-compute = the other operations outside compute;
-- idle = the rest. Waiting for data is idle. overlap = |communication ∩ compute| / |communication|.
-- |union| = Σ of what each interval adds beyond the furthest end seen so far.
WITH kinds AS (
    SELECT *, operation IN ('forward', 'backward') AS computes,
           operation LIKE 'send%' OR operation LIKE 'receive%' OR operation IN ('wait', 'reduce') AS communicates
    FROM operations WHERE measured AND operation <> 'load'
), parts AS (
    SELECT rank, start_ns, end_ns, 'all' AS part FROM kinds
    UNION ALL SELECT rank, start_ns, end_ns, 'compute' FROM kinds WHERE computes
    UNION ALL SELECT rank, start_ns, end_ns, 'communication' FROM kinds WHERE communicates
    UNION ALL SELECT rank, start_ns, end_ns, 'either' FROM kinds WHERE computes OR communicates
), reached AS (
    SELECT *, max(end_ns) OVER (PARTITION BY part, rank ORDER BY start_ns, end_ns
                                ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING) AS reach FROM parts
), lengths AS (
    SELECT rank, part, sum(greatest(0, end_ns - greatest(start_ns, coalesce(reach, start_ns)))) / 1e3 AS us
    FROM reached GROUP BY rank, part
), unions AS (
    SELECT rank, max(us) FILTER (part = 'all') AS every, coalesce(max(us) FILTER (part = 'compute'), 0) AS compute,
           coalesce(max(us) FILTER (part = 'communication'), 0) AS communication,
           coalesce(max(us) FILTER (part = 'either'), 0) AS either
    FROM lengths GROUP BY rank
), spans AS (
    SELECT rank, any_value(host) AS host, any_value(unit) AS unit, any_value(stage) AS stage,
           any_value(replica) AS replica,
           (max(end_ns) - min(start_ns)) / 1e3 AS span FROM operations WHERE measured GROUP BY rank
), reductions AS (
    SELECT rank, step, unit, stage, tp_rank, start_ns, end_ns,
           row_number() OVER (PARTITION BY rank, step ORDER BY start_ns) AS place
    FROM operations WHERE measured AND operation = 'reduce' AND bytes > 0
), waits AS (
    SELECT rank, sum(wait) / 1e3 AS us FROM (
        SELECT rank, least(end_ns, max(start_ns) OVER (PARTITION BY step, unit, stage, tp_rank, place)) - start_ns AS wait
        FROM reductions) GROUP BY rank
)
SELECT rank, host, unit, stage, replica, span AS span_us, span - every AS idle_us, compute AS compute_us,
       every - compute AS non_compute_us,
       CASE WHEN communication = 0 THEN 0.0 ELSE 100 * (compute + communication - either) / communication END AS overlap_pct,
       coalesce(w.us, 0.0) AS collective_wait_us
FROM unions JOIN spans USING (rank) LEFT JOIN waits w USING (rank) ORDER BY rank;
