-- Calls in which the host waited for its device: synchronisations, and copies that return when they are done.
WITH calls AS (
    SELECT f.rank, n.name, e.thread, e.start_ns, e.start_ns + e.duration_ns AS end_ns
    FROM raw_events e JOIN files f ON f.file = e.file AND f.kept
    JOIN categories c ON c.id = e.category AND c.class = 4
    JOIN names n ON n.id = e.name AND (n.name ILIKE '%synchronize%' OR n.name ILIKE '%memcpy%'))
SELECT c.rank, c.start_ns, c.end_ns FROM calls c
LEFT JOIN raw_kernels k ON k.launched_by = c.thread AND k.launched_ns = c.start_ns
WHERE c.name ILIKE '%synchronize%' OR k.end_ns <= c.end_ns
ORDER BY c.rank, c.end_ns;
