-- One row per rank and collective that several ranks joined, or message between two. number: of the collective in its
-- step, the same in every step with the same ones. gone: sent and returned before the receiver joined.
SELECT coalesce(w.step, -1) AS step, w.collective - min(w.collective) OVER (PARTITION BY w.step) AS number, w.rank,
       CASE WHEN NOT w.message THEN w.name WHEN starts_with(w.name, 'message ' || w.rank || ' ') THEN 'send' ELSE 'recv' END
           AS name,
       w.ranks, k.stream, w.start_ns - w.came_ns AS ahead_ns, w.start_ns, w.end_ns, w.own_latest_ns AS latest_ns,
       if(k.launched_by IS NULL, NULL, k.launched_ns) AS launched_ns,
       w.message AND w.wait_ns = 0 AND NOT w.is_last AS gone
FROM waits w
JOIN raw_kernels k ON k.rowid = w.place
ORDER BY step, number, w.rank;
