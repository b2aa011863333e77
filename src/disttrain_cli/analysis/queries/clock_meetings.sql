-- When did the ranks of a host come to the end of a step, where all wait for each other (the norm of the gradients)? None
-- leaves before the last has come.
SELECT step, host, max(start_ns) AS came_ns, min(end_ns) AS left_ns
FROM recorded WHERE operation = 'step' GROUP BY ALL ORDER BY ALL;
