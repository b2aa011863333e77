-- Ranks of one step in the order of the pipeline, with their compute time.
SELECT rank, any_value(unit) AS unit, min(stage) AS stage, any_value(replica) AS replica,
       if(any_value(cp) > 1, any_value(cp_rank), NULL) AS cp_rank,
       coalesce(sum(duration_ns) FILTER (operation IN ('forward', 'backward', 'weights')), 0)::BIGINT AS compute_ns
FROM operations JOIN units USING (unit, pp) WHERE step = $step GROUP BY rank ORDER BY min(depth), replica, rank;
