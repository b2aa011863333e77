-- One row per rank in matched collectives, and in messages at which a rank waited: how many it joined, how many last,
-- the expected number if every rank were last equally often, and the same for costly ones (the others wait there at
-- least a quarter of the mean waiting, each moment weighted equally, as in late.py); the time that others waited for it
-- in collectives; its own waiting, and that at messages.
WITH own AS (SELECT *, sum(wait_ns) OVER (PARTITION BY collective) AS waited_ns FROM waits),
counted AS (
    SELECT *, waited_ns >= 0.25 * coalesce(sum(waited_ns::DOUBLE * waited_ns) OVER of_rank
                                           / nullif(sum(waited_ns) OVER of_rank, 0), 0) AS costly
    FROM own WHERE NOT message OR waited_ns > 0
    WINDOW of_rank AS (PARTITION BY rank))
SELECT rank, count(*) AS joined, count(*) FILTER (is_last) AS last, sum(1.0 / ranks) AS expected,
       count(*) FILTER (costly) AS costly_joined, count(*) FILTER (is_last AND costly) AS costly_last,
       coalesce(sum(1.0 / ranks) FILTER (costly), 0) AS costly_expected,
       coalesce(sum(waited_ns) FILTER (is_last AND NOT message), 0)::BIGINT AS blamed_ns,
       sum(wait_ns)::BIGINT AS wait_ns, coalesce(sum(wait_ns) FILTER (message), 0)::BIGINT AS wait_at_messages_ns
FROM counted
GROUP BY rank
ORDER BY blamed_ns DESC, rank;
