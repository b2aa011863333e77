-- Traces without Kineto's categories: events on threads that are named as streams of a device are its kernels and copies.
CREATE TEMP TABLE streams AS
SELECT id FROM threads
WHERE (regexp_matches(thread_name, '^(Stream #?\d|XLA Ops)', 'i') OR regexp_matches(thread, '^Stream #?\d', 'i'))
  AND NOT EXISTS (FROM categories WHERE class = 1);
CREATE TEMP TABLE of_streams AS
SELECT (SELECT max(id) FROM categories) + class AS id, class FROM (VALUES (1), (2)) AS of(class)
WHERE EXISTS (FROM streams);
INSERT INTO categories SELECT id, 'of a stream', class FROM of_streams;
UPDATE raw_events SET category = s.id
FROM of_streams s, names n
WHERE raw_events.thread IN (FROM streams) AND n.id = raw_events.name
  AND s.class = CASE WHEN regexp_matches(n.name, '^(\[CUDA )?mem(cpy|set)', 'i') THEN 2 ELSE 1 END;
