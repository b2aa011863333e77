-- Compute of the ranks in the measured time, by rank and start.
SELECT rank, start_ns, end_ns, if(launched_by IS NULL, start_ns, launched_ns) AS launched_ns
FROM raw_kernels
WHERE kind IN ('compute', 'unclassified') AND end_ns > start_ns
  AND start_ns < (SELECT max(end_ns) FROM waits) AND end_ns > (SELECT min(start_ns) FROM raw_kernels WHERE measured)
ORDER BY rank, start_ns, end_ns, launched_ns;
