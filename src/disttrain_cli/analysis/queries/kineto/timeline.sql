-- The longest kernels of a step ($step, or null for all) and some ranks.
WITH longest AS (
    SELECT * FROM raw_kernels WHERE ($step IS NULL OR step = $step) AND list_contains($ranks, rank)
    ORDER BY end_ns - start_ns DESC, rowid LIMIT $most)
SELECT rank, 1 + (kind IN ('communication', 'memory'))::INTEGER AS lane, n.name[:2000] AS operation,
       if(kind = 'unclassified', 'compute', kind) AS kind, '' AS module, -1 AS slot, start_ns,
       (end_ns - start_ns) / 1e3 AS duration_us
FROM longest JOIN names n ON n.id = longest.name ORDER BY rank, lane, start_ns, duration_us DESC;
