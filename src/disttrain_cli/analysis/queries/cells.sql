-- Compute time of every stage and replica per slot: mean over the measured steps, and the profile's prediction for the
-- same work. Ratios are to the mean of the unit; `normalised` is the slowness that the work does not explain.
WITH passes AS (
    SELECT step, slot, unit, stage, replica, depth, sum(duration_ns) / 1e6 / count(DISTINCT rank) AS ms,
           sum(predicted_ms) / count(DISTINCT rank) AS predicted_ms
    FROM operations WHERE measured AND operation IN ('forward', 'backward', 'weights') GROUP BY ALL
), cells AS (
    SELECT unit, stage, replica, depth, avg(ms) AS mean_ms, max(ms) AS max_ms, avg(predicted_ms) AS predicted_ms
    FROM passes GROUP BY unit, stage, replica, depth
)
SELECT *, mean_ms / nullif(avg(mean_ms) OVER unit, 0) AS ratio,
       (mean_ms / nullif(predicted_ms, 0)) / nullif(sum(mean_ms) OVER unit / nullif(sum(predicted_ms) OVER unit, 0), 0)
           AS normalised
FROM cells WINDOW unit AS (PARTITION BY unit) ORDER BY depth, replica;
