-- Every sample of the recorded steps.
CREATE VIEW samples AS
SELECT run, step, slot, unit, replica, sequence, tokens AS sequence_tokens, unnest(range(len(samples))) AS place,
       unnest(samples) AS sample, unnest(names) AS name
FROM sample_segments JOIN kept USING (step, run);
