-- Events of the Chrome trace format for some steps: a line of JSON each. One process per unit, one thread per rank,
-- times in µs from $origin. X: operations; s, f: an arrow from the send that a receive waited for; C: number of a
-- unit's ranks that compute. Names become JSON by to_json, so they stay strings for any content.
WITH rows AS (
    SELECT o.*, u.place, row_number() OVER (ORDER BY o.step, o.rank, o.start_ns) AS number
    FROM operations o JOIN units u USING (unit) WHERE list_contains($steps, o.step)
), moving AS (
    SELECT *, if(operation LIKE '%activation', 1, -1) AS direction FROM rows
    WHERE operation LIKE 'send%' OR operation LIKE 'receive%'
), arrows AS (
    SELECT r.number, r.place, r.rank, r.operation, r.start_ns, r.end_ns, s.place AS from_place, s.rank AS from_rank,
           s.start_ns AS sent_ns
    FROM moving r
    JOIN cuts ON r.depth = if(r.direction = 1, cuts.after, cuts.before)
    JOIN moving s ON s.step = r.step AND s.slot = r.slot AND s.direction = r.direction
        AND s.depth = if(r.direction = 1, cuts.before, cuts.after)
        AND (s.rank = r.peer OR (r.peer < 0 AND (s.replica = r.replica OR s.unit <> r.unit)))
    WHERE r.operation LIKE 'receive%' AND s.operation LIKE 'send%' AND s.start_ns <= r.end_ns
    QUALIFY row_number() OVER (PARTITION BY r.number, cuts.before, cuts.after ORDER BY s.start_ns DESC, s.rank) = 1
), ends AS (
    SELECT place, start_ns AS at_ns, 1 AS change FROM rows WHERE operation IN ('forward', 'backward', 'weights')
    UNION ALL SELECT place, end_ns, -1 FROM rows WHERE operation IN ('forward', 'backward', 'weights')
), counts AS (
    SELECT place, at_ns, sum(sum(change)) OVER (PARTITION BY place ORDER BY at_ns) AS computing FROM ends
    GROUP BY place, at_ns
), events AS (
    SELECT start_ns AS at_ns, to_json({
        ph: 'X', name: if(slot >= 0, operation || ' ' || slot, operation), cat: operation, pid: place, tid: rank,
        ts: (start_ns - $origin) / 1e3, dur: duration_ns / 1e3,
        args: {step: step, slot: slot, module: module, tokens: tokens, images: images, sequences: sequences,
               sum_length_sq: sum_length_sq, bytes: bytes, peer: peer, late_ns: late_ns,
               exchange_ns: exchange_ns, sm_mhz: sm_mhz, power_w: power_w, throttle: throttle}}) AS event
    FROM rows
    UNION ALL
    SELECT sent_ns, to_json({ph: 's', name: 'transfer', cat: 'transfer', id: number + $first_id, pid: from_place,
                             tid: from_rank, ts: (sent_ns - $origin) / 1e3}) FROM arrows
    UNION ALL
    SELECT end_ns, to_json({ph: 'f', bp: 'e', name: 'transfer', cat: 'transfer', id: number + $first_id, pid: place,
                            tid: rank, ts: (greatest(start_ns, sent_ns, end_ns - 1) - $origin) / 1e3}) FROM arrows
    UNION ALL
    SELECT at_ns, to_json({ph: 'C', name: 'ranks that compute', pid: place, ts: (at_ns - $origin) / 1e3,
                           args: {ranks: computing}}) FROM counts
    UNION ALL
    SELECT end_ns, to_json({ph: 'C', name: 'memory of rank ' || rank, cat: 'memory', pid: u.place, tid: rank,
                            ts: (end_ns - $origin) / 1e3, step: step, module: module, args: {GiB: bytes / 1073741824}})
    FROM trace JOIN units u USING (unit) WHERE operation = 'memory' AND coalesce(module, '') NOT IN ('device', 'allocator')
      AND list_contains($steps, step)
)
SELECT event::VARCHAR AS event FROM events ORDER BY at_ns;
