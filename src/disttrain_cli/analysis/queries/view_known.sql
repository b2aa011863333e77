-- One row per row of the trace, samples of memory included; columns as those of operations.
CREATE VIEW known AS
SELECT t.*, u.first_depth + t.stage AS depth, u.pp,
       CASE WHEN c.kind = 'llm' THEN t.sequences ELSE t.images END AS items,
       t.end_ns - t.start_ns AS duration_ns,
       CASE WHEN items + t.tokens + t.sum_length_sq = 0 THEN 0.0
            ELSE c.flops_base + c.flops_per_item * items + c.flops_per_token * t.tokens
                 + c.flops_per_length_sq * t.sum_length_sq END AS flops,
       CASE WHEN items + t.tokens + t.sum_length_sq = 0 THEN 0.0
            WHEN c.unit IS NOT NULL
            THEN greatest(0.0, c.ms_base + c.ms_per_item * items + c.ms_per_token * t.tokens
                                 + c.ms_per_length_sq * t.sum_length_sq) END AS predicted_ms,
       coalesce(w.measured, false) AS measured
FROM trace t
LEFT JOIN units u USING (unit)
LEFT JOIN windows w USING (step)
LEFT JOIN costs c ON c.unit = t.unit AND c.stage = t.stage AND c.module = t.module AND c.operation = t.operation;
