-- Ranks with their coordinates in the pipeline.
SELECT rank, any_value(u.place) AS place, any_value(t.unit) AS unit, min(stage) AS stage, any_value(replica) AS replica,
       if(any_value(u.cp) > 1, any_value(cp_rank), NULL) AS cp_rank,
       row_number() OVER (ORDER BY any_value(u.place), min(stage), any_value(replica), rank) AS sorted
FROM seen t JOIN kept USING (step, run) JOIN units u USING (unit) GROUP BY rank ORDER BY rank;
