-- One row per step: its begin and end, as reported during training, or else over all ranks (evaluations and checkpoints
-- left out), and whether it is measured; covered_s: from its first to its last recorded operation. A host that runs
-- ahead of its GPU reports a step before the optimizer step is done: the step then lasts until the reporting rank's
-- last operation ends, and the next one begins there.
-- A step is measured unless it is warm-up (the first of every start of the job; the first two if at least six were
-- recorded) or incomplete (fewer ranks computed, or fewer operations were recorded, than usual).
-- Columns: step, run, start_ns, end_ns, compute_end_ns, window_s, covered_s, ranks, warmup, complete, measured
CREATE TABLE windows AS
WITH spans AS (
    SELECT step, run, min(start_ns) AS first_ns, max(end_ns) AS last_ns, max(compute_end_ns) AS compute_end_ns,
           count(*) FILTER (computed > 0) AS ranks, sum(computed) AS computed
    FROM seen JOIN kept USING (step, run) WHERE step >= 0
    GROUP BY step, run
    HAVING max(compute_end_ns) IS NOT NULL
), reported AS (
    SELECT step, s.end_ns - (1e9 * iteration_s)::BIGINT AS start_ns, greatest(s.end_ns, o.end_ns) AS end_ns,
           coalesce(o.end_ns > s.end_ns, false) AS overruns
    FROM steps s LEFT JOIN (SELECT run, step, end_ns FROM seen WHERE rank = 0) o USING (run, step) WHERE iteration_s > 0
), placed AS (
    SELECT s.*, greatest(first_ns, coalesce(lag(last_ns) OVER o, first_ns)) AS from_ns,
           CASE WHEN lag(r.overruns) OVER o THEN greatest(r.start_ns, lag(r.end_ns) OVER o) ELSE r.start_ns END AS start_ns,
           r.end_ns,
           row_number() OVER o AS place, count(*) OVER (PARTITION BY run) AS recorded,
           max(ranks) OVER () AS most_ranks, quantile_disc(computed, 0.75) OVER () AS usual
    FROM spans s LEFT JOIN reported r ON r.step = s.step AND r.start_ns < compute_end_ns AND r.end_ns >= compute_end_ns
    WINDOW o AS (PARTITION BY run ORDER BY s.step)
)
SELECT step, run, coalesce(start_ns, from_ns) AS start_ns, coalesce(end_ns, last_ns) AS end_ns, compute_end_ns,
       (coalesce(end_ns, last_ns) - coalesce(start_ns, from_ns)) / 1e9 AS window_s, (last_ns - from_ns) / 1e9 AS covered_s,
       ranks, place <= CASE WHEN recorded >= 6 THEN 2 WHEN recorded >= 2 THEN 1 ELSE 0 END AS warmup,
       ranks = most_ranks AND computed >= 0.9 * usual AS complete,
       NOT warmup AND complete AS measured
FROM placed ORDER BY step;
