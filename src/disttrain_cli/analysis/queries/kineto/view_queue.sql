-- One row per change of a stream's queue: kernels of measured steps that are launched and have not begun.
CREATE VIEW queue AS
WITH launched AS (
    SELECT rank, stream, launched_ns, start_ns FROM raw_kernels
    WHERE measured AND launched_by IS NOT NULL AND launched_ns <= start_ns
      AND EXISTS (SELECT 1 FROM categories WHERE class = 1)),
edges AS (
    SELECT rank, stream, launched_ns AS at_ns, 1 AS change FROM launched
    UNION ALL
    SELECT rank, stream, start_ns, -1 FROM launched),
changes AS (SELECT rank, stream, at_ns, sum(change) AS change FROM edges GROUP BY ALL)
SELECT rank, stream, at_ns, (sum(change) OVER (PARTITION BY rank, stream ORDER BY at_ns))::BIGINT AS length FROM changes;
