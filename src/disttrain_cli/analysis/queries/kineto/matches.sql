-- One row per rank and collective: the same operation of the same group, the how manieth in the step. Only where
-- every rank that takes part does so equally often; sends and receives are of two ranks and left out.
CREATE TABLE joined AS
WITH parts AS (
    SELECT k.rowid AS place, k.rank, k.step, k.start_ns, k.end_ns, k.operation,
           CASE WHEN coalesce(c.process_group, '') <> '' THEN c.process_group ELSE 'stream' END AS process_group,
           coalesce(c.members, '') AS members, c.size,
           coalesce(nullif(c.collective, ''), k.operation, 'collective') AS name
    FROM raw_kernels k
    LEFT JOIN calls c ON c.id = k.call
    WHERE k.kind = 'communication' AND k.measured
      AND lower(coalesce(nullif(c.collective, ''), k.operation, '')) NOT IN ('send', 'recv')),
numbered AS (
    SELECT *, row_number() OVER (PARTITION BY rank, step, process_group, members, name
                                 ORDER BY start_ns, end_ns, place) - 1 AS index,
           count(*) OVER (PARTITION BY rank, step, process_group, members, name) AS own
    FROM parts)
SELECT *, dense_rank() OVER (ORDER BY step, process_group, members, name, index) AS collective,
       count(*) OVER same AS ranks,
       min(own) OVER (PARTITION BY step, process_group, members, name)
           = max(own) OVER (PARTITION BY step, process_group, members, name) AS even
FROM numbered
WINDOW same AS (PARTITION BY step, process_group, members, name, index);
