-- Queue of every stream: launched kernels that have not begun, mean over the time from its first launch to its last
-- start.
WITH spans AS (
    SELECT *, lead(at_ns) OVER (PARTITION BY rank, stream ORDER BY at_ns) - at_ns AS ns FROM queue),
sums AS (
    SELECT rank, stream, sum(length * ns) / sum(ns) AS mean, max(length) AS longest,
           coalesce(sum(ns) FILTER (length = 0), 0) / sum(ns) AS empty_share
    FROM spans GROUP BY ALL HAVING sum(ns) > 0)
SELECT rank, stream, k.kernels, mean, longest, empty_share
FROM sums JOIN (SELECT rank, stream, count(*) AS kernels FROM raw_kernels WHERE measured GROUP BY ALL) k USING (rank, stream)
ORDER BY kernels DESC, rank, stream;
