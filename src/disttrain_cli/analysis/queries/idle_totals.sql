-- Where does the time of the ranks go? Shares of the window of a step, over all ranks and measured steps.
SELECT sum(compute_s) / sum(window_s) AS compute, sum(warmup_s) / sum(window_s) AS warmup,
       sum(drain_s) / sum(window_s) AS drain, sum(other_unit_s) / sum(window_s) AS other_unit,
       sum(other_stage_s) / sum(window_s) AS other_stage, sum(data_wait_s) / sum(window_s) AS data_wait,
       sum(transfer_s) / sum(window_s) AS transfer, sum(update_s) / sum(window_s) AS update,
       sum(gap_s) / sum(window_s) AS gap, avg(data_wait_s) AS data_wait_s
FROM idle;
