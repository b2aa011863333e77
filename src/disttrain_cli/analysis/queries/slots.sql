-- Compute time of every slot, mean over the ranks that have it, and the prediction for its work: shows heavy
-- microbatches.
WITH passes AS (
    SELECT slot, sum(duration_ns) / 1e6 / count(DISTINCT (step, rank)) AS ms,
           sum(predicted_ms) / count(DISTINCT (step, rank)) AS predicted_ms
    FROM operations WHERE measured AND operation IN ('forward', 'backward', 'weights') GROUP BY slot
)
SELECT *, ms / nullif(avg(ms) OVER (), 0) AS ratio, predicted_ms / nullif(avg(predicted_ms) OVER (), 0) AS work_ratio
FROM passes ORDER BY slot;
