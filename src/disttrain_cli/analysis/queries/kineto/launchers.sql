-- Processes of a file ($file) that may have launched the kernels of its devices ($devices): by correlation, they have
-- launches for half of them or more, none later than its kernel begins but for 1 %; of several, those that fit most
-- kernels. If processes number their launches alike, only times distinguish them.
WITH calls AS (
    SELECT t.process, e.correlation, min(e.start_ns) AS launched_ns
    FROM raw_events e
    JOIN categories c ON c.id = e.category AND c.class = 4
    JOIN threads t ON t.id = e.thread
    WHERE e.file = $file AND e.correlation > 0
    GROUP BY ALL),
kernels AS (
    SELECT e.device, e.correlation, e.start_ns, count(*) OVER (PARTITION BY e.device) AS kernels
    FROM raw_events e
    JOIN categories c ON c.id = e.category AND c.class = 1
    WHERE e.file = $file AND e.device IN (SELECT unnest($devices)))
SELECT k.device, l.process
FROM kernels k JOIN calls l USING (correlation)
GROUP BY k.device, l.process
HAVING 2 * count(*) >= any_value(k.kernels) AND count(*) FILTER (launched_ns <= start_ns) >= 0.99 * count(*)
QUALIFY count(*) FILTER (launched_ns <= start_ns) = max(count(*) FILTER (launched_ns <= start_ns)) OVER (PARTITION BY k.device)
ORDER BY ALL;
