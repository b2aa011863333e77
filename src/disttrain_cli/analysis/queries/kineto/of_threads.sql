-- Contents of the threads of a file ($file): events, their first and last times, kernels and launches among them.
SELECT e.thread, count(*) AS events, min(e.start_ns) AS first_ns, max(e.start_ns + e.duration_ns) AS last_ns,
       count(*) FILTER (c.class BETWEEN 1 AND 5) AS works
FROM raw_events e
JOIN categories c ON c.id = e.category
WHERE e.file = $file
GROUP BY ALL
ORDER BY e.thread;
