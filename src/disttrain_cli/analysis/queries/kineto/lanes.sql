-- Lanes of a step ($step, or null for the whole recording): for every rank compute (0), communication and copies (1).
SELECT rank, 'rank ' || rank AS unit, (kind IN ('communication', 'memory'))::INTEGER AS stage, count(*) AS kernels,
       sum(end_ns - start_ns)::BIGINT AS compute_ns
FROM raw_kernels WHERE $step IS NULL OR step = $step GROUP BY ALL ORDER BY rank, stage;
