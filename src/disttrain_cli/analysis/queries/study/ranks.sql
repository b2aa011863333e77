-- Time of every rank of an operation-level trace over the chosen steps, as HolisticTraceAnalysis defines it, per step:
--   span         last end − first start
--   compute      |union of passes and optimizer|
--   non-compute  the rest that any operation covers
--   idle         what no operation covers
--   |union|      Σ of what each interval adds beyond the furthest end before it.
WITH kinds AS (
    SELECT rank, step, dp_rank, stage, start_ts AS start_s, start_ts + duration AS end_s,
           optype IN ('forward-compute', 'backward-compute', 'optimizer') AS computes
    FROM operations WHERE list_contains($steps, step) AND list_contains($replicas, dp_rank)
), parts AS (
    SELECT rank, step, start_s, end_s, 'every' AS part FROM kinds
    UNION ALL SELECT rank, step, start_s, end_s, 'compute' FROM kinds WHERE computes
    UNION ALL SELECT rank, step, start_s, end_s, 'communication' FROM kinds WHERE NOT computes
), reached AS (
    SELECT *, max(end_s) OVER (PARTITION BY part, rank, step ORDER BY start_s, end_s
                               ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING) AS reach FROM parts
), lengths AS (
    SELECT rank, part, sum(greatest(0, end_s - greatest(start_s, coalesce(reach, start_s)))) * 1e6 AS us
    FROM reached GROUP BY rank, part
), unions AS (
    SELECT rank, max(us) FILTER (part = 'every') AS every, coalesce(max(us) FILTER (part = 'compute'), 0) AS compute,
           coalesce(max(us) FILTER (part = 'communication'), 0) AS communication
    FROM lengths GROUP BY rank
), spans AS (
    SELECT rank, any_value(stage) AS stage, any_value(dp_rank) AS replica, sum(us) AS span FROM (
        SELECT rank, step, stage, dp_rank, (max(end_s) - min(start_s)) * 1e6 AS us FROM kinds GROUP BY ALL) GROUP BY rank
)
SELECT rank, NULL AS host, NULL AS unit, stage, replica, span AS span_us, span - every AS idle_us, compute AS compute_us,
       every - compute AS non_compute_us,
       if(communication = 0, NULL, 100 * (compute + communication - every) / communication) AS overlap_pct
FROM unions JOIN spans USING (rank) ORDER BY rank;
