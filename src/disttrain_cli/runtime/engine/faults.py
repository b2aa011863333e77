"""What goes wrong in a step: numbers that are not finite, and memory that runs out; where, and what
helps.

Every module's outputs and incoming gradients are summed as they pass, without waiting for the
device: a sum is finite only if all of it is. When the step's norm or losses are not finite, the
ranks look through their sums together and name the first module, in the order of computation, whose
numbers went wrong.
"""

from __future__ import annotations

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

#: Steps that may be skipped one after the other: a model that does not recover is not trained on.
MOST_SKIPPED = 10
PHASES = ("forward", "backward", "gradients")
_NOTHING_FOUND = torch.iinfo(torch.int64).max
# of the digits (phase, slot, place, name) of a place in a step; fits any pipeline into 63 bits
_BASE = 1 << 15


class NotFiniteError(DisttrainError):
    """A loss or the gradient norm is not finite, and `train.on_bad_loss` says to stop (exit code
    1)."""

    on_every_rank = True


class OutOfMemoryError(DisttrainError):
    """A device has no memory left for what the plan puts on it (exit code 1)."""


@dataclass
class Sums:
    """Sums of what passed a rank's modules in this step, in the order of computation."""

    names: Sequence[str]  # modules of the whole model and "projectors"
    # phase, slot, layer, module, sum
    sums: list[tuple[int, int, int, str, Tensor]] = field(default_factory=list)

    def note(
        self, phase: str, slot: int, layer: int, module: str, tensors: Iterable[Tensor]
    ) -> None:
        """Remember the sum of some tensors; `layer` orders the modules of a slot as they compute in
        this phase."""
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
        """Begin a new step."""
        self.sums.clear()

    def first(self, device: torch.device) -> tuple[str, str, int] | None:
        """(Module, phase, slot) of the first sum in the world that is not finite; every rank asks
        together."""
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
    """The error of a step that is not finite; `where` is what `Sums.first` found."""
    values = ", ".join(f"{name} loss {value:g}" for name, value in losses.items())
    if where is None:
        first = "no module's outputs or gradients were seen to be infinite or NaN"
    else:
        module, phase, slot = where
        first = f"{module} made the first such number, in the {phase}" + (
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
    """Turn a device's failure to allocate into an error that names the unit, and what to change.

    Raises:
        OutOfMemoryError: in place of torch's error.
    """
    try:
        yield
    except RuntimeError as error:  # torch.OutOfMemoryError is one
        if not isinstance(error, torch.OutOfMemoryError) and "can't allocate memory" not in str(
            error
        ):
            raise
        what = f"Out of memory in the {_where(coords, operation, slot)}"
        raise OutOfMemoryError(
            what, str(error).strip().splitlines()[0], memory_advice(coords, layout)
        ) from error


@contextmanager
def located(coords: RankCoords, operation: str, slot: int) -> Iterator[None]:
    """Note on any error in which operation of which stage it was raised."""
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
    """What makes a stage of a layout smaller, as far as it is not done yet."""
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
