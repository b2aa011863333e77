-- How long do steps take? Warm-up and incomplete steps are left out; their numbers are counted beside.
SELECT count(*) AS recorded, count(*) FILTER (measured) AS measured, count(*) FILTER (warmup) AS warmup,
       count(*) FILTER (NOT complete) AS incomplete, min(step) AS first_step, max(step) AS last_step,
       avg(window_s) FILTER (measured) AS window_s,
       avg(coalesce(s.iteration_s, window_s)) FILTER (measured) AS iteration_s,
       quantile_cont(coalesce(s.iteration_s, window_s), 0.5) FILTER (measured) AS p50_s,
       quantile_cont(coalesce(s.iteration_s, window_s), 0.95) FILTER (measured) AS p95_s,
       min(coalesce(s.iteration_s, window_s)) FILTER (measured) AS fastest_s,
       max(coalesce(s.iteration_s, window_s)) FILTER (measured) AS slowest_s,
       sum(coalesce(s.iteration_s, window_s)) FILTER (measured) AS total_s,
       avg(s.sequences_per_s) FILTER (measured) AS sequences_per_s,
       sum(s.model_flops) FILTER (measured) AS reported_flops,
       count(s.step) FILTER (measured) AS reported,
       max(ranks) AS ranks
FROM windows w LEFT JOIN steps s USING (step);
