-- The job in one row: means over ranks in s, and the share of time that nothing classifies.
SELECT avg(span_ns) / 1e9 AS span_s, avg(compute_ns) / 1e9 AS compute_s, avg(idle_ns) / 1e9 AS idle_s,
       avg(idle_data_ns) / 1e9 AS data_s, avg(idle_cpu_ns + idle_late_ns) / 1e9 AS host_s,
       avg(exposed_wait_ns) / 1e9 AS wait_s,
       avg(exposed_ns - exposed_wait_ns) / 1e9 AS transfer_s, avg(memory_ns) / 1e9 AS memory_s,
       sum(exposed_ns - exposed_wait_ns) / sum(span_ns) AS exposed_fraction, sum(compute_ns) / sum(span_ns) AS busy,
       (SELECT coalesce(sum(end_ns - start_ns) FILTER (kind = 'unclassified'), 0) / nullif(sum(end_ns - start_ns), 0)
        FROM raw_kernels WHERE measured) AS unclassified,
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
