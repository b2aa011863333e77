-- One row per rank: where its measured time goes, in ns. Span, idle, compute, non-compute and overlap are those of
-- HolisticTraceAnalysis; kernels that nothing classifies count as compute. Columns: rank, span_ns, idle_ns,
-- compute_ns, communication_ns, overlapped_ns, exposed_ns, exposed_wait_ns, memory_ns, idle_data_ns, idle_cpu_ns
CREATE TABLE times AS
WITH kernels AS (SELECT rowid AS place, * FROM raw_kernels WHERE measured),
bounds AS (SELECT rank, min(start_ns) AS start_ns, max(end_ns) AS end_ns FROM kernels GROUP BY rank),
parts AS (
    SELECT rank, CASE WHEN kind = 'unclassified' THEN 'compute' ELSE kind END AS what, start_ns, end_ns FROM kernels
    UNION ALL
    SELECT k.rank, 'moving', greatest(k.start_ns, least(k.end_ns, coalesce(w.own_latest_ns, k.start_ns))), k.end_ns
    FROM kernels k LEFT JOIN waits w USING (place) WHERE k.kind = 'communication'
    UNION ALL
    SELECT b.rank, b.what, greatest(b.start_ns, s.start_ns), least(b.end_ns, s.end_ns)
    FROM busy b JOIN bounds s USING (rank) WHERE b.start_ns < s.end_ns AND b.end_ns > s.start_ns),
edges AS (
    SELECT rank, start_ns AS at_ns, what, 1 AS change FROM parts
    UNION ALL
    SELECT rank, end_ns, what, -1 FROM parts),
changes AS (
    SELECT rank, at_ns,
           sum(change) FILTER (what = 'compute') AS compute, sum(change) FILTER (what = 'communication') AS communication,
           sum(change) FILTER (what = 'memory') AS memory, sum(change) FILTER (what = 'moving') AS moving,
           sum(change) FILTER (what = 'data') AS data, sum(change) FILTER (what = 'cpu') AS cpu
    FROM edges GROUP BY rank, at_ns),
states AS (
    SELECT rank, lead(at_ns) OVER later - at_ns AS ns, coalesce(sum(compute) OVER later, 0) > 0 AS compute,
           coalesce(sum(communication) OVER later, 0) > 0 AS communication,
           coalesce(sum(memory) OVER later, 0) > 0 AS memory, coalesce(sum(moving) OVER later, 0) > 0 AS moving,
           coalesce(sum(data) OVER later, 0) > 0 AS data, coalesce(sum(cpu) OVER later, 0) > 0 AS cpu
    FROM changes WINDOW later AS (PARTITION BY rank ORDER BY at_ns))
SELECT rank, sum(ns)::BIGINT AS span_ns,
       coalesce(sum(ns) FILTER (NOT compute AND NOT communication AND NOT memory), 0)::BIGINT AS idle_ns,
       coalesce(sum(ns) FILTER (compute), 0)::BIGINT AS compute_ns,
       coalesce(sum(ns) FILTER (communication), 0)::BIGINT AS communication_ns,
       coalesce(sum(ns) FILTER (communication AND compute), 0)::BIGINT AS overlapped_ns,
       coalesce(sum(ns) FILTER (communication AND NOT compute), 0)::BIGINT AS exposed_ns,
       coalesce(sum(ns) FILTER (communication AND NOT compute AND NOT moving), 0)::BIGINT AS exposed_wait_ns,
       coalesce(sum(ns) FILTER (memory AND NOT communication AND NOT compute), 0)::BIGINT AS memory_ns,
       coalesce(sum(ns) FILTER (data AND NOT compute AND NOT communication AND NOT memory), 0)::BIGINT AS idle_data_ns,
       coalesce(sum(ns) FILTER (cpu AND NOT data AND NOT compute AND NOT communication AND NOT memory), 0)::BIGINT
           AS idle_cpu_ns
FROM states
WHERE ns IS NOT NULL
GROUP BY rank
ORDER BY rank;
