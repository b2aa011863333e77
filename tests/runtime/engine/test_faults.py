"""Errors of a step: memory that runs out, numbers that are not finite."""

import pytest
import torch
import torch.distributed as dist

from disttrain_cli.runtime.engine.faults import (
    OutOfMemoryError,
    located,
    memory_advice,
    not_finite,
    out_of_memory,
)
from disttrain_cli.spec.plan import Layout, UnitPlan
from disttrain_cli.spec.stage_graph import RankCoords, stage_graph


def _place(**unit: object) -> tuple[RankCoords, Layout]:
    made = UnitPlan.model_validate(
        {
            "name": "llm",
            "modules": ["llm"],
            "dp": 2,
            "pp": 2,
            "gpus": 4,
            "layers_per_stage": [1, 2],
            **unit,
        }
    )
    layout = Layout(
        global_batch_size=16,
        microbatch_size=4,
        microbatches=2,
        zero_stage=0,
        gpus_used=made.gpus,
        units=[made],
    )
    return stage_graph(layout, "llm").coords(3), layout


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nmore"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 99 bytes"),
        dist.DistBackendError(
            "NCCL error in: ProcessGroupNCCL.cpp:94, unhandled cuda error, NCCL version 2.28.9\n"
            "ncclUnhandledCudaError: Call to CUDA function failed.\nmore:\n"
            "Cuda failure 2 'out of memory' (cannot allocate)"
        ),
        dist.DistBackendError("ncclUnhandledCudaError\nFailed to CUDA calloc 536870912 (allocate)"),
    ],
)
def test_memory_that_runs_out_names_the_unit_and_what_helps(error: RuntimeError) -> None:
    place, layout = _place()
    with pytest.raises(OutOfMemoryError) as caught, out_of_memory(place, layout, "backward", 3):
        raise error
    assert (
        caught.value.what == "Out of memory in the backward of slot 3: unit llm, stage 1, replica 1"
    )
    assert "allocate" in caught.value.why and "more" not in caught.value.why
    for word in (
        "microbatch_size: 2",
        "checkpointing: true for unit llm",
        "zero_stage: 1",
        "tp: 2",
        "disttrain_cli.plan",
    ):
        assert word in caught.value.next_step


def test_an_allocation_that_cannot_be_is_one() -> None:
    place, layout = _place()
    with pytest.raises(OutOfMemoryError), out_of_memory(place, layout, "forward", -1):
        torch.empty(1 << 58, dtype=torch.uint8)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("shapes do not fit"),
        dist.DistBackendError("ncclUnhandledCudaError\nCuda failure 217 'peer access'"),
        dist.DistBackendError("NCCL error: remote process exited or there was a network error"),
    ],
)
def test_other_errors_stay_what_they_are(error: RuntimeError) -> None:
    place, layout = _place()
    with pytest.raises(RuntimeError) as caught, out_of_memory(place, layout, "forward", 0):
        raise error
    assert caught.value is error


def test_what_is_done_already_is_not_advised() -> None:
    place, layout = _place(checkpointing=True)
    advice = memory_advice(place, layout.model_copy(update={"microbatch_size": 1, "zero_stage": 1}))
    assert not any(word in advice for word in ("microbatch_size", "checkpointing", "zero_stage"))


def test_a_step_that_is_not_finite_names_module_losses_and_norm() -> None:
    error = not_finite(
        12, {"text": float("nan"), "image": 0.5}, float("inf"), ("llm", "backward", 3), 0
    )
    assert (
        error.what
        == "Step 12 is not finite: llm computed the first such number, in the backward of slot 3"
    )
    assert error.why == "text loss nan, image loss 0.5, gradient norm inf; nothing was saved"
    again = not_finite(12, {}, 1.0, ("llm", "gradients", 0), 10)
    assert again.what.startswith("Step 12, the last of 10 such steps in a row, is not finite: llm")
    assert again.what.endswith("in the gradients")


def test_an_error_says_in_which_operation_of_which_stage() -> None:
    place, _ = _place()
    with pytest.raises(ValueError, match="mine") as caught, located(place, "forward", 3):
        raise ValueError("mine")
    assert caught.value.__notes__ == ["In the forward of slot 3: unit llm, stage 1, replica 1"]
