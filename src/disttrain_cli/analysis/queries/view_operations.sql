-- One row per operation of the trace (moments at which memory was read left out) with what the plan and the profile
-- know of it: depth (stage counted through the whole pipeline), items (images or sequences), duration, model FLOPs of
-- this rank, time predicted for this very work, and whether its step is measured (see windows).
-- Columns: those of trace, depth, pp, items, duration_ns, flops, predicted_ms, measured
CREATE VIEW operations AS FROM known WHERE operation <> 'memory';
