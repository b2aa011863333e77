-- Calls in which the host waited for its device: synchronisations, copies that return when they are done, and loops
-- that poll (cudaEventQuery, cudaStreamQuery), from the last query but one: it failed, and the last one ended the loop.
-- Polling counts only in threads that launch kernels: NCCL's watchdog polls all the time, and nothing waits for it.
WITH calls AS (
    SELECT f.rank, n.name, e.thread, e.start_ns, e.start_ns + e.duration_ns AS end_ns, n.name ILIKE '%query%' AS polls
    FROM raw_events e JOIN files f ON f.file = e.file AND f.kept
    JOIN categories c ON c.id = e.category AND c.class = 4
    JOIN names n ON n.id = e.name AND regexp_matches(n.name, 'synchronize|memcpy|query|launch', 'i')),
followed AS (
    SELECT *, lag(start_ns) OVER own AS before_ns, lag(polls) OVER own AND NOT coalesce(lead(polls) OVER own, false) AS last
    FROM calls WINDOW own AS (PARTITION BY rank, thread ORDER BY start_ns, end_ns, polls))
SELECT c.rank, if(c.polls, c.before_ns, c.start_ns) AS start_ns, c.end_ns FROM followed c
LEFT JOIN raw_kernels k ON k.launched_by = c.thread AND k.launched_ns = c.start_ns
WHERE c.name ILIKE '%synchronize%' OR (c.name ILIKE '%memcpy%' AND k.end_ns <= c.end_ns)
   OR (c.polls AND c.last AND c.thread IN (SELECT launched_by FROM raw_kernels))
ORDER BY c.rank, c.end_ns, c.start_ns;
