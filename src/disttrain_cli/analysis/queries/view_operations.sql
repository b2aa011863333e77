-- One row per operation of the trace (samples of memory left out) with figures of the plan and the profile: depth
-- (stage counted through the whole pipeline), items (images or sequences), duration, model FLOPs of this rank, time
-- predicted for exactly this work, and whether its step is measured (see windows).
-- Columns: those of trace, depth, pp, items, duration_ns, flops, predicted_ms, measured
CREATE VIEW operations AS FROM known WHERE operation <> 'memory';
