-- The kernels that take most time.
SELECT n.name, k.kind, count(*) AS count, sum(k.end_ns - k.start_ns) / 1e3 AS total_us,
       max(k.end_ns - k.start_ns) / 1e3 AS longest_us,
       coalesce(sum(k.end_ns - k.start_ns)
                / nullif((SELECT sum(end_ns - start_ns) FROM raw_kernels WHERE measured), 0), 0.0) AS share
FROM raw_kernels k
JOIN names n ON n.id = k.name
WHERE k.measured
GROUP BY n.name, k.kind
ORDER BY total_us DESC, n.name, k.kind
LIMIT 30;
