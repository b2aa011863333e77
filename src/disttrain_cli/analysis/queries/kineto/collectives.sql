-- The collectives that cost most waiting.
SELECT any_value(name) AS name, any_value(process_group) AS "group", any_value(step) AS step, any_value(index) AS index,
       any_value(ranks) AS ranks, max(rank) FILTER (is_last) AS last_rank, max(wait_ns) / 1e3 AS longest_wait_us,
       sum(wait_ns) / (any_value(ranks) - 1) / 1e3 AS mean_wait_us, any_value(transfer_ns) / 1e3 AS transfer_us
FROM waits
GROUP BY collective
ORDER BY sum(wait_ns) DESC, collective
LIMIT 50;
