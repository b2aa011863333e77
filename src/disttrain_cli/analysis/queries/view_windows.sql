-- One row per step: when it began and ended over all ranks (evaluations and checkpoints left out), and whether it is measured.
-- A step is measured unless it is warm-up (the first of every start of the job; the first two where at least six
-- were recorded) or incomplete (fewer ranks computed, or fewer operations were recorded, than usual).
-- Columns: step, run, start_ns, end_ns, compute_end_ns, window_s, ranks, warmup, complete, measured
CREATE TABLE windows AS
WITH spans AS (
    SELECT step, run, min(start_ns) AS first_ns, max(end_ns) AS end_ns, max(compute_end_ns) AS compute_end_ns,
           count(*) FILTER (computed > 0) AS ranks, sum(computed) AS computed
    FROM seen JOIN kept USING (step, run) WHERE step >= 0
    GROUP BY step, run
    HAVING max(compute_end_ns) IS NOT NULL
), placed AS (
    SELECT *, greatest(first_ns, coalesce(lag(end_ns) OVER o, first_ns)) AS start_ns,
           row_number() OVER o AS place, count(*) OVER (PARTITION BY run) AS recorded,
           max(ranks) OVER () AS most_ranks, quantile_disc(computed, 0.5) OVER () AS usual
    FROM spans WINDOW o AS (PARTITION BY run ORDER BY step)
)
SELECT step, run, start_ns, end_ns, compute_end_ns, (end_ns - start_ns) / 1e9 AS window_s, ranks,
       place <= CASE WHEN recorded >= 6 THEN 2 WHEN recorded >= 2 THEN 1 ELSE 0 END AS warmup,
       ranks = most_ranks AND computed >= 0.9 * usual AS complete,
       NOT warmup AND complete AS measured
FROM placed ORDER BY step;
