-- One row per layer and expert: mean rows of a measured step that chose it, over all ranks.
SELECT module, layer, expert, avg(rows) AS rows
FROM (
    SELECT e.module, e.layer, unnest(range(len(e.rows))) AS expert, unnest(e.rows) AS rows
    FROM experts e JOIN windows w USING (step)
    WHERE w.measured
)
GROUP BY ALL
ORDER BY layer, expert
