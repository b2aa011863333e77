"""FLOPs, MFU and the catalogue of devices."""

from __future__ import annotations

import pytest

from disttrain_cli.costs.flops import flops_per_sequence, mfu, module_flops
from disttrain_cli.costs.hardware import DEVICES, lookup
from disttrain_cli.errors import SpecError
from disttrain_cli.spec.work import Work
from tests.planning import synthetic


def test_flops_are_forward_plus_backward_of_every_layer() -> None:
    profile = synthetic.tiny(synthetic.run_file())
    work = Work(1, 64, 4096)
    per_token = 4e4 + 2e5 + 2 * 4e5
    assert module_flops(profile.modules["image_generator"], work) == pytest.approx(3 * 64 * per_token)
    assert module_flops(profile.modules["llm"], Work()) == 0.0
    llm = profile.modules["llm"]
    assert flops_per_sequence(profile)["llm"] == module_flops(llm, llm.work_per_sequence)


def test_cpu_peak_counts_once() -> None:
    run = synthetic.run_file()
    cpu, cuda = synthetic.tiny(run).device, synthetic.tiny(run, kind="cuda").device
    assert mfu(1e11, 1.0, cpu, 4) == pytest.approx(4 * mfu(1e11, 1.0, cuda, 4)) == pytest.approx(0.2)


def test_more_than_everything_is_an_error() -> None:
    with pytest.raises(SpecError, match="impossible"):
        mfu(1e15, 1.0, synthetic.tiny(synthetic.run_file()).device, 1)


@pytest.mark.parametrize(("reported", "name"), [
    ("NVIDIA A100-SXM4-80GB", "A100"), ("NVIDIA A100-PCIE-40GB", "A100-40GB"), ("NVIDIA A800-SXM4-80GB", "A800"),
    ("NVIDIA H100 80GB HBM3", "H100"), ("NVIDIA H200", "H200"), ("NVIDIA B200", "B200")])
def test_catalogue_knows_the_names_that_torch_reports(reported: str, name: str) -> None:
    assert lookup(reported).name == name


@pytest.mark.parametrize("reported", ["NVIDIA GeForce RTX 4090", "NVIDIA H100 PCIe", "NVIDIA H200 NVL",
                                      "NVIDIA H100 80GB HBM3 MIG 1g.10gb", "NVIDIA GB200"])
def test_unknown_device_asks_for_its_peak(reported: str) -> None:
    with pytest.raises(SpecError) as error:
        lookup(reported)
    assert "cluster.peak_tflops" in error.value.next_step


def test_every_entry_names_its_source() -> None:
    assert all(device.source and device.peak_tflops > 100 and device.memory_gib > 30 for device in DEVICES)
    assert all(lookup(device.name) is device for device in DEVICES)
