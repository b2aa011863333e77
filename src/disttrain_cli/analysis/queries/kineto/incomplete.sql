-- Share of the time of communication, without waiting for present ranks, that is in collectives and messages whose
-- ranks are not all present, or not known: if ranks are missing, it may be waiting for them.
WITH job AS (SELECT max(world_size) AS size FROM files WHERE kept),
moved AS (
    SELECT k.end_ns - k.start_ns - coalesce(w.wait_ns, 0) AS ns,
           coalesce(j.ranks >= coalesce(nullif(j.size, -1), nullif(len(regexp_extract_all(j.members, '\d+')), 0), job.size),
                    false) OR coalesce(w.message, false) AS complete
    FROM raw_kernels k
    CROSS JOIN job
    LEFT JOIN joined j ON j.place = k.rowid
    LEFT JOIN waits w ON w.place = k.rowid
    WHERE k.kind = 'communication' AND k.measured)
SELECT coalesce(sum(ns) FILTER (NOT complete) / nullif(sum(ns), 0), 0) AS share FROM moved;
