-- Totals of the job in one row: recorded time, the shares of unclassified kernel time and of kernels with impossible
-- times, and how many collectives were matched.
SELECT avg(span_ns) / 1e9 AS span_s,
       (SELECT coalesce(sum(end_ns - start_ns) FILTER (kind = 'unclassified'), 0) / nullif(sum(end_ns - start_ns), 0)
        FROM raw_kernels WHERE measured) AS unclassified,
       (SELECT (mended + missing) / nullif(count(*) + missing, 0)
        FROM raw_kernels, (SELECT count(*) AS mended FROM overlong), (SELECT count(*) AS missing FROM misplaced)
        GROUP BY mended, missing) AS repaired,
       (SELECT count(DISTINCT collective) FROM joined
        WHERE NOT even AND NOT message AND (SELECT count(*) FROM times) > 1) AS unmatched,
       (SELECT count(DISTINCT collective) FROM joined WHERE even AND ranks > 1) AS matched,
       (SELECT count(DISTINCT collective) FROM waits) AS waited,
       (SELECT count(*) FROM messages WHERE place NOT IN (SELECT place FROM waits)) AS lone_messages,
       (SELECT sum(k.end_ns - k.start_ns) FILTER (m.place IS NOT NULL AND w.place IS NULL)
               / nullif(sum(k.end_ns - k.start_ns), 0)
        FROM raw_kernels k LEFT JOIN messages m ON m.place = k.rowid LEFT JOIN waits w ON w.place = k.rowid
        WHERE k.measured AND k.kind = 'communication') AS lone_messages_share
FROM times;
