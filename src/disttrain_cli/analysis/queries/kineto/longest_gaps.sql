-- The longest gap of every measured step and rank, if it is long, and the kernel that ends it.
SELECT g.rank, g.step, g.start_ns, g.end_ns, n.name AS kernel
FROM (SELECT *, row_number() OVER (PARTITION BY rank, step ORDER BY end_ns - start_ns DESC, start_ns) AS place
      FROM long_gaps) g
LEFT JOIN names n ON n.id = g.kernel
WHERE place = 1 ORDER BY g.rank, g.start_ns;
