-- Times of the steps, without warm-up and incomplete ones, and the numbers of these.
SELECT count(*) AS recorded, count(*) FILTER (measured) AS measured, count(*) FILTER (warmup) AS warmup,
       count(*) FILTER (NOT complete) AS incomplete, min(start_ns) AS first_ns, min(step) AS first_step, max(step) AS last_step,
       avg(covered_s) FILTER (measured) AS covered_s, avg(window_s) FILTER (measured) AS iteration_s,
       quantile_cont(window_s, 0.5) FILTER (measured) AS p50_s, quantile_cont(window_s, 0.95) FILTER (measured) AS p95_s,
       min(window_s) FILTER (measured) AS fastest_s, max(window_s) FILTER (measured) AS slowest_s,
       sum(window_s) FILTER (measured) AS total_s,
       sum(s.sequences_per_s * s.iteration_s) FILTER (measured) / count(s.sequences_per_s * s.iteration_s) FILTER (measured)
           AS sequences_per_step,
       sum(s.model_flops) FILTER (measured) AS reported_flops,
       count(s.step) FILTER (measured) AS reported,
       max(ranks) AS ranks
FROM windows w LEFT JOIN steps s USING (step);
