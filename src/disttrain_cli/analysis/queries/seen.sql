-- One pass over all rows: begin, end and number of rows of every start, step and rank. `first_ns` and `latest_ns` are
-- starts of any row, the others leave out evaluations and checkpoints.
CREATE TABLE seen AS
SELECT run, step, rank, any_value(host) AS host, any_value(unit) AS unit, min(stage) AS stage, any_value(replica) AS replica,
       any_value(tp_rank) AS tp_rank, coalesce(any_value(cp_rank), 0) AS cp_rank,
       min(start_ns) AS first_ns, max(start_ns) AS latest_ns,
       min(start_ns) FILTER (operation NOT IN ('evaluation', 'checkpoint')) AS start_ns,
       max(end_ns) FILTER (operation NOT IN ('evaluation', 'checkpoint')) AS end_ns,
       max(end_ns) FILTER (operation IN ('forward', 'backward', 'weights')) AS compute_end_ns,
       count(*) FILTER (operation IN ('forward', 'backward', 'weights')) AS computed, count(*) AS rows
FROM segments GROUP BY run, step, rank;
