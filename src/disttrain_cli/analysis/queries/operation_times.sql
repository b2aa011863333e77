-- Where does each unit's time go? Mean seconds per step and rank, by unit, stage, replica and operation.
WITH counts AS (SELECT count(*) AS steps FROM windows WHERE measured)
SELECT unit, stage, replica, operation, count(*) AS rows, count(DISTINCT rank) AS ranks,
       sum(duration_ns) / 1e9 / count(DISTINCT rank) / any_value(steps) AS s_per_step,
       avg(duration_ns) / 1e6 AS mean_ms, max(duration_ns) / 1e6 AS max_ms
FROM operations, counts WHERE measured
GROUP BY unit, stage, replica, operation ORDER BY unit, stage, replica, operation;
