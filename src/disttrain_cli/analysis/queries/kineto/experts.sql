-- One row per rank: time of its grouped GEMMs (of experts), attention and other GEMMs in a measured step, in s (mean).
WITH works AS (
    SELECT id, CASE
        WHEN regexp_matches(name, 'group(ed)?_?(gemm|mm|matmul)|GroupProblemShape|GemmGrouped|GemmType\)[1-3]|fused_?moe|moe_?(fc)?_?gemm|ck_moe|fmoe_|matmul_ogs|scatter2scatter|_(sdd|dsd|dds)_kernel|moe\w*marlin|^bmm_|\bt?gmm\b|ragged-dot', 'i')
            THEN 'grouped'
        WHEN regexp_matches(name, 'attention|attn|fmha|sdpa|flash_?(fwd|bwd|mla)|Batch(Prefill|Decode)', 'i') THEN 'attention'
        WHEN regexp_matches(name, 'gemm|nvjet|cijk_|xmma|cublas|cutlass|matmul', 'i') THEN 'dense' END AS what
    FROM names WHERE id IN (SELECT name FROM raw_kernels WHERE measured AND kind IN ('compute', 'unclassified'))),
counted AS (SELECT rank, count(*) AS steps FROM windows WHERE measured GROUP BY rank)
SELECT k.rank, sum(k.end_ns - k.start_ns) FILTER (w.what = 'grouped') / any_value(c.steps) / 1e9 AS grouped_s,
       sum(k.end_ns - k.start_ns) FILTER (w.what = 'attention') / any_value(c.steps) / 1e9 AS attention_s,
       sum(k.end_ns - k.start_ns) FILTER (w.what = 'dense') / any_value(c.steps) / 1e9 AS dense_s
FROM raw_kernels k JOIN works w ON w.id = k.name JOIN counted c ON c.rank = k.rank
WHERE k.measured AND k.kind IN ('compute', 'unclassified')
GROUP BY k.rank ORDER BY k.rank;
