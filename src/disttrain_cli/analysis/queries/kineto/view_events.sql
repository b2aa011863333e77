-- One row per complete event of the analysed files, as written, and per instant that marks a step (those without a rank
-- for every rank of their file); times in ns on the clock of all files, -1 for missing numbers.
-- Columns: rank, category, name, process, thread, thread_name, start_ns, duration_ns, device, stream, correlation,
-- external_id, bytes
CREATE VIEW events AS
SELECT f.rank, c.name AS category, n.name, t.process, t.thread, t.thread_name, e.start_ns, e.duration_ns, e.device,
       e.stream, e.correlation, e.external_id, e.bytes
FROM raw_events e
JOIN files f ON f.file = e.file AND f.kept
JOIN categories c ON c.id = e.category
JOIN names n ON n.id = e.name
JOIN threads t ON t.id = e.thread;
