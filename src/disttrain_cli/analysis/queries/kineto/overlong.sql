-- Kernels, copies and fills with an impossible length: they outlast a later one of their stream by more than 20 µs.
-- They are shortened to end where the next one begins, and to be no longer than the longest valid one of their name.
-- Exempt are those of one launch (a CUDA graph may run them at once), communication next to compute, and names of which
-- half do so: there a profiler has put several queues on one row. In 45 public traces kernels reach up to 13 µs into
-- the next one, by programmatic launches and rounded times, and outlast none. Not exempt are kernels that reach into
-- the next one and are longer than all that their host recorded (100 ms at least), or whose length has overflowed: 2^32
-- ns or more, and without the multiple of 2^32 ns (2^32 µs is one) they end before the next one begins; that remainder
-- is then their length. The last one of a stream has no later one: it is shortened if it is over three times as long as
-- any other of its name (if there is none: as all that its host recorded, and as 100 ms) and ends after all else, of
-- its file or, for communication, after the kernels of all files.
CREATE TEMP TABLE overlong AS
WITH hosts AS (
    SELECT e.file, greatest(max(e.start_ns + e.duration_ns) - min(e.start_ns), 100_000_000) AS recorded_ns
    FROM raw_events e
    JOIN categories c ON c.id = e.category AND c.class NOT IN (1, 2, 6)
    GROUP BY e.file),
on_device AS (
    SELECT e.rowid AS place, e.file, e.name, e.start_ns, e.start_ns + e.duration_ns AS end_ns, e.duration_ns,
           e.call >= 0 OR coalesce(k.kind = 'communication', false) AS communicates, e.thread, e.device, e.stream, if(e.correlation >= 0, e.correlation, -e.rowid - 2) AS launch
    FROM raw_events e
    JOIN files f ON f.file = e.file AND f.kept
    JOIN categories c ON c.id = e.category AND c.class IN (1, 2)
    LEFT JOIN kinds k ON k.name = e.name),
launched AS (
    SELECT *, min(start_ns) OVER (PARTITION BY file, thread, device, stream, communicates, launch) AS begins_ns
    FROM on_device),
followed AS (
    SELECT place, file, name, start_ns, end_ns, duration_ns, communicates, min(begins_ns) OVER later AS next_ns,
           coalesce(end_ns > 20_000 + min(end_ns) FILTER (duration_ns > 0) OVER later, false) AS outlasts,
           if(duration_ns >= 4_294_967_296, duration_ns % 4_294_967_296, NULL) AS remainder_ns
    FROM launched
    WINDOW later AS (PARTITION BY file, thread, device, stream, communicates ORDER BY begins_ns
                     GROUPS BETWEEN 1 FOLLOWING AND UNBOUNDED FOLLOWING)),
bounded AS (
    SELECT f.*, recorded_ns, coalesce(end_ns > next_ns + 20_000 AND start_ns + remainder_ns <= next_ns + 20_000, false) AS overflowed,
           overflowed OR coalesce(end_ns > next_ns + 20_000 AND duration_ns > recorded_ns, false) AS impossible
    FROM followed f LEFT JOIN hosts USING (file)),
suspects AS (
    SELECT *, count(*) FILTER (outlasts AND NOT impossible) OVER (PARTITION BY name) AS bad
    FROM bounded WHERE outlasts OR impossible OR next_ns IS NULL),
sound AS (
    SELECT name, count(*) FILTER (NOT impossible) AS good,
           coalesce(max(duration_ns) FILTER (NOT impossible), max(remainder_ns) FILTER (overflowed)) AS longest_ns
    FROM bounded
    WHERE (overflowed OR NOT (outlasts OR impossible)) AND next_ns IS NOT NULL AND name IN (SELECT name FROM suspects)
    GROUP BY name),
judged AS (
    SELECT *, impossible OR (outlasts AND bad <= greatest(1, coalesce(good, 0))) AS overtakes,
           next_ns IS NULL AND duration_ns > coalesce(3 * longest_ns, recorded_ns) AS last
    FROM suspects LEFT JOIN sound USING (name)),
ends AS (
    SELECT e.file, max(e.start_ns + e.duration_ns) AS own_ns,
           max(max(e.start_ns + e.duration_ns) FILTER (c.class < 3)) OVER () AS kernels_ns
    FROM raw_events e
    JOIN files f ON f.file = e.file AND f.kept
    JOIN categories c ON c.id = e.category AND c.class <> 6
    WHERE e.rowid NOT IN (SELECT place FROM judged WHERE last OR overtakes)
    GROUP BY e.file),
mended AS (
    SELECT j.place, j.file, j.duration_ns AS before_ns,
           CASE WHEN NOT overtakes AND end_ns <= own_ns THEN NULL
                WHEN remainder_ns <= 3 * longest_ns OR (longest_ns IS NULL AND start_ns + remainder_ns <= own_ns) THEN remainder_ns
                WHEN overtakes THEN least(next_ns - start_ns, coalesce(longest_ns, next_ns - start_ns))
                WHEN communicates THEN greatest(longest_ns, nullif(greatest(0, kernels_ns - start_ns), 0))
                ELSE coalesce(longest_ns, nullif(greatest(0, own_ns - start_ns), 0)) END AS duration_ns
    FROM judged j LEFT JOIN ends USING (file)
    WHERE overtakes OR last)
SELECT place, file, duration_ns FROM mended WHERE duration_ns < before_ns;
UPDATE raw_events SET duration_ns = o.duration_ns FROM overlong o WHERE raw_events.rowid = o.place;
SELECT f.name, f.rank, count(*) AS events FROM overlong o JOIN files f USING (file) GROUP BY ALL ORDER BY events DESC, f.rank;
