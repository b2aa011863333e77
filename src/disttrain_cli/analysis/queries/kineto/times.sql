-- One row per rank: where its measured time goes, in ns. Span, idle, compute, non-compute and overlap are those of
-- HolisticTraceAnalysis; kernels that nothing classifies count as compute. Kernels of steps that are left out count as
-- far as they run between the first and the last measured one: the device is not idle then. An idle moment is the host's
-- while it loads data, or runs anything and the next kernel is not launched (late: or runs nothing that was recorded);
-- queued: the next kernel was launched long enough before. Columns: rank, span_ns, idle_ns, compute_ns,
-- communication_ns, overlapped_ns, exposed_ns, exposed_wait_ns, memory_ns, host_copies_ns, idle_data_ns, idle_cpu_ns,
-- idle_late_ns, idle_queued_ns
CREATE TABLE times AS
WITH bounds AS (SELECT rank, min(start_ns) AS start_ns, max(end_ns) AS end_ns FROM raw_kernels WHERE measured GROUP BY rank),
kernels AS (
    SELECT k.rowid AS place, k.* REPLACE (greatest(k.start_ns, b.start_ns) AS start_ns, least(k.end_ns, b.end_ns) AS end_ns)
    FROM raw_kernels k JOIN bounds b USING (rank)
    WHERE k.measured OR (k.start_ns < b.end_ns AND k.end_ns > b.start_ns)),
-- A launch takes this long to reach the device, at most: 20 µs.
gaps AS (
    SELECT rank, before_ns, start_ns, least(start_ns, launched_ns + 20000) AS ready_ns
    FROM (SELECT *, max(end_ns) OVER (PARTITION BY rank ORDER BY start_ns, end_ns
                                      ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING) AS before_ns FROM kernels)
    WHERE start_ns > before_ns AND launched_by IS NOT NULL),
-- Of the host (none of them overlaps itself, so they add up to bits): data 1, cpu 2, late 4, queued 8.
parts AS (
    SELECT rank, CASE WHEN kind = 'unclassified' THEN 'compute' ELSE kind END AS what, 1 AS bit, start_ns, end_ns FROM kernels
    UNION ALL
    SELECT k.rank, 'moving', 1, greatest(k.start_ns, least(k.end_ns, coalesce(w.own_latest_ns, k.start_ns))), k.end_ns
    FROM kernels k LEFT JOIN waits w USING (place) WHERE k.kind = 'communication'
    UNION ALL
    SELECT rank, 'host copy', 1, start_ns, end_ns
    FROM kernels k JOIN names n ON n.id = k.name
    WHERE k.kind = 'memory' AND regexp_matches(n.name, 'HtoD|DtoH|HostTo|ToHost|Pageable|Pinned', 'i')
    UNION ALL
    SELECT rank, 'host', 4, before_ns, ready_ns FROM gaps WHERE ready_ns > before_ns
    UNION ALL
    SELECT rank, 'host', 8, greatest(before_ns, ready_ns), start_ns FROM gaps WHERE greatest(before_ns, ready_ns) < start_ns
    UNION ALL
    SELECT b.rank, 'host', CASE b.what WHEN 'data' THEN 1 ELSE 2 END, greatest(b.start_ns, s.start_ns),
           least(b.end_ns, s.end_ns)
    FROM busy b JOIN bounds s USING (rank) WHERE b.start_ns < s.end_ns AND b.end_ns > s.start_ns),
edges AS (
    SELECT rank, start_ns AS at_ns, what, bit AS change FROM parts
    UNION ALL
    SELECT rank, end_ns, what, -bit FROM parts),
changes AS (
    SELECT rank, at_ns,
           sum(change) FILTER (what = 'compute') AS compute, sum(change) FILTER (what = 'communication') AS communication,
           sum(change) FILTER (what = 'memory') AS memory, sum(change) FILTER (what = 'host copy') AS host_copy,
           sum(change) FILTER (what = 'moving') AS moving, sum(change) FILTER (what = 'host') AS host
    FROM edges GROUP BY rank, at_ns),
states AS (
    SELECT rank, lead(at_ns) OVER later - at_ns AS ns, coalesce(sum(compute) OVER later, 0) > 0 AS compute,
           coalesce(sum(communication) OVER later, 0) > 0 AS communication,
           coalesce(sum(memory) OVER later, 0) > 0 AS memory, coalesce(sum(host_copy) OVER later, 0) > 0 AS host_copy,
           coalesce(sum(moving) OVER later, 0) > 0 AS moving, coalesce(sum(host) OVER later, 0)::INTEGER AS host
    FROM changes WINDOW later AS (PARTITION BY rank ORDER BY at_ns))
SELECT rank, sum(ns)::BIGINT AS span_ns,
       coalesce(sum(ns) FILTER (idle), 0)::BIGINT AS idle_ns,
       coalesce(sum(ns) FILTER (compute), 0)::BIGINT AS compute_ns,
       coalesce(sum(ns) FILTER (communication), 0)::BIGINT AS communication_ns,
       coalesce(sum(ns) FILTER (communication AND compute), 0)::BIGINT AS overlapped_ns,
       coalesce(sum(ns) FILTER (communication AND NOT compute), 0)::BIGINT AS exposed_ns,
       coalesce(sum(ns) FILTER (communication AND NOT compute AND NOT moving), 0)::BIGINT AS exposed_wait_ns,
       coalesce(sum(ns) FILTER (memory AND NOT communication AND NOT compute), 0)::BIGINT AS memory_ns,
       coalesce(sum(ns) FILTER (host_copy AND NOT communication AND NOT compute), 0)::BIGINT AS host_copies_ns,
       coalesce(sum(ns) FILTER (idle AND data), 0)::BIGINT AS idle_data_ns,
       coalesce(sum(ns) FILTER (idle AND NOT data AND cpu AND NOT queued), 0)::BIGINT AS idle_cpu_ns,
       coalesce(sum(ns) FILTER (idle AND NOT data AND NOT cpu AND late), 0)::BIGINT AS idle_late_ns,
       coalesce(sum(ns) FILTER (idle AND NOT data AND queued), 0)::BIGINT AS idle_queued_ns
FROM (SELECT *, NOT (compute OR communication OR memory) AS idle, host & 1 > 0 AS data, host & 2 > 0 AS cpu,
             host & 4 > 0 AS late, host & 8 > 0 AS queued FROM states)
WHERE ns IS NOT NULL
GROUP BY rank
ORDER BY rank;
