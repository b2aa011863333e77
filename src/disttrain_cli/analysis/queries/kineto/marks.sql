-- Marks that the trainer set around its operations, by rank and start.
SELECT f.rank, n.name, e.thread, e.start_ns, e.start_ns + e.duration_ns AS end_ns
FROM raw_events e
JOIN files f ON f.file = e.file AND f.kept
JOIN names n ON n.id = e.name AND starts_with(n.name, 'disttrain ')
JOIN categories c ON c.id = e.category AND c.class = 5
ORDER BY f.rank, e.start_ns, end_ns DESC, n.name;
