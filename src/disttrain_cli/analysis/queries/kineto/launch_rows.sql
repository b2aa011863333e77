-- Launches of every rank's host: a kernel's call is the longest one that began with its launch.
WITH calls AS (
    SELECT e.thread, e.start_ns, max(e.duration_ns) AS ns
    FROM raw_events e JOIN categories c ON c.id = e.category AND c.class = 4
    WHERE e.correlation >= 0 GROUP BY ALL),
launched AS (
    SELECT k.rank, k.end_ns - k.start_ns AS kernel_ns, c.ns AS call_ns, k.start_ns - k.launched_ns - c.ns AS delay_ns
    FROM raw_kernels k JOIN calls c ON c.thread = k.launched_by AND c.start_ns = k.launched_ns
    WHERE k.measured)
SELECT rank, count(*) AS launched, count(*) FILTER (kernel_ns < call_ns) AS short,
       quantile_cont(kernel_ns, 0.5) / 1e3 AS kernel_p50_us, quantile_cont(call_ns, 0.5) / 1e3 AS call_p50_us,
       quantile_cont(delay_ns, 0.5) / 1e3 AS delay_p50_us, quantile_cont(delay_ns, 0.95) / 1e3 AS delay_p95_us,
       max(delay_ns) / 1e3 AS delay_max_us
FROM launched GROUP BY rank ORDER BY rank;
