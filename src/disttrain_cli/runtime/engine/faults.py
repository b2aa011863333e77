"""Diagnosis of a step's failures: non-finite numbers and out-of-memory, with location and remedy.

Every module's outputs and incoming gradients are summed as they pass, without waiting for the
device: a sum is finite only if all of its terms are. When the step's norm or losses are not finite,
the ranks search their sums together and name the first module, in the order of computation, whose
numbers are not finite.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from disttrain_cli.calls import call
from disttrain_cli.errors import DisttrainError
from disttrain_cli.spec.plan import Layout
from disttrain_cli.spec.stage_graph import RankCoords

#: Limit of consecutive skipped steps, after which a model is assumed not to recover.
MOST_SKIPPED = 10
#: NCCL's texts: error 2 is cudaErrorMemoryAllocation and CUDA_ERROR_OUT_OF_MEMORY.
NCCL_FULL = re.compile(r"out of memory|(Cuda|CUDA) failure 2\b|Failed to CUDA (c|m)alloc")
PHASES = ("forward", "backward", "gradients")
_NOTHING_FOUND = torch.iinfo(torch.int64).max
# base of the digits (phase, slot, layer, module) of a key; fits any pipeline into 63 bits
_BASE = 1 << 15


class NotFiniteError(DisttrainError):
    """Non-finite loss or gradient norm where `train.on_bad_loss` ends the run (exit code 1)."""

    on_every_rank = True


class OutOfMemoryError(DisttrainError):
    """Device without enough memory for what the plan puts on it (exit code 1)."""


@dataclass
class Sums:
    """Sums over the outputs and gradients of a rank's modules in this step."""

    names: Sequence[str]  # the whole model's modules and "projectors"
    # phase, slot, layer, module, sum
    sums: list[tuple[int, int, int, str, Tensor]] = field(default_factory=list)

    def note(
        self, phase: str, slot: int, layer: int, module: str, tensors: Iterable[Tensor]
    ) -> None:
        """Record the sums of some tensors.

        Args:
            layer: orders the modules of a slot as they compute in this phase.
        """
        for tensor in tensors:
            if tensor.numel():
                self.sums.append(
                    (
                        PHASES.index(phase),
                        slot,
                        layer,
                        module,
                        tensor.detach().sum(dtype=torch.float32),
                    )
                )

    def clear(self) -> None:
        """Clear the sums for a new step."""
        self.sums.clear()

    def first(self, device: torch.device) -> tuple[str, str, int] | None:
        """Return (module, phase, slot) of the world's first non-finite sum (collective)."""
        local = _NOTHING_FOUND
        for phase, slot, layer, module, total in self.sums:
            if not torch.isfinite(total):
                digits = (slot, layer, self.names.index(module))
                local = min(local, sum((phase, *digits)[i] * _BASE ** (3 - i) for i in range(4)))
        world = torch.tensor(local, device=device)
        dist.all_reduce(world, op=dist.ReduceOp.MIN)
        if (key := int(world)) == _NOTHING_FOUND:
            return None
        phase, slot, name = key // _BASE**3, key // _BASE**2 % _BASE, key % _BASE
        return self.names[name], PHASES[phase], slot


def not_finite(
    step: int,
    losses: dict[str, float],
    norm: float,
    where: tuple[str, str, int] | None,
    skipped: int,
) -> NotFiniteError:
    """Return the error of a step that is not finite; `where` is the result of `Sums.first`."""
    values = ", ".join(f"{name} loss {value:g}" for name, value in losses.items())
    if where is None:
        first = "no module's outputs or gradients were seen to be infinite or NaN"
    else:
        module, phase, slot = where
        first = f"{module} computed the first such number, in the {phase}" + (
            f" of slot {slot}" * (phase != "gradients")
        )
    after = f", the last of {skipped} such steps in a row," if skipped > 1 else ""
    return NotFiniteError(
        f"Step {step}{after} is not finite: {first}",
        f"{values}, gradient norm {norm:g}; nothing was saved",
        "Lower train.optimizer.lr or raise warmup_steps, and go on from the last checkpoint"
        f" ({call('train', resume=True)}) or, where there is none, start again; or leave such steps"
        " out: train.on_bad_loss: skip",
    )


@contextmanager
def out_of_memory(coords: RankCoords, layout: Layout, operation: str, slot: int) -> Iterator[None]:
    """Turn a failed allocation into an error that names the unit and the fields to change.

    Raises:
        OutOfMemoryError: in place of torch's error.
    """
    try:
        yield
    except RuntimeError as error:  # torch.OutOfMemoryError and dist.DistBackendError are
        if (why := full_memory(error)) is None:
            raise
        what = f"Out of memory in the {_where(coords, operation, slot)}"
        raise OutOfMemoryError(what, why, memory_advice(coords, layout)) from error


def full_memory(error: RuntimeError) -> str | None:
    """Return the line of an error that reports a failed allocation; None if it is another error.

    NCCL allocates the buffers of connections itself, when they are first used.
    """
    lines = str(error).strip().splitlines()
    if isinstance(error, dist.DistBackendError):
        return next((f"NCCL: {line.strip()}" for line in lines if NCCL_FULL.search(line)), None)
    full = isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)
    return lines[0] if full else None


@contextmanager
def located(coords: RankCoords, operation: str, slot: int) -> Iterator[None]:
    """Add a note to any error with the operation and stage in which it was raised."""
    try:
        yield
    except Exception as error:
        error.add_note(f"In the {_where(coords, operation, slot)}")
        raise


def _where(coords: RankCoords, operation: str, slot: int) -> str:
    of_slot = f" of slot {slot}" if slot >= 0 else ""
    unit, stage = coords.unit.name, coords.stage.index
    of_cp = f", CP rank {coords.cp_rank}" if coords.unit.cp > 1 else ""
    return f"{operation}{of_slot}: unit {unit}, stage {stage}, replica {coords.replica}{of_cp}"


def memory_advice(coords: RankCoords, layout: Layout) -> str:
    """Return the changes of the plan that would make a stage smaller and are not in effect yet."""
    unit = coords.unit
    changes = []
    if layout.microbatch_size > 1:
        changes.append(f"microbatch_size: {layout.microbatch_size // 2}")
    if not unit.checkpointing:
        changes.append(f"checkpointing: true for unit {unit.name}")
    if layout.zero_stage == 0 and unit.dp_cp_size > 1:
        changes.append("zero_stage: 1")
    changes += [f"tp: {2 * unit.tp} or more pp for unit {unit.name}"]
    return (
        f"Change plan.yaml: {', or '.join(changes)}. Or plan again with a lower cluster.memory_gib:"
        f" {call('plan')}"
    )
