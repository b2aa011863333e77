-- What share of the ranks' time moves tensors while the rank computes nothing? Waiting for a peer is not counted:
-- a receive counts from the latest start of the sends that feed it, a reduction from its last member's arrival.
WITH moving AS (
    SELECT step, slot, unit, stage, replica, rank, depth, operation, start_ns, end_ns, peer
    FROM operations WHERE measured AND (operation LIKE 'send%' OR operation LIKE 'receive%')
), fed AS (
    SELECT r.step, r.rank, r.operation, r.start_ns, any_value(r.end_ns) AS end_ns, max(s.start_ns) AS sent_ns
    FROM moving r JOIN moving s ON s.step = r.step AND s.slot = r.slot
         AND (r.operation = 'receive_activation' AND s.operation = 'send_activation' AND s.depth = r.depth - 1
              OR r.operation = 'receive_gradient' AND s.operation = 'send_gradient' AND s.depth = r.depth + 1)
         AND (s.unit <> r.unit OR s.replica = r.replica) AND (r.peer < 0 OR r.peer = s.rank)
    GROUP BY r.step, r.rank, r.operation, r.slot, r.start_ns
), reductions AS (
    SELECT step, rank, end_ns - least(end_ns, max(start_ns) OVER (PARTITION BY step, unit, stage, tp_rank, place)) AS ns
    FROM (SELECT *, row_number() OVER (PARTITION BY rank, step ORDER BY start_ns) AS place
          FROM operations WHERE measured AND operation = 'reduce' AND bytes > 0)
), exposed AS (
    SELECT (SELECT coalesce(sum(end_ns - greatest(start_ns, least(end_ns, sent_ns))), 0) FROM fed) AS received_ns,
           (SELECT coalesce(sum(end_ns - start_ns), 0) FROM moving WHERE operation LIKE 'send%') AS sent_ns,
           (SELECT coalesce(sum(duration_ns), 0) FROM operations WHERE measured AND operation = 'wait') AS waited_ns,
           (SELECT coalesce(sum(ns), 0) FROM reductions) AS reduced_ns,
           (SELECT sum(window_s * ranks) FROM windows WHERE measured) AS available_s
)
SELECT (received_ns + sent_ns + waited_ns + reduced_ns) / 1e9 / available_s AS fraction, received_ns / 1e9 AS received_s,
       sent_ns / 1e9 AS sent_s, waited_ns / 1e9 AS waited_s, reduced_ns / 1e9 AS reduced_s
FROM exposed;
