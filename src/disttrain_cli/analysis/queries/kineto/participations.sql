-- Collectives that several ranks joined, messages left out: one row per rank. number: of the collective in its step, the
-- same in every step that holds the same ones.
SELECT coalesce(w.step, -1) AS step, w.collective - min(w.collective) OVER (PARTITION BY w.step) AS number, w.rank, w.name,
       w.ranks, k.stream, w.start_ns - w.came_ns AS ahead_ns, w.start_ns, w.end_ns, w.own_latest_ns AS latest_ns,
       if(k.launched_by IS NULL, NULL, k.launched_ns) AS launched_ns
FROM waits w
JOIN raw_kernels k ON k.rowid = w.place
WHERE NOT w.message
ORDER BY step, number, w.rank;
