-- Matched collectives by kind and number of ranks. Bytes that a rank contributes are those of the call's elements, or
-- of the shapes of the annotation around its launch. bus: bytes over the time, as nccl-tests counts them for a rank's
-- link.
WITH parts AS (
    SELECT w.collective, w.name, w.ranks, w.wait_ns, w.transfer_ns,
           coalesce(c.elements * i.bytes, if(k.launched_ns <= s.end_ns, s.bytes, NULL)) AS bytes
    FROM waits w JOIN raw_kernels k ON k.rowid = w.place
    LEFT JOIN calls c ON c.id = k.call AND c.elements > 0
    LEFT JOIN item_bytes i ON i.dtype = c.dtype
    ASOF LEFT JOIN (SELECT d.thread, d.start_ns, d.end_ns, s.bytes FROM counted d JOIN shapes s ON s.id = d.shape
                    WHERE s.flops IS NULL) s
        ON s.thread = k.launched_by AND k.launched_ns >= s.start_ns
    WHERE NOT w.message),
each AS (
    SELECT any_value(name) AS kind, any_value(ranks) AS ranks, max(bytes) AS bytes, max(transfer_ns) AS transfer_ns,
           max(wait_ns) AS wait_ns
    FROM parts GROUP BY collective),
rated AS (
    SELECT *, lower(replace(kind, '_', '')) AS plain,
           CASE WHEN plain LIKE '%allreduce%' THEN 2.0 * (ranks - 1) / ranks
                WHEN plain LIKE '%allgather%' THEN ranks - 1.0
                WHEN plain LIKE '%reducescatter%' OR plain LIKE '%alltoall%' OR plain LIKE '%sendrecv%'
                    THEN 1.0 * (ranks - 1) / ranks
                ELSE 1.0 END AS factor
    FROM each)
SELECT kind, ranks, count(*) AS count, quantile_cont(bytes, 0.5) AS bytes_p50,
       quantile_cont(transfer_ns, 0.5) / 1e3 AS transfer_p50_us, quantile_cont(transfer_ns, 0.95) / 1e3 AS transfer_p95_us,
       max(transfer_ns) / 1e3 AS transfer_max_us, quantile_cont(wait_ns, 0.5) / 1e3 AS wait_p50_us,
       quantile_cont(wait_ns, 0.95) / 1e3 AS wait_p95_us, max(wait_ns) / 1e3 AS wait_max_us,
       quantile_cont(factor * bytes / nullif(transfer_ns, 0), 0.5) AS bus_gbytes_s
FROM rated GROUP BY kind, ranks ORDER BY sum(transfer_ns + wait_ns) DESC, kind, ranks;
