-- Breakdown of the devices' time: shares of the window of a step, over all devices and measured steps. A rank counts
-- once per device that it represents.
WITH weighted AS (SELECT i.*, u.devices_per_rank AS devices FROM idle i JOIN units u USING (unit)),
total AS (SELECT sum(window_s * devices) AS s FROM weighted)
SELECT sum(compute_s * devices) / any_value(s) AS compute, sum(warmup_s * devices) / any_value(s) AS warmup,
       sum(drain_s * devices) / any_value(s) AS drain, sum(other_unit_s * devices) / any_value(s) AS other_unit,
       sum(other_stage_s * devices) / any_value(s) AS other_stage,
       sum(data_wait_s * devices) / any_value(s) AS data_wait, sum(transfer_s * devices) / any_value(s) AS transfer,
       sum(update_s * devices) / any_value(s) AS update, sum(gap_s * devices) / any_value(s) AS gap,
       avg(data_wait_s) AS data_wait_s
FROM weighted, total;
