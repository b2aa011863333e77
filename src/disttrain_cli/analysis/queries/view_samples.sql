-- Every sample of the recorded steps, also of steps run by other plans; for a step that was run again, the last time.
CREATE VIEW samples AS
SELECT run, step, slot, unit, replica, sequence, tokens AS sequence_tokens, unnest(range(len(samples))) AS place,
       unnest(samples) AS sample, unnest(names) AS name
FROM sample_segments
JOIN (SELECT step, arg_max(run, latest_ns) AS run FROM seen GROUP BY step) USING (step, run);
