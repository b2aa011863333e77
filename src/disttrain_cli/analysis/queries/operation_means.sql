-- What does each operation of a stage take? Mean over slots, replicas and measured steps in ms, beside the profile's time
-- for the work that was recorded; per_step is how often one rank does it in a step.
SELECT unit, stage, if(operation IN ('forward', 'backward', 'weights'), module, NULL) AS module, operation, avg(duration_ns) / 1e6 AS measured_ms, avg(predicted_ms) AS predicted_ms,
       count(*) / count(DISTINCT (step, rank)) AS per_step
FROM operations
WHERE measured AND operation IN ('forward', 'backward', 'weights', 'load', 'send_activation', 'send_gradient')
GROUP BY ALL ORDER BY min(depth), module, operation;
