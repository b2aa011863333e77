"""Communication told from compute by evidence."""

import pytest

from disttrain_cli.analysis.analyze import analyze, ask
from disttrain_cli.analysis.kineto.kernels import (
    operation,
    pattern_of,
    pattern_texts,
    read_patterns,
)
from disttrain_cli.errors import SpecError
from tests.analysis.kineto import traces


@pytest.mark.parametrize(
    ("name", "kind", "does"),
    [
        ("ncclKernel_AllReduce_RING_LL_Sum_float(ncclDevComm*)", "communication", "all_reduce"),
        ("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", "communication", "send_recv"),
        ("ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL", "communication", "reduce_scatter"),
        ("rcclGenericKernel", "communication", "rcclGenericKernel"),
        ("void deep_ep::internode::dispatch<…>", "communication", "dispatch"),
        ("nvshmemi_transfer_kernel", "communication", "nvshmemi_transfer_kernel"),
        ("void vllm::cross_device_reduce_1stage<float, 2>", "communication", "reduce"),
        (
            "void flashinfer::trtllm_allreduce_fusion::allreduce_fusion_kernel_oneshot_lamport<8>",
            "communication",
            "all_reduce",
        ),
        ("moefinalize_allreduce_fusion_kernel_oneshot_lamport", "communication", "all_reduce"),
        ("void tensorrt_llm::kernels::oneShotAllReduceKernel<8>", "communication", "all_reduce"),
        ("moe_a2a::moeA2ADispatchKernel<32>", "communication", "dispatch"),
        ("userbuffers_fp16_sum_inplace_gpu_rr_rs_oop<8>(int)", "communication", None),
        ("kuserbuffers_pushsend(int*, int4*)", "communication", "send"),
        (
            "void quickreduce::allreduce_prototype_twoshot<quickreduce::AllReduceTwoshot<__half>>",
            "communication",
            "all_reduce",
        ),
        ("mori::moe::EpDispatchIntraNodeKernel_bf16", "communication", "dispatch"),
        ("EpCombineInterNodeV1Kernel", "communication", "combine"),
        ("void deep_ep::internode_ll::combine<true>", "communication", "combine"),
        ("a2a_combine_recv_kernel", "communication", "combine"),
        ("hcom_allReduce__503_0_1", "communication", "all_reduce"),
        ("MoeDistributeDispatchV2", "communication", "dispatch"),
        (
            "(anonymous namespace)::multimem_all_reduce_kernel<c10::BFloat16>",
            "communication",
            "all_reduce",
        ),
        ("ragged-all-to-all-start.3", "communication", "all_to_all"),
        ("_C_custom_ar::all_reduce", "communication", "all_reduce"),
        ("triton_red_fused_all_reduce_add_7", "compute", None),
        ("fused_moe_kernel", "compute", None),
        ("nvjet_hsh_128x64_64x16_4x1_v_bz_bias_TNN", "compute", None),
        ("cutlass::gemm::kernel::GemmAllReduce", "mixed", None),
        ("AllGatherMatmul", "mixed", None),
        ("ampere_sgemm_128x64_tn", "compute", None),
        ("Cijk_Ailk_Bljk_HHS_BH_MT128x128x32_MI32x32x8x1_SN", "compute", None),
        ("void at::native::reduce_kernel<512, 1>", "compute", None),
        ("triton_poi_fused_add_0", "compute", None),
        ("my_secret_sauce", None, None),
    ],
)
def test_kinds_of_names(name, kind, does):
    found = pattern_of(name, read_patterns(pattern_texts()))
    assert (found and found.kind) == kind
    assert does is None or operation(name) == does


def test_evidence_beyond_names(tmp_path):
    """Arguments first, then the name, then what the CPU was doing at the launch."""
    at = traces.BASE_US
    found = [
        *traces.kernel(
            "mystery_a",
            at + 100,
            10,
            1,
            **{"Collective name": "allreduce", "Process Group Name": "0"},
        ),
        traces.span("aten::special", at + 190, 20),
        *traces.kernel("mystery_b", at + 200, 10, 2),
        traces.span("nccl:all_gather", at + 290, 20, cat="user_annotation"),
        *traces.kernel("mystery_c", at + 300, 10, 3),
        *traces.kernel("mystery_d", at + 400, 10, 4),
        *traces.kernel("Memcpy HtoD (Pinned -> Device)", at + 500, 10, 5, cat="gpu_memcpy"),
        *traces.kernel(traces.GEMM, at + 600, 10, 6),
    ]
    path = traces.write(tmp_path / "rank0.json", traces.document(found))
    assert ask([path], "SELECT name[:9], kind, evidence FROM kernels ORDER BY start_ns").rows == [
        ("mystery_a", "communication", "arguments"),
        ("mystery_b", "compute", "operator"),
        ("mystery_c", "communication", "annotation"),
        ("mystery_d", "unclassified", None),
        ("Memcpy Ht", "memory", "category"),
        ("ampere_sg", "compute", "name"),
    ]
    analysis = analyze([path])
    assert analysis.job.unclassified_fraction == pytest.approx(1 / 6)
    said = "17 % of the kernels' time is classified neither"
    assert any(said in warning for warning in analysis.warnings)
    assert analysis.ranks[0].compute_us == 30  # what is not classified counts as compute


@pytest.mark.slow
def test_kernels_of_no_certain_kind_lower_the_confidence(tmp_path):
    """In proportion to their time; neither the operator that launched them nor their name decides
    the kind of those that compute and communicate at once."""

    def sure(name):
        found = [
            event
            for step in range(5)
            for number, of in enumerate([traces.GEMM, traces.GEMM, traces.GEMM, name])
            for event in traces.kernel(
                of, traces.BASE_US + 1000 * step + 250 * number, 250, 4 * step + number
            )
        ]
        operator = {"ph": "X", "cat": "cpu_op", "name": "aten::x", "pid": 100, "tid": 100}
        found += [
            operator | {"ts": event["ts"] - 1, "dur": 9}
            for event in found
            if event["cat"] == "cuda_runtime"
        ]
        analysis = analyze([traces.write(tmp_path / f"{name}.json", traces.document(found))])
        return analysis.verdict.confidence, analysis.job.unclassified_fraction

    (known, none), (unsure, mixed) = sure(traces.GEMM), sure("gemm_reduce_scatter")
    assert (none, mixed) == (0, pytest.approx(0.25)) and unsure < 0.75 * known


def test_patterns_of_the_user_come_first_and_are_checked(own_cache):
    file = own_cache.parent / "config" / "disttrain" / "kernel_patterns.txt"
    file.parent.mkdir(parents=True)
    file.write_text("# ours\n\ncommunication  secret_(sauce|salt)\ncompute nccl\n")
    patterns = read_patterns(pattern_texts())
    assert [pattern_of(name, patterns).kind for name in ("my_secret_sauce", "ncclX")] == [
        "communication",
        "compute",
    ]
    for line in ("communication (", "talk nccl", "compute"):
        file.write_text(line)
        with pytest.raises(SpecError, match="line 1, cannot be read"):
            read_patterns(pattern_texts())
