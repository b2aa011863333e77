-- Activity of ranks before the collectives that rank $rank joined last: from the end of their collective before (else
-- their first kernel) to their arrival. Mean per collective, for that rank and for the others.
WITH own AS (
    SELECT w.*, coalesce(lag(w.end_ns) OVER (PARTITION BY w.rank ORDER BY w.start_ns, w.end_ns), s.start_ns) AS from_ns
    FROM waits w
    JOIN (SELECT rank, min(start_ns) AS start_ns FROM raw_kernels WHERE measured GROUP BY rank) s USING (rank)),
late AS (
    SELECT rank, place, from_ns, start_ns FROM own
    WHERE collective IN (SELECT collective FROM waits WHERE is_last AND rank = $rank)),
worked AS (
    SELECT l.rank, l.place, any_value(l.start_ns - l.from_ns) AS gap_ns,
           coalesce(sum(k.end_ns - k.start_ns), 0) AS compute_ns
    FROM late l
    LEFT JOIN raw_kernels k ON k.rank = l.rank AND k.measured AND k.kind IN ('compute', 'unclassified')
                            AND k.start_ns >= l.from_ns AND k.start_ns < l.start_ns
    GROUP BY l.rank, l.place)
SELECT rank = $rank AS is_it, avg(gap_ns) / 1e9 AS gap_s, avg(compute_ns) / 1e9 AS compute_s
FROM worked
GROUP BY ALL
ORDER BY is_it;
