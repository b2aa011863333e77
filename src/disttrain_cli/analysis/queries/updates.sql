-- Time of a stage's reduction and optimizer step without waiting: the shortest row among its ranks in a step, as the
-- others wait. An optimizer step begins with a norm over all ranks, so it counts from the last one's arrival. Mean over
-- the measured steps in ms.
WITH rows AS (
    SELECT step, unit, stage, operation, duration_ns,
           end_ns - max(start_ns) OVER (PARTITION BY step, operation) AS after_last_ns
    FROM operations WHERE measured AND operation IN ('reduce', 'step')
), shortest AS (
    SELECT step, unit, stage, operation,
           min(if(operation = 'step', greatest(0, after_last_ns), duration_ns)) AS ns
    FROM rows GROUP BY ALL
)
SELECT unit, stage, operation, avg(ns) / 1e6 AS measured_ms FROM shortest GROUP BY unit, stage, operation;
