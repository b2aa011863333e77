-- Operations of the ranks from $first to $last over the measured steps. Waiting for data is no operation.
SELECT rank, start_ns, end_ns, operation IN ('forward', 'backward', 'weights') AS computes,
       operation LIKE 'send%' OR operation LIKE 'receive%' OR operation IN ('wait', 'reduce') AS communicates
FROM operations WHERE measured AND operation <> 'load' AND rank BETWEEN $first AND $last
ORDER BY rank, start_ns, end_ns;
