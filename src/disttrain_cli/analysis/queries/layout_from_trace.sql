-- Units in a trace without job.json, ordered by the start of their first forward.
INSERT INTO units
WITH seen AS (
    SELECT unit, list_sort(list(DISTINCT module)) AS modules, max(tp_rank) + 1 AS tp, max(cp_rank) + 1 AS cp,
           count(DISTINCT (cp_rank, tp_rank)) AS recorded, max(replica) + 1 AS dp, max(stage) + 1 AS pp, count(DISTINCT rank) AS gpus, min(start_ns) AS started_ns
    FROM trace WHERE operation = 'forward' GROUP BY unit
)
SELECT unit, row_number() OVER o - 1, modules, tp, cp, dp, pp, gpus,
       coalesce(sum(pp) OVER (o ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING), 0), tp * cp / recorded
FROM seen WINDOW o AS (ORDER BY started_ns, unit);
