-- One row per rank that takes part in matched collectives: in how many, in how many the last, the chance of that if
-- everyone were last equally often, and the time that all others waited for it.
SELECT rank, count(*) AS joined, count(*) FILTER (is_last) AS last, sum(1.0 / ranks) AS expected,
       sum(CASE WHEN is_last THEN waited_ns ELSE 0 END)::BIGINT AS blamed_ns
FROM (SELECT *, sum(wait_ns) OVER (PARTITION BY collective) AS waited_ns FROM waits)
GROUP BY rank
ORDER BY blamed_ns DESC, rank;
