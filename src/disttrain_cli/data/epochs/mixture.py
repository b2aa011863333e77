"""Inputs of the stream of sequences: an index, a seed, and the weights of the sources by phase."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from disttrain_cli.data.mixtures import Phases
from disttrain_cli.spec.profile import DataProfile

if TYPE_CHECKING:
    from disttrain_cli.data.index.sample_index import Index


class Phase(NamedTuple):
    """A part of the stream in which the sources have the same weights."""

    first: int  # number of its first sequence
    weights: Sequence[float]  # by source; sources after the last weight are not drawn


@dataclass(frozen=True)
class Mixture:
    """An index, a seed and consecutive phases.

    The first phase begins at sequence 0; without phases there is one, with the index's weights.
    """

    index: Index
    seed: int
    phases: tuple[Phase, ...] = ()

    def __post_init__(self) -> None:
        if not self.phases:
            object.__setattr__(self, "phases", (Phase(0, self.index.weights),))
        firsts = [phase.first for phase in self.phases]
        assert firsts[0] == 0 and firsts == sorted(set(firsts))


def mixture_of(index: Index, seed: int, data: DataProfile, batch: int) -> Mixture:
    """Return the mixture that a profile's run trains on, with `batch` sequences per step.

    Drawn sizes have no phases.
    """
    phases = [(phase.step, phase.weights) for phase in data.phases] if index.of_sources else []
    return Mixture(index, seed, in_sequences(phases, batch))


def in_sequences(phases: Phases, batch: int) -> tuple[Phase, ...]:
    """Convert phases by step to phases by sequence."""
    return tuple(Phase(step * batch, weights) for step, weights in phases)
