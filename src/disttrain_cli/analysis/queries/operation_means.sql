-- Time of each operation of a stage: mean over slots, replicas and measured steps in ms, and the profile's prediction
-- for the recorded work; per_step is the number of times that one rank does it in a step.
SELECT unit, stage, if(operation IN ('forward', 'backward', 'weights'), module, NULL) AS module, operation, avg(duration_ns) / 1e6 AS measured_ms, avg(predicted_ms) AS predicted_ms,
       count(*) / count(DISTINCT (step, rank)) AS per_step
FROM operations
WHERE measured AND operation IN ('forward', 'backward', 'weights', 'load', 'send_activation', 'send_gradient')
GROUP BY ALL ORDER BY min(depth), module, operation;
