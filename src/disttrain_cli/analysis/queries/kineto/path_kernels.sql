-- Activity of the devices in a step ($step, or null for the whole measured time), and the last rank of its collectives.
SELECT k.rank, k.stream, k.name, k.kind, k.start_ns, k.end_ns, if(k.launched_by IS NULL, NULL, k.launched_ns) AS launched_ns,
       k.rowid AS place, w.own_latest_ns AS latest_ns, l.place AS last_place
FROM raw_kernels k
LEFT JOIN waits w ON w.place = k.rowid
LEFT JOIN waits l ON l.collective = w.collective AND l.is_last AND l.place <> w.place
WHERE k.measured AND ($step IS NULL OR k.step = $step) AND k.end_ns > k.start_ns
ORDER BY k.rank, k.end_ns, k.start_ns, place;
