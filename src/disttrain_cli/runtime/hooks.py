"""Interfaces of the step loop: the data that it reads, and the hooks that it calls.

Everything around the optimizer's steps is a hook: evaluation, checkpoints, weight averaging,
profiles, measurements of the ranks, reports and trackers. `steps` has the order of the calls.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, Self

if TYPE_CHECKING:
    from disttrain_cli.data.packing import Packing
    from disttrain_cli.data.slots import StepOrder


class Data(Protocol):
    """Source of the steps' orders."""

    def order(self, step: int) -> StepOrder:
        """Return the work of every replica of every unit in a step."""
        ...

    def batch(self, step: int) -> Packing:
        """Return a step's global batch, in the order of the data."""
        ...


@dataclass
class Step:
    """Step that the optimizer has taken, and what hooks add to it."""

    number: int
    order: StepOrder
    last: bool  # of the task
    updated: bool  # False if it was skipped
    largest: dict[str, float]  # maxima over all ranks of what hooks measured
    start_ns: int
    end_ns: int = 0
    row: dict[str, Any] = field(default_factory=dict)  # reported values; complete on rank 0
    about: dict[str, Any] = field(default_factory=dict)  # for the description of its checkpoint
    saves: bool = False  # True if a checkpoint follows
    stop: str = ""  # the one of `watch.REASONS` that requested a stop
    ends: str = ""  # why training is over before its last step

    @property
    def ending(self) -> bool:
        """True if no step follows in this start."""
        return self.last or bool(self.stop or self.ends)


class Hook:
    """Part of a training that the step loop calls; a context around all steps.

    Each method is called for all hooks of a rank, in their order, before the next one. A hook that
    communicates in a method belongs to every rank, at the same position among those that do.
    """

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: Any,
    ) -> None:
        """Release the hook's resources, also after an error."""

    def begin(self, step: int) -> None:
        """Prepare for a step before its clock starts."""

    def measure(self) -> dict[str, float]:
        """Return values to be maximised over all ranks into `Step.largest`.

        They travel with the step's losses, before the optimizer's update. Every rank returns the
        same names.
        """
        return {}

    def stepped(self, step: Step) -> None:
        """Act after the optimizer's step, within the step's time."""

    def ended(self, step: Step) -> None:
        """Act after the step's time: complete the step, request its checkpoint or the end."""

    def reported(self, step: Step) -> None:
        """Use the complete step: report or save it."""
