-- Share of the devices' time that moves tensors while the rank computes nothing. A rank counts once per device that it
-- represents. Waiting for a peer is not counted: a receive counts from the latest start of the sends that feed it, a
-- reduction from its last member's arrival. The sends that feed a receive are those of its peer if one is recorded,
-- else of its replica in the same unit, else of all ranks of the neighbouring stages.
WITH moving AS (
    SELECT step, slot, unit, stage, replica, rank, depth, operation, start_ns, end_ns, peer, pp, devices_per_rank AS devices,
           operation LIKE '%activation' AS onward
    FROM operations JOIN units USING (unit, pp)
    WHERE measured AND (operation LIKE 'send%' OR operation LIKE 'receive%')
), received AS (
    SELECT moving.*, if(onward, before, after) AS source,
           stage = if(onward, 0, pp - 1) AS crosses
    FROM moving JOIN cuts ON depth = if(onward, after, before) WHERE operation LIKE 'receive%'
), sent AS (
    SELECT step, slot, onward, depth, replica, rank, start_ns FROM moving WHERE operation LIKE 'send%'
), by_replica AS (
    SELECT step, slot, onward, depth, replica, max(start_ns) AS sent_ns FROM sent GROUP BY ALL
), by_stage AS (
    SELECT step, slot, onward, depth, max(start_ns) AS sent_ns FROM sent GROUP BY ALL
), fed AS (
    SELECT r.devices, r.start_ns, r.end_ns, p.start_ns AS sent_ns FROM received r JOIN sent p ON r.peer = p.rank
        AND r.step = p.step AND r.slot = p.slot AND r.onward = p.onward AND r.source = p.depth
    UNION ALL
    SELECT r.devices, r.start_ns, r.end_ns, b.sent_ns FROM received r JOIN by_replica b ON r.step = b.step AND r.slot = b.slot
        AND r.onward = b.onward AND r.source = b.depth AND r.replica = b.replica
    WHERE r.peer < 0 AND NOT r.crosses
    UNION ALL
    SELECT any_value(r.devices), r.start_ns, r.end_ns, max(s.sent_ns) FROM received r JOIN by_stage s ON r.step = s.step AND r.slot = s.slot
        AND r.onward = s.onward AND r.source = s.depth
    WHERE r.peer < 0 AND r.crosses GROUP BY r.step, r.slot, r.onward, r.rank, r.start_ns, r.end_ns
), reductions AS (
    SELECT step, rank, end_ns - least(end_ns, max(start_ns) OVER (PARTITION BY step, unit, stage, tp_rank, place)) AS ns,
           devices
    FROM (SELECT *, row_number() OVER (PARTITION BY rank, step ORDER BY start_ns) AS place, devices_per_rank AS devices
          FROM operations JOIN units USING (unit, pp) WHERE measured AND operation = 'reduce' AND bytes > 0)
), exposed AS (
    SELECT (SELECT coalesce(sum(devices * (end_ns - greatest(start_ns, least(end_ns, sent_ns)))), 0) FROM fed) AS received_ns,
           (SELECT coalesce(sum(devices * (end_ns - start_ns)), 0) FROM moving WHERE operation LIKE 'send%') AS sent_ns,
           (SELECT coalesce(sum(devices_per_rank * duration_ns), 0) FROM operations JOIN units USING (unit, pp)
            WHERE measured AND operation = 'wait') AS waited_ns,
           (SELECT coalesce(sum(devices * ns), 0) FROM reductions) AS reduced_ns,
           (SELECT sum(window_s * devices_per_rank) FROM idle JOIN units USING (unit)) AS available_s
)
SELECT (received_ns + sent_ns + waited_ns + reduced_ns) / 1e9 / available_s AS fraction, received_ns / 1e9 AS received_s,
       sent_ns / 1e9 AS sent_s, waited_ns / 1e9 AS waited_s, reduced_ns / 1e9 AS reduced_s
FROM exposed;
