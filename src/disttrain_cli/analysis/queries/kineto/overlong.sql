-- Kernels, copies and fills whose length is impossible: they outlast a later one of their stream by more than 20 µs. They end
-- where the next one begins, and are no longer than the longest sound one of their name. Exempt are those of one launch (a
-- CUDA graph may run them at once), communication beside compute, and names of which half do so: there a profiler has put
-- several queues on one row. In 45 public traces kernels reach up to 13 µs into the next one, by programmatic launches and
-- rounded times, and outlast none. The last one of a stream has no later one: it is shortened where it is over three times as
-- long as any other of its name (where there is none: as all that its host recorded, and as 100 ms) and ends after all else,
-- of its file or, of communication, after the kernels of all files.
CREATE TEMP TABLE overlong AS
WITH on_device AS (
    SELECT e.rowid AS place, e.file, e.name, e.start_ns, e.start_ns + e.duration_ns AS end_ns, e.duration_ns,
           e.call >= 0 OR coalesce(k.kind = 'communication', false) AS communicates, e.thread, e.device, e.stream,
           f.last_ns - f.first_ns AS recorded_ns, if(e.correlation >= 0, e.correlation, -e.rowid - 2) AS launch
    FROM raw_events e
    JOIN files f ON f.file = e.file AND f.kept
    JOIN categories c ON c.id = e.category AND c.class IN (1, 2)
    LEFT JOIN kinds k ON k.name = e.name),
launched AS (
    SELECT *, min(start_ns) OVER (PARTITION BY file, thread, device, stream, communicates, launch) AS begins_ns
    FROM on_device),
followed AS (
    SELECT place, file, name, start_ns, end_ns, duration_ns, communicates, recorded_ns, min(begins_ns) OVER later AS next_ns,
           coalesce(end_ns > 20_000 + min(end_ns) FILTER (duration_ns > 0) OVER later, false) AS outlasts
    FROM launched
    WINDOW later AS (PARTITION BY file, thread, device, stream, communicates ORDER BY begins_ns
                     GROUPS BETWEEN 1 FOLLOWING AND UNBOUNDED FOLLOWING)),
suspects AS (SELECT *, sum(outlasts::INTEGER) OVER (PARTITION BY name) AS bad FROM followed WHERE outlasts OR next_ns IS NULL),
sound AS (
    SELECT name, count(*) AS good, max(duration_ns) AS longest_ns FROM followed
    WHERE NOT outlasts AND next_ns IS NOT NULL AND name IN (SELECT name FROM suspects) GROUP BY name),
judged AS (
    SELECT *, outlasts AND bad <= greatest(1, coalesce(good, 0)) AS overtakes,
           next_ns IS NULL AND duration_ns > coalesce(3 * longest_ns, greatest(recorded_ns, 100_000_000)) AS last
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
           CASE WHEN overtakes THEN least(next_ns - start_ns, coalesce(longest_ns, next_ns - start_ns))
                WHEN communicates THEN greatest(longest_ns, nullif(greatest(0, kernels_ns - start_ns), 0))
                WHEN end_ns > own_ns THEN coalesce(longest_ns, nullif(greatest(0, own_ns - start_ns), 0)) END AS duration_ns
    FROM judged j LEFT JOIN ends USING (file)
    WHERE overtakes OR last)
SELECT place, file, duration_ns FROM mended WHERE duration_ns < before_ns;
UPDATE raw_events SET duration_ns = o.duration_ns FROM overlong o WHERE raw_events.rowid = o.place;
SELECT f.name, f.rank, count(*) AS events FROM overlong o JOIN files f USING (file) GROUP BY ALL ORDER BY events DESC, f.rank;
