-- Start and end of the last operation of a step on every host, in which all ranks wait for each other (the norm of the
-- gradients): no rank leaves before the last has joined.
SELECT step, host, max(start_ns) AS came_ns, min(end_ns) AS left_ns
FROM recorded WHERE operation = 'step' GROUP BY ALL ORDER BY ALL;
