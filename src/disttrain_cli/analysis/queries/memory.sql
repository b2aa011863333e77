-- Most memory held by any rank of a stage, and most outside torch's allocator.
SELECT unit, stage, max(held_gib) AS measured_gib, max(device_gib - allocator_gib) AS outside_gib FROM memory JOIN units USING (unit)
GROUP BY unit, stage ORDER BY min(place), stage;
