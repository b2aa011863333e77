-- One row per rank that takes part in matched collectives, and in messages at which someone waited: in how many, in how
-- many the last, the chance of that if everyone were last equally often, and the time that others waited for it in
-- collectives; its own waiting, and that at messages.
SELECT rank, count(*) AS joined, count(*) FILTER (is_last) AS last, sum(1.0 / ranks) AS expected,
       coalesce(sum(waited_ns) FILTER (is_last AND NOT message), 0)::BIGINT AS blamed_ns,
       sum(wait_ns)::BIGINT AS wait_ns, coalesce(sum(wait_ns) FILTER (message), 0)::BIGINT AS wait_at_messages_ns
FROM (SELECT *, sum(wait_ns) OVER (PARTITION BY collective) AS waited_ns FROM waits)
WHERE NOT message OR waited_ns > 0
GROUP BY rank
ORDER BY blamed_ns DESC, rank;
