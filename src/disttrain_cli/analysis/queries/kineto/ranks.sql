-- One row per rank, as in `analyze --json`.
SELECT t.rank, t.span_ns / 1e3 AS span_us, t.idle_ns / 1e3 AS idle_us, t.compute_ns / 1e3 AS compute_us,
       (t.span_ns - t.idle_ns - t.compute_ns) / 1e3 AS non_compute_us,
       100.0 * t.overlapped_ns / nullif(t.communication_ns, 0) AS overlap_pct,
       w.wait_ns / 1e3 AS collective_wait_us, w.last AS last_to_arrive, t.communication_ns / 1e3 AS communication_us,
       (t.exposed_ns - t.exposed_wait_ns) / 1e3 AS exposed_communication_us, t.exposed_wait_ns / 1e3 AS exposed_wait_us,
       m.peak_bytes / 1073741824 AS memory_peak_gib
FROM times t
LEFT JOIN (SELECT rank, sum(wait_ns)::BIGINT AS wait_ns, count(*) FILTER (is_last) AS last FROM waits GROUP BY rank) w
    USING (rank)
LEFT JOIN (SELECT rank, max(allocated_bytes) AS peak_bytes FROM memory WHERE device_type <> 0 GROUP BY rank) m
    USING (rank)
ORDER BY t.rank;
