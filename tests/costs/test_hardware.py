"""The hardware catalogue: names, sources, figures of the run file, and time of kernels."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from disttrain_cli.costs import hardware
from disttrain_cli.costs.doubts import _all_doubts
from disttrain_cli.costs.hardware import (
    Efficiency,
    KernelWork,
    analytic_device,
    catalogue,
    kernels_ms,
    link_profile,
    lookup,
    memory_s,
)
from disttrain_cli.errors import SpecError
from disttrain_cli.spec.runfile.cluster import ClusterSpec, LinkSpec

AMOUNTS = st.builds(KernelWork, *[st.floats(0, 1e13)] * 4, st.integers(0, 1000))


@pytest.mark.parametrize(
    ("reported", "name"),
    [
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("NVIDIA A100-PCIE-40GB", "A100-40GB"),
        ("NVIDIA A800-SXM4-80GB", "A800"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H800", "H800"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA B200", "B200"),
    ],
)
def test_catalogue_knows_the_names_that_torch_reports(reported: str, name: str) -> None:
    assert lookup(reported).name == name


@pytest.mark.parametrize(
    "reported",
    [
        "NVIDIA GeForce RTX 4090",
        "NVIDIA H100 PCIe",
        "NVIDIA H200 NVL",
        "NVIDIA H100 80GB HBM3 MIG 1g.10gb",
        "NVIDIA GB200",
    ],
)
def test_unknown_device_asks_for_its_peak(reported: str) -> None:
    with pytest.raises(SpecError) as error:
        lookup(reported)
    assert "cluster.peak_tflops" in error.value.next_step


def test_every_entry_names_its_source_and_a_curve() -> None:
    known = catalogue()
    for name, device in known.devices.items():
        assert lookup(name) is device and len(device.source) > 20
        assert (
            device.bf16_tflops > 10 * device.fp32_tflops
            and device.peak_of("fp32") == device.fp32_tflops
        )
    assert all(len(curve.source) > 20 for curve in known.curves.values())
    curves = {device.curve for device in known.devices.values()} | {"generic"}
    assert curves == {name.removesuffix("_flash_4") for name in known.curves}
    assert known.devices["A800"].link_gbytes_s < known.devices["A100"].link_gbytes_s


def test_the_run_file_comes_before_the_catalogue() -> None:
    cluster = ClusterSpec(peak_tflops=280, memory_gib=64, links=LinkSpec(intra_node_gbps=800))
    device = analytic_device("a800", cluster, "bf16")
    assert (device.name, device.peak_of("bf16"), device.memory_gib, device.link_gbytes_s) == (
        "A800",
        280,
        64,
        100,
    )
    assert device.fp32_tflops == lookup("A800").fp32_tflops
    assert analytic_device("A800", ClusterSpec(), "bf16") == lookup("A800")


def test_an_unknown_device_asks_for_its_figures_and_takes_them() -> None:
    with pytest.raises(SpecError) as error:
        analytic_device("X9", ClusterSpec(peak_tflops=100), "bf16")
    assert "A800" in error.value.why
    assert (
        "cluster.memory_gib" in error.value.next_step and "peak_tflops" not in error.value.next_step
    )
    device = analytic_device("X9", ClusterSpec(peak_tflops=100, memory_gib=32), "bf16")
    assert (device.name, device.curve, device.memory_gib, device.peak_tflops) == (
        "X9",
        "generic",
        32,
        100,
    )
    assert device.memory_gbytes_s == 1e5 / catalogue().generic_flops_per_byte
    assert "memory bandwidth taken as" in device.source and "between nodes" in device.source


def test_time_of_one_kernel_by_hand() -> None:
    device, curve = lookup("A800"), catalogue().curves["ampere"]
    product = KernelWork(product_flops=312e9, moved_bytes=2039e6, kernels=3)
    assert kernels_ms(device, "bf16", product) == pytest.approx(
        1 / curve.product + 1 / curve.memory + 3e-3 * curve.launch_us
    )
    assert kernels_ms(device, "bf16", KernelWork(attention_flops=312e9)) == pytest.approx(
        1 / curve.attention
    )
    assert kernels_ms(device, "bf16", KernelWork(convolution_flops=312e9)) == pytest.approx(
        1 / curve.convolution
    )
    assert kernels_ms(device, "fp32", KernelWork(product_flops=19.5e9)) == pytest.approx(
        1 / curve.product
    )
    assert memory_s(device, 2039e9) == pytest.approx(1 / curve.memory)


def test_flash_attention_4_makes_attention_alone_faster() -> None:
    stock, newer = (
        analytic_device("H200", ClusterSpec(flash_attention=version), "bf16")
        for version in ("auto", 4)
    )
    for work, faster in ((KernelWork(attention_flops=1e12), True), (KernelWork(1e12), False)):
        assert (kernels_ms(newer, "bf16", work) < kernels_ms(stock, "bf16", work)) == faster
    with pytest.raises(SpecError, match="speed of FlashAttention 4 on analytic:A100"):
        analytic_device("A100", ClusterSpec(flash_attention=4), "bf16")


def test_sustained_efficiency_is_used_where_it_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    device, known = lookup("H100"), catalogue()
    burst = known.curves["hopper"]
    lower = {name: 0.9 * getattr(burst, name) for name in Efficiency.model_fields}
    curve = burst.model_copy(update={"sustained": Efficiency(**lower)})
    loaded = known.model_copy(update={"curves": known.curves | {"hopper": curve}})
    work = KernelWork(1e12, 1e12, 1e12, 1e9, kernels=0)
    in_bursts = kernels_ms(device, "bf16", work)
    monkeypatch.setattr(hardware, "catalogue", lambda: loaded)
    assert kernels_ms(device, "bf16", work) == pytest.approx(in_bursts / 0.9)


def test_a_doubt_covers_the_clocks_of_every_curve_without_sustained_figures() -> None:
    for name, curve in catalogue().curves.items():
        covered = [
            doubt
            for doubt in _all_doubts()
            if doubt.what == "clocks under load"
            and "analytic" in doubt.profiles
            and name in (doubt.curves or [name])
            and doubt.expected.llm > 1.05
        ]
        assert bool(covered) == (curve.sustained is None), name


@given(AMOUNTS, AMOUNTS, st.sampled_from(sorted(catalogue().devices)))
def test_time_is_linear_in_work(one: KernelWork, other: KernelWork, name: str) -> None:
    both = KernelWork(*[a + b for a, b in zip(one, other, strict=True)])
    times = [kernels_ms(lookup(name), "bf16", work) for work in (one, other, both)]
    assert times[0] + times[1] == pytest.approx(times[2])


def test_links_are_fractions_of_what_is_published() -> None:
    links, known = link_profile(lookup("H100"), ClusterSpec(nodes=2)), catalogue().links
    assert links.all_reduce_gbps == links.p2p_gbps == pytest.approx(8 * 450 * known.link_fraction)
    assert links.inter_node is not None
    assert links.inter_node.reduce_scatter_gbps == pytest.approx(100 * known.network_fraction)
    assert links.inter_node.p2p_us > links.p2p_us
    assert link_profile(lookup("H100"), ClusterSpec(nodes=1)).inter_node is None
