-- Forward and backward of each unit for one slot: stages summed, replicas averaged, mean over measured steps, in
-- ms; `same_work_ms` is the profile's time for the very work that was recorded.
WITH stages AS (
    SELECT step, slot, unit, stage, replica, operation, sum(duration_ns) / 1e6 / count(DISTINCT rank) AS ms,
           sum(predicted_ms) / count(DISTINCT rank) AS predicted_ms
    FROM operations WHERE measured AND operation IN ('forward', 'backward') GROUP BY ALL
), means AS (
    SELECT unit, stage, operation, avg(ms) AS ms, avg(predicted_ms) AS predicted_ms FROM stages
    GROUP BY unit, stage, operation
)
SELECT unit, operation, sum(ms) AS measured_ms, sum(predicted_ms) AS same_work_ms FROM means GROUP BY unit, operation
UNION ALL
SELECT unit, 'stage', max(ms), max(predicted_ms)
FROM (SELECT unit, stage, sum(ms) AS ms, sum(predicted_ms) AS predicted_ms FROM means GROUP BY unit, stage) GROUP BY unit
ORDER BY unit, operation;
