-- Breakdown of the measured time of every rank, in ns. First the kernels, clipped to the measured time: those of steps
-- that are left out count too, as the device is not idle then.
CREATE TEMP TABLE numbered AS
SELECT *, row_number() OVER (PARTITION BY rank ORDER BY start_ns) AS number FROM windows WHERE measured;
CREATE TEMP TABLE spans AS
SELECT rank, min(start_ns) AS start_ns, max(end_ns) AS end_ns FROM raw_kernels WHERE measured GROUP BY rank;
CREATE TEMP TABLE bounds AS
SELECT s.rank, least(s.start_ns, min(n.start_ns)) AS start_ns, greatest(s.end_ns, max(n.end_ns)) AS end_ns
FROM spans s JOIN numbered n USING (rank) GROUP BY s.rank, s.start_ns, s.end_ns;
CREATE TEMP TABLE running AS
SELECT k.rowid AS place, k.rank, k.name, k.kind, k.launched_ns, k.launched_by, b.start_ns AS begin_ns,
       greatest(k.start_ns, b.start_ns) AS start_ns, least(k.end_ns, b.end_ns) AS end_ns
FROM raw_kernels k JOIN bounds b USING (rank)
WHERE k.measured OR (k.start_ns < b.end_ns AND k.end_ns > b.start_ns);
-- A launch takes this long to reach the device, at most: 20 µs. No launch follows the last kernel.
CREATE TEMP TABLE gaps AS
SELECT rank, before_ns, start_ns, least(start_ns, launched_ns + 20000) AS ready_ns, name AS kernel
FROM (SELECT *, coalesce(max(end_ns) OVER (PARTITION BY rank ORDER BY start_ns, end_ns, place
                                           ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING), begin_ns) AS before_ns
      FROM running)
WHERE start_ns > before_ns AND launched_by IS NOT NULL
UNION ALL
SELECT k.rank, max(k.end_ns), b.end_ns, b.end_ns, NULL
FROM running k JOIN bounds b USING (rank) GROUP BY k.rank, b.end_ns HAVING count(k.launched_by) > 0;
-- One row per long gap of a device in a measured step: 2 % of it or more. Columns: rank, step, start_ns, end_ns, kernel
-- (number of the name of the one that ends the gap; null: none)
CREATE TABLE long_gaps AS
SELECT g.rank, n.step, greatest(g.before_ns, n.start_ns) AS start_ns, least(g.start_ns, n.end_ns) AS end_ns, g.kernel
FROM gaps g JOIN numbered n ON g.rank = n.rank AND g.before_ns < n.end_ns AND g.start_ns > n.start_ns
WHERE least(g.start_ns, n.end_ns) - greatest(g.before_ns, n.start_ns) >= 0.02 * (n.end_ns - n.start_ns);
-- Moments of one state, summed by rank, step (stepped: in a measured one; null if none is marked) and state. Outside:
-- before a step's first kernel or after its last, for more than 1 ms, which Python between two operators hardly takes.
-- Bits of the host (none overlaps itself, so they add up): data 1, cpu 2, late 4, queued 8, waits 16, python 32.
CREATE TEMP TABLE moments AS
WITH parts AS (
    SELECT rank, CASE WHEN kind = 'unclassified' THEN 'compute' ELSE kind END AS what, 1 AS bit, start_ns, end_ns FROM running
    UNION ALL
    SELECT k.rank, 'moving', 1, greatest(k.start_ns, least(k.end_ns, coalesce(w.own_latest_ns, k.start_ns))), k.end_ns
    FROM running k LEFT JOIN waits w USING (place) WHERE k.kind = 'communication'
    UNION ALL
    SELECT rank, 'host copy', 1, start_ns, end_ns
    FROM running k JOIN names n ON n.id = k.name
    WHERE k.kind = 'memory' AND regexp_matches(n.name, 'HtoD|DtoH|HostTo|ToHost|Pageable|Pinned', 'i')
    UNION ALL
    SELECT rank, 'host', 4, before_ns, ready_ns FROM gaps WHERE ready_ns > before_ns
    UNION ALL
    SELECT rank, 'host', 8, greatest(before_ns, ready_ns), start_ns FROM gaps WHERE greatest(before_ns, ready_ns) < start_ns
    UNION ALL
    SELECT b.rank, 'host', CASE b.what WHEN 'data' THEN 1 WHEN 'cpu' THEN 2 WHEN 'waits' THEN 16 ELSE 32 END,
           greatest(b.start_ns, s.start_ns), least(b.end_ns, s.end_ns)
    FROM busy b JOIN bounds s USING (rank) WHERE b.start_ns < s.end_ns AND b.end_ns > s.start_ns
    UNION ALL
    SELECT rank, 'span', 1, start_ns, end_ns FROM spans
    UNION ALL
    SELECT rank, 'step', number, start_ns, end_ns FROM numbered
    UNION ALL
    SELECT rank, 'outside', 1, start_ns, coalesce(first_ns, end_ns) FROM numbered
    WHERE coalesce(first_ns, end_ns) > start_ns + 1000000
    UNION ALL
    SELECT rank, 'outside', 1, last_ns, end_ns FROM numbered WHERE last_ns < end_ns - 1000000),
edges AS (
    SELECT rank, start_ns AS at_ns, what, bit AS change FROM parts
    UNION ALL
    SELECT rank, end_ns, what, -bit FROM parts),
changes AS (
    SELECT rank, at_ns,
           sum(change) FILTER (what = 'compute') AS compute, sum(change) FILTER (what = 'communication') AS communication,
           sum(change) FILTER (what = 'memory') AS memory, sum(change) FILTER (what = 'host copy') AS host_copy,
           sum(change) FILTER (what = 'moving') AS moving, sum(change) FILTER (what = 'host') AS host,
           sum(change) FILTER (what = 'span') AS span, sum(change) FILTER (what = 'step') AS step,
           sum(change) FILTER (what = 'outside') AS outside
    FROM edges GROUP BY rank, at_ns),
states AS (
    SELECT rank, lead(at_ns) OVER later - at_ns AS ns, coalesce(sum(compute) OVER later, 0) > 0 AS compute,
           coalesce(sum(communication) OVER later, 0) > 0 AS communication,
           coalesce(sum(memory) OVER later, 0) > 0 AS memory, coalesce(sum(host_copy) OVER later, 0) > 0 AS host_copy,
           coalesce(sum(moving) OVER later, 0) > 0 AS moving, coalesce(sum(host) OVER later, 0)::INTEGER AS host,
           coalesce(sum(span) OVER later, 0) > 0 AS span, coalesce(sum(step) OVER later, 0)::INTEGER AS number,
           coalesce(sum(outside) OVER later, 0) > 0 AS outside
    FROM changes WINDOW later AS (PARTITION BY rank ORDER BY at_ns))
SELECT s.* EXCLUDE (ns, number), m.step, m.number IS NOT NULL AS stepped, m.kernels, sum(s.ns)::BIGINT AS ns,
       NOT (compute OR communication OR memory) AS idle
FROM states s LEFT JOIN numbered m USING (rank, number)
WHERE s.ns > 0
GROUP BY ALL;
-- One row per rank, as HolisticTraceAnalysis defines it: from the first measured kernel to the last. Columns: rank,
-- span_ns, idle_ns, compute_ns, communication_ns, overlapped_ns, exposed_ns, exposed_wait_ns, memory_ns
CREATE TABLE times AS
SELECT rank, sum(ns)::BIGINT AS span_ns,
       coalesce(sum(ns) FILTER (idle), 0)::BIGINT AS idle_ns,
       coalesce(sum(ns) FILTER (compute), 0)::BIGINT AS compute_ns,
       coalesce(sum(ns) FILTER (communication), 0)::BIGINT AS communication_ns,
       coalesce(sum(ns) FILTER (communication AND compute), 0)::BIGINT AS overlapped_ns,
       coalesce(sum(ns) FILTER (communication AND NOT compute), 0)::BIGINT AS exposed_ns,
       coalesce(sum(ns) FILTER (communication AND NOT compute AND NOT moving), 0)::BIGINT AS exposed_wait_ns,
       coalesce(sum(ns) FILTER (memory AND NOT communication AND NOT compute), 0)::BIGINT AS memory_ns
FROM moments WHERE span GROUP BY rank ORDER BY rank;
-- One row per rank and measured step (null: no step is marked), bounded as in `windows`. An idle moment is the host's
-- if it loads data (data), waits for other hosts (host_wait), runs anything while the next kernel is not launched
-- (cpu), or if it is late and the moment is not outside (late); queued: the next kernel was launched long enough
-- before.
-- Columns: rank, step, kernels, step_ns, compute_ns, exposed_ns, exposed_wait_ns, memory_ns, host_copies_ns, idle_ns,
-- idle_data_ns, idle_host_wait_ns, idle_cpu_ns, idle_late_ns, idle_queued_ns, idle_unrecorded_ns
CREATE TABLE step_times AS
SELECT rank, step, kernels, sum(ns)::BIGINT AS step_ns,
       coalesce(sum(ns) FILTER (compute), 0)::BIGINT AS compute_ns,
       coalesce(sum(ns) FILTER (communication AND NOT compute), 0)::BIGINT AS exposed_ns,
       coalesce(sum(ns) FILTER (communication AND NOT compute AND NOT moving), 0)::BIGINT AS exposed_wait_ns,
       coalesce(sum(ns) FILTER (memory AND NOT communication AND NOT compute), 0)::BIGINT AS memory_ns,
       coalesce(sum(ns) FILTER (host_copy AND NOT communication AND NOT compute), 0)::BIGINT AS host_copies_ns,
       coalesce(sum(ns) FILTER (idle), 0)::BIGINT AS idle_ns,
       coalesce(sum(ns) FILTER (why = 'data'), 0)::BIGINT AS idle_data_ns,
       coalesce(sum(ns) FILTER (why = 'host_wait'), 0)::BIGINT AS idle_host_wait_ns,
       coalesce(sum(ns) FILTER (why = 'cpu'), 0)::BIGINT AS idle_cpu_ns,
       coalesce(sum(ns) FILTER (why = 'late'), 0)::BIGINT AS idle_late_ns,
       coalesce(sum(ns) FILTER (why = 'queued'), 0)::BIGINT AS idle_queued_ns,
       coalesce(sum(ns) FILTER (why = 'unrecorded'), 0)::BIGINT AS idle_unrecorded_ns
FROM (SELECT *, CASE WHEN NOT idle THEN NULL WHEN host & 1 > 0 THEN 'data' WHEN host & 16 > 0 THEN 'host_wait'
                     WHEN host & 8 > 0 THEN 'queued' WHEN host & 2 > 0 OR (outside AND host & 32 > 0) THEN 'cpu'
                     WHEN host & 4 > 0 AND NOT outside THEN 'late' ELSE 'unrecorded' END AS why FROM moments)
WHERE stepped GROUP BY rank, step, kernels ORDER BY rank, step;
