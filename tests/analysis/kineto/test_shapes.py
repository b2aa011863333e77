"""FLOPs counted from recorded shapes are those that torch counts while it runs."""

import json

import pytest

from disttrain_cli.analysis.analyze import analyze, ask
from disttrain_cli.analysis.kineto.shapes import item_bytes, shape_of
from tests.analysis.kineto import traces


def said(name, dims, types="float", concrete=()):
    return shape_of(
        name,
        json.dumps(dims).encode(),
        json.dumps([types] * len(dims)).encode(),
        json.dumps(list(concrete)).encode(),
    )


def test_products_and_attention():
    assert said("aten::mm", [[2, 3], [3, 5]]) == ("2×3 3×5", "float", 60, 4 * (6 + 15 + 10))
    assert said("aten::addmm", [[5], [2, 3], [3, 5], [], []], "c10::BFloat16")[1:] == (
        "bfloat16",
        60,
        2 * 31,
    )
    assert said("aten::bmm", [[7, 2, 3], [7, 3, 5]]).flops == 420
    attention = said("aten::_scaled_dot_product_flash_attention", [[2, 4, 8, 16]] * 3)
    assert attention.flops == 4 * 2 * 4 * 8 * 8 * 16
    # lengths before heads
    assert said("flash_attn::_flash_attn_forward", [[2, 8, 4, 16]] * 3).flops == attention.flops
    assert said("aten::mm", [[2, 3], [3, 5]], "float8_e8m0").bytes is None


@pytest.mark.parametrize(
    ("name", "dims", "concrete"),
    [
        ("aten::mm", [[2, 3], [4, 5]], ()),
        ("aten::mm", [[2, 3]], ()),
        ("aten::mm", [], ()),
        ("aten::bmm", [[2], [3]], ()),
        ("aten::mm", [[10**200, 3], [3, 10**200]], ()),
        ("aten::mm", [[-2, 3], [3, 4]], ()),
        ("aten::mm", [[float("inf"), 3], [3, 4]], ()),
        ("nccl:all_gather", [[[2, 3], [4]]], ()),
        ("aten::mm", "oops", ()),
        ("aten::mm", [["a", 3], [3, 4]], ()),
        ("aten::mm", [None, None], ()),
        ("aten::convolution", [[1, 3, 8, 8], [4, 3, 3, 3], [4]], ()),  # before PyTorch 2.1
        (
            "aten::convolution",
            [[1, 3, 8, 8], [4, 3, 3, 3], [4]],
            ["", "", "", "[0, 0]", "[1]", "[1]", "False", "[0]", "1"],
        ),
        ("flash_attn::_flash_attn_forward", [[100, 4, 16]] * 3, ()),
        ("nccl:all_reduce", [], ()),
    ],
)
def test_what_cannot_be_told_is_not_guessed(name, dims, concrete):
    assert said(name, dims, concrete=concrete).flops is None
    assert shape_of(name, b"{", b"", b"").flops is None and item_bytes("tensor") is None


@pytest.mark.slow
def test_a_profile_of_torch_counts_what_torch_counts(tmp_path):
    torch = pytest.importorskip("torch")
    from torch.nn.functional import conv2d, conv_transpose2d, scaled_dot_product_attention
    from torch.profiler import ProfilerActivity, profile
    from torch.utils.flop_counter import FlopCounterMode

    image = torch.randn(2, 4, 9, 11, requires_grad=True)
    weight = torch.randn(6, 4, 3, 3, requires_grad=True)
    query = torch.randn(2, 3, 32, 16, requires_grad=True)
    matrix = torch.randn(12, 20, requires_grad=True)

    def work():
        conv2d(image, weight, stride=2, padding=1).sum().backward()
        conv2d(image, torch.ones(6, 2, 3, 3), stride=2, padding=1, groups=2)
        conv_transpose2d(image, torch.ones(4, 3, 3, 3), stride=2, padding=1, output_padding=1)
        conv2d(image, torch.ones(5, 4, 3, 3), dilation=2)
        scaled_dot_product_attention(query, query, query)
        torch.addmm(torch.zeros(7), matrix, torch.ones(20, 7)).sum().backward()
        torch.bmm(torch.ones(3, 4, 5), torch.ones(3, 5, 6))

    work()
    with FlopCounterMode(display=False) as counter:
        work()
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as recorded:
        work()
    file = tmp_path / "rank0.json"
    recorded.export_chrome_trace(str(file))
    found = analyze([file]).operators
    ours = {}
    for row in found:
        name = row.name.removeprefix("aten::").removesuffix("_for_cpu")
        ours[name] = ours.get(name, 0) + row.flops * row.count
        assert (
            row.total_us > 0
            and row.tflops > 0
            and row.flops_per_byte > 0
            and row.roof_tflops is None
        )
    theirs = {
        str(op).removeprefix("aten.").removesuffix("_for_cpu"): flops
        for op, flops in counter.get_flop_counts()["Global"].items()
    }
    for name in ("convolution", "convolution_backward", "addmm", "bmm"):
        assert ours[name] == theirs[name], name
    assert ours["_scaled_dot_product_flash_attention"] == 4 * 2 * 3 * 32 * 32 * 16
    assert sum(ours.values()) >= sum(theirs.values())


def test_kernels_are_of_the_operator_that_launched_them_under_the_roof_of_their_device(tmp_path):
    at = traces.BASE_US
    shapes = {
        "Input Dims": [[4096, 4096], [4096, 4096]],
        "Input type": ["c10::BFloat16", "c10::BFloat16"],
    }

    def operator(name, start, duration, **args):
        return traces.span(name, start, duration, args=args)

    found = [
        operator("aten::matmul", at, 100),
        operator("aten::mm", at + 10, 50, **shapes),
        *traces.kernel(traces.GEMM, at + 30, 400, 1),
        *traces.kernel("reduce_kernel", at + 430, 20, 2),
        operator("aten::sum", at + 420, 10),
    ]
    document = traces.document(found, deviceProperties=[{"id": 0, "name": "NVIDIA H100 80GB HBM3"}])
    path = traces.write(tmp_path / "rank0.json", document)
    (row,) = analyze([path]).operators
    assert (row.name, row.shapes, row.count, row.total_us, row.flops) == (
        "aten::mm",
        "4096×4096 4096×4096",
        1,
        400,
        2 * 4096**3,
    )
    assert row.tflops == pytest.approx(2 * 4096**3 / 400e-6 / 1e12) and row.bound == "compute"
    assert (
        row.roof_tflops == 989.4
        and row.flops_per_byte == pytest.approx(4096 / 3)
        and row.share == 400 / 420
    )
    assert ask([path], "SELECT operator, kernel FROM operators ORDER BY start_ns").rows == [
        ("aten::mm", traces.GEMM),
        ("aten::sum", "reduce_kernel"),
    ]
    assert ask([path], "SELECT device_ns, flops FROM shapes").rows == [(400_000, 2 * 4096**3)]
