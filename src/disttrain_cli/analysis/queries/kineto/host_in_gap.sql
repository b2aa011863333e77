-- Event that the host of rank $rank ran between $start and $end: the innermost one that lasts at least half of that
-- time.
WITH launching AS (SELECT DISTINCT launched_by AS thread FROM raw_kernels WHERE rank = $rank)
SELECT n.name
FROM raw_events e
JOIN files f ON f.file = e.file AND f.kept AND f.rank = $rank
JOIN categories c ON c.id = e.category
JOIN names n ON n.id = e.name AND NOT starts_with(n.name, 'PyTorch Profiler')
WHERE (c.class IN (3, 4, 5) OR (c.class = 7 AND e.thread IN (FROM launching)))
  AND e.step < 0 AND e.name NOT IN (SELECT name FROM step_names)
  AND least(e.start_ns + e.duration_ns, $end) - greatest(e.start_ns, $start) >= ($end - $start) / 2
ORDER BY e.duration_ns, e.start_ns DESC, n.name
LIMIT 1;
