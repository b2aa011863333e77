-- Where the span of every rank went: every moment is of one cause.
CREATE VIEW losses AS
UNPIVOT (
    SELECT rank, compute_ns / 1e9 AS compute, exposed_wait_ns / 1e9 AS waiting, (exposed_ns - exposed_wait_ns) / 1e9 AS transfers,
           memory_ns / 1e9 AS copies, idle_data_ns / 1e9 AS data, (idle_ns - idle_data_ns) / 1e9 AS host
    FROM times)
ON compute, waiting, transfers, copies, data, host INTO NAME cause VALUE seconds;
