-- The longest kernels of a step ($step, or null for all) and some ranks, in µs from the first of the step.
WITH chosen AS (
    SELECT * FROM raw_kernels WHERE ($step IS NULL OR step = $step) AND list_contains($ranks, rank)),
longest AS (SELECT * FROM chosen ORDER BY end_ns - start_ns DESC LIMIT $most)
SELECT rank, (kind IN ('communication', 'memory'))::INTEGER AS lane, n.name[:120] AS operation,
       if(kind = 'unclassified', 'compute', kind) AS kind, '' AS module, -1 AS slot,
       (start_ns - (SELECT min(start_ns) FROM chosen)) / 1e3 AS start_us, (end_ns - start_ns) / 1e3 AS duration_us
FROM longest JOIN names n ON n.id = longest.name ORDER BY rank, lane, start_ns, duration_us DESC;
