-- Transfer time of a slot's tensors over a cut: from the start of the send, or the end of the pass that computed them
-- if sends were not recorded (between units: of the last replica), to the end of the receive, if the receiver already
-- waited for them. Median in ms over $steps, and how often a rank waited in a step. $before, $after: depths of the
-- stages on both sides; $crosses: true if they are of different units. A stage that receives over several cuts waits
-- for the latest.
WITH cuts AS (SELECT unnest($before) AS before, unnest($after) AS after, unnest($crosses) AS crosses),
ways AS (
    SELECT before, after, crosses, before AS source, after AS target, true AS onward FROM cuts
    UNION ALL SELECT before, after, crosses, after, before, false FROM cuts
), sent AS (
    SELECT step, slot, depth, replica, operation IN ('forward', 'send_activation') AS onward,
           coalesce(max(start_ns) FILTER (operation LIKE 'send%'), max(end_ns)) AS sent_ns
    FROM operations
    WHERE list_contains($steps, step) AND operation IN ('forward', 'backward', 'send_activation', 'send_gradient') GROUP BY ALL
), last_sent AS (
    SELECT step, slot, depth, onward, max(sent_ns) AS sent_ns FROM sent GROUP BY ALL
), received AS (
    SELECT step, slot, depth, rank, replica, operation = 'receive_activation' AS onward,
           min(start_ns) AS start_ns, max(end_ns) AS end_ns
    FROM operations WHERE list_contains($steps, step) AND operation LIKE 'receive%' GROUP BY ALL
), ready AS (
    SELECT r.step, r.slot, r.rank, r.depth, r.start_ns, r.end_ns, w.before, w.after, w.onward,
           if(w.crosses, s.sent_ns, p.sent_ns) AS ready_ns
    FROM received r JOIN ways w ON r.depth = w.target AND r.onward = w.onward
    JOIN last_sent s ON s.step = r.step AND s.slot = r.slot AND s.depth = w.source AND s.onward = w.onward
    LEFT JOIN sent p ON NOT w.crosses AND p.step = r.step AND p.slot = r.slot AND p.depth = w.source
        AND p.onward = w.onward AND p.replica = r.replica
), latest AS (
    SELECT * FROM ready
    QUALIFY row_number() OVER (PARTITION BY step, slot, rank, depth, onward ORDER BY ready_ns DESC NULLS LAST) = 1
)
SELECT before, after, if(onward, 'forward', 'backward') AS direction, median(end_ns - ready_ns) / 1e6 AS measured_ms,
       count(*) / (SELECT count(*) FROM (SELECT DISTINCT step, rank FROM received r
                   WHERE r.depth = if(l.onward, l.after, l.before))) AS per_step
FROM latest l WHERE start_ns < ready_ns AND ready_ns < end_ns GROUP BY before, after, onward;
