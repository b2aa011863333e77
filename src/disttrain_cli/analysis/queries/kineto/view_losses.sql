-- Breakdown of the measured steps of every rank: every moment is of one cause.
CREATE VIEW losses AS
UNPIVOT (
    SELECT rank, step, compute_ns / 1e9 AS compute, exposed_wait_ns / 1e9 AS waiting,
           (exposed_ns - exposed_wait_ns) / 1e9 AS transfers, memory_ns / 1e9 AS copies, idle_data_ns / 1e9 AS data,
           idle_host_wait_ns / 1e9 AS host_waiting, (idle_cpu_ns + idle_late_ns) / 1e9 AS host,
           (idle_queued_ns + idle_unrecorded_ns) / 1e9 AS unexplained
    FROM step_times)
ON compute, waiting, transfers, copies, data, host_waiting, host, unexplained INTO NAME cause VALUE seconds;
