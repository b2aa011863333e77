-- Recorded steps with the number of their rows, in order.
SELECT w.step, w.start_ns, w.end_ns, min(least(w.start_ns, s.first_ns)) AS first_ns, sum(s.rows)::BIGINT AS rows, any_value(w.measured) AS measured, any_value(t.loss) AS loss,
       any_value(t.mfu) AS mfu
FROM windows w JOIN seen s USING (step, run) LEFT JOIN steps t USING (step)
GROUP BY ALL ORDER BY w.step;
