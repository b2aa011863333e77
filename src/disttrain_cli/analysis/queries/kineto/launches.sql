-- Begin of the call that launched each kernel, copy or fill, by file and correlation.
CREATE TEMP TABLE launches AS
SELECT e.file, e.correlation, min(e.start_ns) AS launched_ns, arg_min(e.thread, e.start_ns) AS launched_by
FROM raw_events e
JOIN categories c ON c.id = e.category AND c.class = 4
WHERE e.correlation >= 0
GROUP BY ALL;
