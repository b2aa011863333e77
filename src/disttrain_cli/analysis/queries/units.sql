-- Compute, busy time and waits of every unit's ranks, per step. FLOPs are those of all devices, also if one rank was
-- recorded for several.
WITH steps AS (SELECT count(*) AS steps, sum(window_s) AS window_s FROM windows WHERE measured),
work AS (
    SELECT unit, sum(flops) AS flops, sum(duration_ns) / 1e9 AS compute_s,
           count(DISTINCT rank) AS ranks, count(DISTINCT (rank, stage)) AS stages
    FROM operations WHERE measured AND operation IN ('forward', 'backward', 'weights') GROUP BY unit
), waits AS (
    SELECT unit, avg(data_wait_s) AS data_wait_s, avg(warmup_s + drain_s) AS warmup_drain_s,
           avg(other_unit_s) AS other_unit_s, avg(other_stage_s) AS other_stage_s, avg(transfer_s) AS transfer_s,
           avg(update_s) AS update_s, avg(gap_s) AS gap_s
    FROM idle GROUP BY unit
)
SELECT u.unit AS name, u.modules, u.tp, u.cp, u.dp, u.pp * w.ranks // w.stages AS pp, u.gpus, w.flops * u.devices_per_rank / steps AS flops_per_step,
       w.compute_s / (w.ranks * steps) AS compute_s,
       w.compute_s / (w.ranks * window_s) AS busy_fraction, waits.* EXCLUDE (unit)
FROM units u JOIN work w USING (unit) JOIN waits USING (unit), steps ORDER BY u.place;
