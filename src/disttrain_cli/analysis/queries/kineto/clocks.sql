-- One row per rank: by how much its clock is ahead, as collectives that end everywhere at once show it. Repaired where
-- that is clear: beyond 200 µs and three times the spread, ten times where no group is named and order alone matched. Columns: rank, ahead_ns, spread_ns, repaired
CREATE TABLE clocks AS
WITH ends AS (
    SELECT rank, collective, process_group = 'stream' AS unnamed, end_ns - min(end_ns) OVER (PARTITION BY collective) AS end_ns
    FROM joined
    WHERE even AND ranks > 1 AND NOT message AND name NOT ILIKE '%broadcast%'
      AND name NOT IN ('reduce', 'gather', 'scatter')),
away AS (SELECT rank, unnamed, end_ns - median(end_ns) OVER (PARTITION BY collective) AS ahead_ns FROM ends),
found AS (SELECT rank, median(ahead_ns) AS ahead_ns, mad(ahead_ns) AS spread_ns,
                 if(bool_or(unnamed), 10, 3) AS times FROM away GROUP BY rank)
SELECT r.rank, coalesce(f.ahead_ns, 0)::BIGINT AS ahead_ns, coalesce(f.spread_ns, 0)::BIGINT AS spread_ns,
       coalesce(abs(f.ahead_ns) > greatest(200000, f.times * f.spread_ns), false) AS repaired
FROM (SELECT DISTINCT rank FROM raw_kernels) r
LEFT JOIN found f USING (rank)
ORDER BY r.rank;
