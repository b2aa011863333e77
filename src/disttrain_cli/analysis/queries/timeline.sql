-- Rows of one step and some ranks for drawing, in µs from its start.
SELECT o.rank, o.operation, o.module, o.slot, (o.start_ns - w.start_ns) / 1e3 AS start_us, o.duration_ns / 1e3 AS duration_us
FROM operations o JOIN windows w USING (step) WHERE o.step = $step AND list_contains($ranks, o.rank)
ORDER BY o.rank, o.start_ns;
