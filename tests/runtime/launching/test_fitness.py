"""A device without the kernels that a plan prices is refused before training."""

import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from disttrain_cli.errors import DisttrainError, SpecError
from disttrain_cli.models import flash4
from disttrain_cli.runtime.launching import fitness
from disttrain_cli.runtime.launching.fitness import check_fit, check_memory
from disttrain_cli.spec.prediction import StageMemory
from disttrain_cli.spec.profile import DeviceProfile
from tests.runtime.factory import write_run
from tests.runtime.watching.test_hang import graph_of

CUDA = torch.device("cuda", 1)


def profiled(kind: str, name: str) -> DeviceProfile:
    return DeviceProfile(name=name, kind=kind, count=8, memory_gib=80, peak_tflops=312)  # type: ignore[arg-type]


@pytest.fixture
def turing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))


@pytest.mark.usefixtures("turing")
def test_a_device_that_is_too_old_is_refused_unless_it_was_profiled_itself(tmp_path: Path) -> None:
    run = write_run(tmp_path, tmp_path, precision="bf16", zero_stage=1)
    for other in (profiled("analytic", "H200"), profiled("cuda", "NVIDIA H200")):
        with pytest.raises(DisttrainError, match=r"The Tesla T4 on .* is too old") as caught:
            check_fit(run, other, CUDA)
        assert "compute capability 7.5; flash attention needs 8.0" in caught.value.why
        assert other.name in caught.value.why
        assert "disttrain_cli.profile(device='cuda')" in caught.value.next_step
    check_fit(run, profiled("cuda", "Tesla T4"), CUDA)
    check_fit(run, profiled("cpu", "a CPU"), torch.device("cpu"))
    # fp32 attends elsewise everywhere
    check_fit(write_run(tmp_path, tmp_path), profiled("analytic", "H200"), CUDA)


def test_a_plan_for_flash_attention_4_needs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    run = write_run(tmp_path, tmp_path, precision="bf16", zero_stage=1)
    known = profiled("cuda", "NVIDIA H200").model_copy(update={"flash_attention": 4})
    monkeypatch.setattr(flash4, "available", lambda device: False)
    with pytest.raises(DisttrainError, match="has no FlashAttention 4") as caught:
        check_fit(run, known, CUDA)
    assert "flash-attn-4" in caught.value.next_step
    monkeypatch.setattr(flash4, "available", lambda device: True)
    check_fit(run, known, CUDA)


@pytest.mark.usefixtures("turing")
@pytest.mark.parametrize(
    ("width", "refused"), [(64, False), (100, False), (256, False), (264, False), (260, True)]
)
def test_heads_that_no_kernel_takes_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, width: int, refused: bool
) -> None:
    configs = {
        "eye": SimpleNamespace(kind="encoder", config={"attention_head_dim": 8}),
        "llm": SimpleNamespace(
            kind="encoder", config=SimpleNamespace(num_attention_heads=4, hidden_size=4 * width)
        ),
    }
    monkeypatch.setattr(fitness, "read_configs", lambda run: configs)
    run, device = (
        write_run(tmp_path, tmp_path, precision="bf16", zero_stage=1),
        profiled("cuda", "Tesla T4"),
    )
    if not refused:
        check_fit(run, device, CUDA)
        return
    with pytest.raises(SpecError, match="heads as wide as those of llm") as caught:
        check_fit(run, device, CUDA)
    assert caught.value.why == "260; allowed: up to 256, or multiples of 8"


@pytest.mark.parametrize(
    ("total_gib", "free_gib", "refused"),
    [
        (80, 78.5, ""),
        (80, 73.2, ""),
        (40, 39, "is too small for its part of the plan"),
        (80, 60, "has too little memory left"),
    ],
)
def test_a_device_without_the_memory_that_is_planned_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, total_gib: float, free_gib: float, refused: str
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A800")
    monkeypatch.setattr(
        torch.cuda, "mem_get_info", lambda device: (free_gib * 2**30, total_gib * 2**30)
    )
    layout = graph_of()
    plan: Any = SimpleNamespace(
        predicted=SimpleNamespace(
            memory=[
                StageMemory(unit="encoder", stage=0, peak_gib=99, limit_gib=79),
                StageMemory(unit="llm", stage=1, peak_gib=74.1, limit_gib=79),
            ]
        )
    )
    device = profiled("analytic", "A800").model_copy(update={"context_gib": 1.0})
    check_memory(plan, device, layout.coords(2), torch.device("cpu"))
    if not refused:
        check_memory(plan, device, layout.coords(2), CUDA)
        return
    with pytest.raises(DisttrainError, match=refused) as caught:
        check_memory(plan, device, layout.coords(2), CUDA)
    assert caught.value.what.startswith(f"cuda:1 (NVIDIA A800) on {socket.gethostname()} ")
    assert "unit llm, stage 1, is planned with up to 74.1 GiB" in caught.value.why
    assert "cluster.memory_gib" in caught.value.next_step


def test_recurrent_layers_need_the_kernels_that_their_plan_prices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    run = write_run(tmp_path, tmp_path, precision="bf16", zero_stage=1)
    check_fit(run, profiled("cuda", "NVIDIA H200"), CUDA)
    monkeypatch.setattr(fitness.recurrent, "needs_kernels", lambda layer: True)
    with pytest.raises(DisttrainError, match="kernels for the recurrent layers of llm") as caught:
        check_fit(run, profiled("cuda", "NVIDIA H200"), CUDA)
    assert "flash-linear-attention" in caught.value.next_step
