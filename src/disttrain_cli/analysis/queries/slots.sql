-- Which microbatch is heavy? Mean compute time of a slot over all ranks, beside what its work predicts.
WITH passes AS (
    SELECT slot, sum(duration_ns) / 1e6 / count(DISTINCT step) AS ms, sum(predicted_ms) / count(DISTINCT step) AS predicted_ms,
           sum(tokens) / count(DISTINCT step) AS tokens
    FROM operations WHERE measured AND operation IN ('forward', 'backward') GROUP BY slot
)
SELECT *, ms / nullif(avg(ms) OVER (), 0) AS ratio, predicted_ms / nullif(avg(predicted_ms) OVER (), 0) AS work_ratio
FROM passes ORDER BY slot;
