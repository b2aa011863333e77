-- One row per step and rank: when the step ran on the rank's device. A step lasts from one mark to the next; if the
-- host runs ahead, from the end of the kernels of the step before to the end of its own, but for those that run at the
-- same time as the first kernel of the next. For the first step the lead of the host is that of the last one. The last
-- step ends with its mark or, if later, with its kernels, but for the time that kernels of other steps run into the
-- next one (median).
-- Ranks without measured steps: from their first measured kernel to the last. Columns: rank, step, measured, start_ns,
-- end_ns, first_ns, last_ns, kernels (the step's own: first start, last end, count)
CREATE TABLE windows AS
WITH ran AS (
    SELECT k.rank, k.step, min(k.start_ns) AS first_ns, max(k.end_ns) AS last_ns, count(*) AS kernels
    FROM raw_kernels k JOIN steps s USING (rank, step)
    WHERE k.launched_ns < s.until_ns GROUP BY ALL),
followed AS (
    SELECT s.rank, s.step, s.measured, s.start_ns AS mark_ns, s.until_ns, r.first_ns, r.last_ns,
           coalesce(r.kernels, 0) AS kernels, lead(s.start_ns) OVER own AS next_mark_ns,
           least(coalesce(r.last_ns, s.start_ns), coalesce(lead(r.first_ns) OVER own, r.last_ns, s.start_ns)) AS ran_ns
    FROM steps s LEFT JOIN ran r USING (rank, step)
    WHERE s.rank IN (SELECT rank FROM raw_kernels WHERE measured)
    WINDOW own AS (PARTITION BY s.rank ORDER BY s.start_ns)),
ends AS (
    SELECT *, CASE WHEN next_mark_ns IS NOT NULL THEN greatest(next_mark_ns, ran_ns)
                   ELSE greatest(until_ns, ran_ns - coalesce(
                       (median(last_ns - ran_ns) FILTER (next_mark_ns IS NOT NULL AND last_ns - ran_ns < until_ns - mark_ns)
                        OVER whole)::BIGINT, 0)) END AS end_ns,
           greatest(0, last_value(last_ns - until_ns IGNORE NULLS) OVER whole) AS ahead_ns
    FROM followed
    WINDOW whole AS (PARTITION BY rank ORDER BY mark_ns ROWS BETWEEN UNBOUNDED PRECEDING AND UNBOUNDED FOLLOWING))
SELECT rank, step, measured,
       coalesce(lag(end_ns) OVER own, least(coalesce(first_ns, mark_ns), mark_ns + coalesce(ahead_ns, 0))) AS start_ns,
       end_ns, first_ns, last_ns, kernels
FROM ends
WINDOW own AS (PARTITION BY rank ORDER BY mark_ns)
UNION ALL
SELECT rank, NULL, true, min(start_ns), max(end_ns), min(start_ns), max(end_ns), count(*)
FROM raw_kernels
WHERE measured AND rank NOT IN (SELECT rank FROM steps WHERE measured)
GROUP BY rank
ORDER BY rank, start_ns;
