-- Per step and pair of hosts, the least time from the start of a send to the end of its receive, by their own clocks:
-- an upper bound of the transfer time plus the difference of the clocks.
WITH sent AS (
    SELECT step, slot, rank, unit, stage, peer, host, operation, start_ns FROM recorded WHERE operation LIKE 'send%' AND peer >= 0
), received AS (
    SELECT step, slot, rank, unit, stage, peer, host, replace(operation, 'receive', 'send') AS operation, end_ns
    FROM recorded WHERE operation LIKE 'receive%' AND peer >= 0
)
SELECT s.step, s.host AS sender, r.host AS receiver, min(r.end_ns - s.start_ns) AS least_ns
FROM sent s JOIN received r ON r.step = s.step AND r.slot = s.slot AND r.operation = s.operation AND r.rank = s.peer
    AND r.peer = s.rank
    AND (r.unit <> s.unit OR r.stage = s.stage + if(s.operation = 'send_activation', 1, -1))  -- of several between two ranks
WHERE s.host <> r.host GROUP BY ALL ORDER BY ALL;
