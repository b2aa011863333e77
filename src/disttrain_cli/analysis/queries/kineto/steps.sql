-- One row per step and rank, by the marks of steps: names (the first pattern of a step that any event fits), else
-- arguments (step_num of annotations, iteration of all events). Marks without a number, in name or arguments, are
-- counted. measured: on all ranks that mark steps, and not the first of several (warm-up). Ranks that mark none and
-- were recorded at that time have the marks of the first rank that does (lent). Of steps that begin at the same time
-- the one that ends last counts. If marks end long before the next begins (a host that runs ahead), the last step is as
-- long as the distance between marks.
-- Columns: rank, step, start_ns, end_ns, until_ns, measured, lent
CREATE TABLE steps AS
WITH marks AS (
    SELECT f.rank, CASE WHEN s.line IS NOT NULL THEN s.line WHEN e.step >= 0 THEN 1000000 ELSE 2000000 END AS line,
           CASE WHEN s.number IS NOT NULL THEN s.number WHEN e.step >= 0 THEN e.step
                WHEN e.iteration >= 0 THEN e.iteration END AS number,
           coalesce(s.edge, 'whole') AS edge, e.start_ns, e.start_ns + e.duration_ns AS end_ns
    FROM raw_events e
    JOIN files f ON f.file = e.file AND f.kept
    JOIN categories c ON c.id = e.category AND c.class IN (0, 3, 5)
    LEFT JOIN step_names s ON s.name = e.name
    WHERE s.line IS NOT NULL OR e.step >= 0 OR e.iteration >= 0),
followed AS (
    SELECT rank, number, edge, start_ns, end_ns,
           min(end_ns) FILTER (edge = 'end') OVER after AS next_end_ns,
           min(start_ns) FILTER (edge = 'begin') OVER after AS next_begin_ns
    FROM marks WHERE line = (SELECT min(line) FROM marks)
    WINDOW after AS (PARTITION BY rank ORDER BY start_ns, edge = 'begin', number, end_ns
                     ROWS BETWEEN 1 FOLLOWING AND UNBOUNDED FOLLOWING)),
spans AS (
    SELECT rank, number, start_ns,
           CASE WHEN edge = 'whole' THEN end_ns
                WHEN next_end_ns <= coalesce(next_begin_ns, next_end_ns) THEN next_end_ns
                ELSE coalesce(nullif(end_ns, start_ns), next_begin_ns) END AS end_ns
    FROM followed WHERE edge <> 'end'),
counted AS (
    SELECT rank, start_ns, end_ns,
           CASE WHEN (SELECT bool_and(number IS NOT NULL) FROM spans) THEN number
                ELSE sum(fresh) OVER (PARTITION BY rank ORDER BY start_ns, end_ns) - 1 END AS step
    FROM (SELECT *, (start_ns >= coalesce(max(end_ns) OVER (
                         PARTITION BY rank ORDER BY start_ns, end_ns
                         ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING), start_ns))::INTEGER AS fresh
          FROM spans WHERE end_ns IS NOT NULL)),
found AS (
    SELECT rank, step::BIGINT AS step, min(start_ns) AS start_ns, max(end_ns) AS end_ns FROM counted GROUP BY rank, step
    QUALIFY row_number() OVER (PARTITION BY rank, min(start_ns) ORDER BY max(end_ns) DESC, step DESC) = 1),
common AS (
    SELECT step FROM found GROUP BY step HAVING count(*) = (SELECT count(DISTINCT rank) FROM found)),
lowest AS (
    SELECT * FROM found WHERE rank = (SELECT min(rank) FROM found)),
whole AS (SELECT min(start_ns) AS start_ns, max(end_ns) AS end_ns FROM lowest),
together AS (
    SELECT *, false AS lent FROM found
    UNION ALL
    SELECT f.rank, m.step, m.start_ns, m.end_ns, true
    FROM files f, whole w, lowest m
    WHERE f.kept AND f.rank NOT IN (SELECT rank FROM found)
      AND 2 * (least(f.last_ns, w.end_ns) - greatest(f.first_ns, w.start_ns)) > w.end_ns - w.start_ns)
SELECT rank, step, start_ns, end_ns,
       coalesce(next_ns, if(median((end_ns - start_ns) / nullif(next_ns - start_ns, 0)) OVER own < 0.8,
                            greatest(end_ns, start_ns + (median(next_ns - start_ns) OVER own)::BIGINT), end_ns)) AS until_ns,
       step IN (SELECT step FROM common)
           AND (step > (SELECT min(step) FROM common) OR (SELECT count(*) FROM common) = 1) AS measured, lent
FROM (SELECT *, lead(start_ns) OVER (PARTITION BY rank ORDER BY start_ns) AS next_ns FROM together)
WINDOW own AS (PARTITION BY rank)
ORDER BY rank, step;
