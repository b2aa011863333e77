-- Activity of a rank: its kernels, copies and fills, or operators of the CPU if it has none. Outer ones first; thread
-- -1: on the device.
WITH own AS (
    SELECT e.name, e.thread, e.start_ns, e.start_ns + e.duration_ns AS end_ns, c.class
    FROM raw_events e
    JOIN files f ON f.file = e.file AND f.kept AND f.rank = $rank
    JOIN categories c ON c.id = e.category AND c.class IN (1, 2, 3)),
device AS (SELECT count(*) > 0 AS any FROM own WHERE class < 3)
SELECT name, if(device.any, -1, thread) AS thread, start_ns, end_ns FROM own, device WHERE (class < 3) = device.any
ORDER BY start_ns, end_ns DESC, name, own.thread;
