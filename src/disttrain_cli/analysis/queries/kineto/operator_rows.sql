-- Operators by name and shapes, those that take most time first.
WITH sums AS (
    SELECT shape, count(*) AS count, sum(ns) AS ns FROM counted WHERE ns IS NOT NULL GROUP BY shape)
SELECT n.name, s.dims AS shapes, s.dtype, c.count, c.ns / 1e3 AS total_us,
       c.ns / (SELECT sum(end_ns - start_ns) FROM raw_kernels
               WHERE measured AND kind IN ('compute', 'unclassified')) AS share,
       s.flops, s.flops * c.count / nullif(c.ns, 0) / 1e3 AS tflops, s.flops / nullif(s.bytes, 0) AS flops_per_byte
FROM sums c JOIN shapes s ON s.id = c.shape JOIN names n ON n.id = s.name
WHERE s.flops IS NOT NULL
ORDER BY total_us DESC, n.name, shapes
LIMIT 60;
