-- Most memory held by any rank of a stage.
SELECT unit, stage, max(held_gib) AS measured_gib FROM memory JOIN units USING (unit)
GROUP BY unit, stage ORDER BY min(place), stage;
