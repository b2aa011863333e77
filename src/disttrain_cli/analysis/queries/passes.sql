-- Input of a replay: every forward, backward and weight gradient of the chosen steps with what preceded it on its rank
-- since the previous one (waiting for data, handing over tensors, receiving, and time covered by no row). Seconds from
-- the start of the step; `received_from_s` is when the rank began to wait for this pass's tensors. For the tensors that
-- it received and sent: the bytes, and the only peer, -1 for several; null if not recorded.
WITH chosen AS (SELECT step, start_ns FROM windows WHERE list_contains($steps, step)),
summed AS (
    SELECT o.step, o.rank, o.slot, o.operation, any_value(o.unit) AS unit, o.stage,
           any_value(o.replica) AS replica, any_value(o.depth) AS depth, min(o.start_ns) AS start_ns,
           max(o.end_ns) AS end_ns, sum(coalesce(o.predicted_ms, 0)) / 1e3 AS predicted_s,
           sum(if(o.operation = 'weights', 0, o.exchange_ns)) / 1e9 AS exchange_s
    FROM operations o JOIN chosen USING (step) WHERE o.operation IN ('forward', 'backward', 'weights')
    GROUP BY o.step, o.rank, o.stage, o.slot, o.operation
), passes AS (  -- passes without work take no time: of those that start at once, place says which comes first
    SELECT *, start_ns::HUGEINT * 16 + row_number() OVER (
        PARTITION BY step, rank, start_ns ORDER BY end_ns, list_position(['forward', 'backward', 'weights'], operation)) - 1 AS place FROM summed
), others AS (
    SELECT o.step, o.rank, o.stage, o.slot, o.operation, o.start_ns, o.end_ns, o.bytes, o.peer, o.late_ns
    FROM operations o JOIN chosen USING (step)
    WHERE o.operation NOT IN ('forward', 'backward', 'weights', 'evaluation', 'checkpoint')
), preceding AS (
    SELECT p.step, p.rank, p.stage, p.slot, p.operation,
           sum(o.end_ns - o.start_ns) AS covered_ns,
           coalesce(sum(o.end_ns - o.start_ns) FILTER (o.operation = 'load'), 0) AS load_ns,
           coalesce(sum(o.end_ns - o.start_ns) FILTER (o.operation LIKE 'receive%'), 0) AS received_ns,
           min(o.start_ns) FILTER (o.operation LIKE 'receive%') AS received_from_ns,
           sum(o.late_ns) AS late_ns,
           sum(o.bytes) FILTER (o.operation LIKE 'receive%') AS received_bytes,
           any_value(o.peer) FILTER (o.operation LIKE 'receive%') AS received_peer
    FROM others o ASOF JOIN passes p ON o.step = p.step AND o.rank = p.rank AND o.end_ns::HUGEINT * 16 <= p.place
    GROUP BY p.step, p.rank, p.stage, p.slot, p.operation
), sent AS (
    SELECT step, rank, stage, slot, if(operation = 'send_activation', 'forward', 'backward') AS operation,
           sum(bytes) AS sent_bytes, any_value(peer) AS sent_peer
    FROM others WHERE operation LIKE 'send%' GROUP BY ALL
)
SELECT p.step, p.rank, p.slot, p.operation, p.unit, p.stage, p.replica, p.depth, p.predicted_s, p.exchange_s,
       (p.start_ns - c.start_ns) / 1e9 AS start_s, (p.end_ns - p.start_ns) / 1e9 AS duration_s,
       coalesce(q.load_ns, 0) / 1e9 AS load_s, coalesce(q.received_ns, 0) / 1e9 AS received_s,
       (coalesce(q.received_from_ns, p.start_ns) - c.start_ns) / 1e9 AS received_from_s,
       coalesce(q.late_ns, 0) / 1e9 AS late_s,
       coalesce(q.covered_ns - q.load_ns - q.received_ns, 0) / 1e9 AS handover_s,
       greatest(0, p.start_ns - coalesce(lag(p.end_ns) OVER (PARTITION BY p.step, p.rank ORDER BY p.place), c.start_ns)
                   - coalesce(q.covered_ns, 0)) / 1e9 AS gap_s,
       q.received_bytes, q.received_peer, s.sent_bytes, s.sent_peer
FROM passes p JOIN chosen c USING (step)
LEFT JOIN preceding q ON q.step = p.step AND q.rank = p.rank AND q.stage = p.stage AND q.slot = p.slot AND q.operation = p.operation
LEFT JOIN sent s ON s.step = p.step AND s.rank = p.rank AND s.stage = p.stage AND s.slot = p.slot AND s.operation = p.operation
ORDER BY p.step, p.rank, p.place;
