-- Names to which patterns are applied: of kernels, operators and annotations.
SELECT DISTINCT n.id, n.name
FROM raw_events e
JOIN names n ON n.id = e.name
JOIN categories c ON c.id = e.category
WHERE c.class IN (0, 1, 3, 5)
ORDER BY n.id;
