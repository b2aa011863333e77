-- One row per measured step and rank: breakdown of the window of the step; the parts sum to window_s.
-- warmup_s: before the rank's first forward, and waiting for its first gradient
-- drain_s: from its last compute to the last one of the job
-- other_unit_s, other_stage_s: waiting for tensors in between
-- data_wait_s: load
-- transfer_s: handing over tensors
-- update_s: reduction and optimizer after the job's last compute
-- gap_s: inside the pipeline, covered by no row (the host)
-- Columns: step, rank, host, unit, stage, replica, window_s, compute_s, data_wait_s, warmup_s, other_unit_s,
-- other_stage_s, transfer_s, drain_s, update_s, gap_s
CREATE VIEW idle AS
WITH edges AS (
    SELECT step, rank, any_value(host) AS host, any_value(unit) AS unit, min(stage) AS stage,
           any_value(replica) AS replica, min(start_ns) AS first_ns,
           min(start_ns) FILTER (operation = 'backward') AS first_backward_ns, max(end_ns) AS last_ns
    FROM operations WHERE measured AND operation IN ('forward', 'backward', 'weights') GROUP BY step, rank
), parts AS (
    SELECT o.step, o.rank, o.duration_ns, CASE
        WHEN o.operation IN ('forward', 'backward', 'weights') THEN 'compute'
        WHEN o.start_ns >= e.last_ns THEN 'after'
        WHEN o.operation = 'load' AND o.start_ns < e.first_ns THEN 'early_load'
        WHEN o.start_ns < e.first_ns THEN 'before'
        WHEN o.operation = 'load' THEN 'load'
        WHEN o.operation = 'receive_gradient' AND o.start_ns < e.first_backward_ns THEN 'fill'
        WHEN o.operation = 'receive_activation' THEN if(o.stage = 0, 'other_unit', 'other_stage')
        WHEN o.operation = 'receive_gradient' THEN if(o.stage = o.pp - 1, 'other_unit', 'other_stage')
        ELSE 'transfer' END AS part
    FROM operations o JOIN edges e USING (step, rank)
    WHERE o.operation NOT IN ('evaluation', 'checkpoint')
), sums AS (
    SELECT step, rank,
           coalesce(sum(duration_ns) FILTER (part = 'compute'), 0) AS compute,
           coalesce(sum(duration_ns) FILTER (part = 'early_load'), 0) AS early_load,
           coalesce(sum(duration_ns) FILTER (part = 'load'), 0) AS load,
           coalesce(sum(duration_ns) FILTER (part = 'fill'), 0) AS fill,
           coalesce(sum(duration_ns) FILTER (part = 'other_unit'), 0) AS other_unit,
           coalesce(sum(duration_ns) FILTER (part = 'other_stage'), 0) AS other_stage,
           coalesce(sum(duration_ns) FILTER (part = 'transfer'), 0) AS transfer
    FROM parts GROUP BY step, rank
)
SELECT e.step, e.rank, e.host, e.unit, e.stage, e.replica, w.window_s,
       s.compute / 1e9 AS compute_s, (s.early_load + s.load) / 1e9 AS data_wait_s,
       greatest(0, e.first_ns - w.start_ns - s.early_load + s.fill) / 1e9 AS warmup_s,
       s.other_unit / 1e9 AS other_unit_s, s.other_stage / 1e9 AS other_stage_s, s.transfer / 1e9 AS transfer_s,
       (w.compute_end_ns - e.last_ns) / 1e9 AS drain_s, (w.end_ns - w.compute_end_ns) / 1e9 AS update_s,
       greatest(0, e.last_ns - e.first_ns - s.compute - s.load - s.fill - s.other_unit - s.other_stage - s.transfer)
           / 1e9 AS gap_s
FROM edges e JOIN sums s USING (step, rank) JOIN windows w USING (step);
