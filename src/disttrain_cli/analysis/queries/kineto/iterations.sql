-- Profiler steps: their number, the number of measured ones, and the time of these (mean over the ranks, as in losses).
WITH lengths AS (SELECT step, avg(length_s) AS s FROM step_lengths WHERE measured GROUP BY step)
SELECT (SELECT count(DISTINCT step) FROM steps) AS recorded, count(*) AS measured, avg(s) AS mean_s,
       quantile_cont(s, 0.5) AS p50_s, quantile_cont(s, 0.95) AS p95_s,
       (SELECT count(*) FROM (SELECT step FROM steps GROUP BY step
                              HAVING count(*) < (SELECT count(DISTINCT rank) FROM steps))) AS partial,
       (SELECT count(DISTINCT rank) FROM raw_kernels)
           - (SELECT count(DISTINCT rank) FROM steps WHERE rank IN (SELECT rank FROM raw_kernels)) AS unmarked,
       (SELECT count(DISTINCT rank) FROM steps WHERE lent AND rank IN (SELECT rank FROM raw_kernels)) AS lent_ranks
FROM lengths;
