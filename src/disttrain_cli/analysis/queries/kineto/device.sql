-- Whether any kernel of the analysed files was recorded.
SELECT count(*) > 0
FROM raw_events e
JOIN files f ON f.file = e.file AND f.kept
JOIN categories c ON c.id = e.category
WHERE c.class = 1;
