"""The device: choice, refusals, and a measured peak."""

from types import SimpleNamespace

import pytest
import torch

from disttrain_cli.errors import DisttrainError
from disttrain_cli.profiling import device as room
from disttrain_cli.spec.runfile.cluster import ClusterSpec


def without_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def test_cuda_that_is_not_there_is_refused_with_what_torch_sees(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    without_cuda(monkeypatch)
    with pytest.raises(DisttrainError) as caught:
        room.choose_kind("cuda")
    assert torch.__version__ in caught.value.why
    assert "disttrain_cli.profile(device='cpu')" in caught.value.next_step


def test_auto_takes_the_gpu_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert room.choose_kind("auto") == "cuda"
    without_cuda(monkeypatch)
    assert room.choose_kind("auto") == "cpu"


def gpus(monkeypatch: pytest.MonkeyPatch, count: int, name: str) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    properties = SimpleNamespace(name=name, total_memory=80 << 30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)


def test_no_more_gpus_are_counted_than_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus(monkeypatch, 1, "NVIDIA A100-SXM4-80GB")
    found = room.describe_device(ClusterSpec(gpus_per_node=6), "cuda", "bf16")
    assert (found.count, found.shared_by, found.memory_gib, found.peak_tflops) == (
        1,
        1,
        80.0,
        312.0,
    )
    assert room.local_processes(ClusterSpec(gpus_per_node=6), "cuda") == 1
    sharing = ClusterSpec(gpus_per_node=8, ranks_per_gpu=4)
    found = room.describe_device(sharing, "cuda", "bf16")
    assert (found.count, found.memory_gib) == (4, 20.0)


def test_the_peak_of_an_unknown_gpu_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus(monkeypatch, 2, "Imaginary 9000")
    with pytest.raises(DisttrainError, match="Imaginary 9000"):
        room.describe_device(ClusterSpec(gpus_per_node=2), "cuda", "bf16")
    stated = ClusterSpec(nodes=2, gpus_per_node=2, peak_tflops=50.0)
    found = room.describe_device(stated, "cuda", "bf16")
    assert (found.peak_tflops, found.count) == (50.0, 4)


def test_the_processes_of_a_cpu_share_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "gemm_peak_tflops", lambda precision: 0.25)
    six = room.describe_device(ClusterSpec(gpus_per_node=6), "cpu", "fp32")
    assert (six.count, six.shared_by, six.peak_tflops) == (6, 6, 0.25)
    assert six.memory_gib * 6 == pytest.approx(room.machine_memory_gib())
    assert room.describe_device(ClusterSpec(memory_gib=3.0), "cpu", "fp32").memory_gib == 3.0


def test_the_measured_peak_leaves_the_number_of_threads_as_it_was() -> None:
    before = torch.get_num_threads()
    assert room.gemm_peak_tflops("fp32", cores=1, seconds=0.02) > 0.0
    assert torch.get_num_threads() == before
