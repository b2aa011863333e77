-- One row per rank: by how much its clock is ahead, from collectives that end on all ranks at once. It is repaired if
-- that is certain: beyond 20 µs and ten times the spread, or, if groups are named, beyond 200 µs and three times the
-- spread.
-- Columns: rank, ahead_ns, spread_ns, repaired
CREATE TABLE clocks AS
WITH ends AS (
    SELECT rank, collective, process_group = 'stream' AS unnamed, end_ns - min(end_ns) OVER (PARTITION BY collective) AS end_ns
    FROM joined
    WHERE even AND ranks > 1 AND NOT message AND name NOT ILIKE '%broadcast%'
      AND name NOT IN ('reduce', 'gather', 'scatter')),
away AS (SELECT rank, unnamed, end_ns - median(end_ns) OVER (PARTITION BY collective) AS ahead_ns FROM ends),
found AS (SELECT rank, median(ahead_ns) AS ahead_ns, mad(ahead_ns) AS spread_ns,
                 bool_or(unnamed) AS unnamed FROM away GROUP BY rank)
SELECT r.rank, coalesce(f.ahead_ns, 0)::BIGINT AS ahead_ns, coalesce(f.spread_ns, 0)::BIGINT AS spread_ns,
       coalesce(abs(f.ahead_ns) > greatest(20000, 10 * f.spread_ns)
                OR (NOT f.unnamed AND abs(f.ahead_ns) > greatest(200000, 3 * f.spread_ns)), false) AS repaired
FROM (SELECT DISTINCT rank FROM raw_kernels) r
LEFT JOIN found f USING (rank)
ORDER BY r.rank;
