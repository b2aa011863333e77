-- Sender and receiver of every tensor that a rank waited for.
CREATE VIEW messages AS
WITH moved AS (
    SELECT *, operation LIKE '%activation' AS onward FROM operations WHERE operation LIKE 'send%' OR operation LIKE 'receive%'
), received AS (
    SELECT m.*, if(onward, c.before, c.after) AS source FROM moved m JOIN cuts c ON m.depth = if(onward, c.after, c.before)
    WHERE operation LIKE 'receive%'
)
SELECT r.step, r.slot, if(r.onward, 'forward', 'backward') AS direction, s.rank AS sender, s.unit AS sender_unit,
       s.stage AS sender_stage, r.rank AS receiver, r.unit AS receiver_unit, r.stage AS receiver_stage,
       s.start_ns AS sent_ns, r.start_ns AS asked_ns, r.end_ns AS received_ns,
       greatest(0, least(r.end_ns, s.start_ns) - r.start_ns) / 1e6 AS waited_ms,
       (r.end_ns - greatest(r.start_ns, least(r.end_ns, s.start_ns))) / 1e6 AS transfer_ms, r.bytes
FROM received r JOIN moved s ON s.operation LIKE 'send%' AND s.step = r.step AND s.slot = r.slot AND s.onward = r.onward
    AND s.depth = r.source
WHERE CASE WHEN r.peer >= 0 THEN s.rank = r.peer
           WHEN r.unit = s.unit THEN s.replica = r.replica AND s.tp_rank = r.tp_rank AND s.cp_rank = r.cp_rank
           ELSE s.peer < 0 OR s.peer = r.rank END;
