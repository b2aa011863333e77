"""What could be mended in recorded steps of ours: what all formats have, and transfers, data, hosts, whole units."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import numpy as np
from numpy.typing import NDArray

from disttrain_cli.analysis.causes import State, Suspect
from disttrain_cli.analysis.losses import CROWDED, Explained
from disttrain_cli.analysis.replay import Delays, Graph
from disttrain_cli.analysis.result import Place
from disttrain_cli.analysis.suspects import by_rank, most_s, of_passes
from disttrain_cli.analysis.walk import Floats

COMPUTE, TRANSFER, HANDOVER, LOAD, GAP, UPDATE = range(6)  # of a state
#: A unit is slow that takes so many times as long for its work as the others do, by the profile.
SLOW_UNIT = 1.1


def state_of(delays: Delays) -> State:
    """Times of a replay."""
    return (delays.compute, delays.transfer, delays.handover, delays.load, delays.gap, delays.update)


def replayed(graph: Graph, state: State) -> Floats:
    """Seconds of every step [steps]."""
    return graph.replay(Delays(*state))


def own_suspects(graph: Graph, why: Explained, where: Mapping[int, Place]) -> list[Suspect]:
    """Everything that could be mended without another layout."""
    return [*of_passes(graph, why, _scaled, where), *_slow_units(graph), *_transfers(graph), *_data(graph),
            *_hosts(graph, why, where)]


def _scaled(state: State, factor: Floats, more: Floats) -> State:
    return (state[COMPUTE] * factor + more, *state[TRANSFER:])


def _with(state: State, column: int, values: Floats) -> State:
    return (*state[:column], values, *state[column + 1:])


def _slow_units(graph: Graph) -> Iterator[Suspect]:
    """Units of which every stage takes longer for its work than the profile says, more than other units do."""
    units = np.asarray(graph.unit)
    took = {unit: _least_factor(graph, units == unit) for unit in dict.fromkeys(graph.unit)}
    known = sorted(factor for factor in took.values() if factor is not None)
    usual = max(1.0, known[(len(known) - 1) // 2]) if known else 1.0
    none = np.zeros_like(graph.predicted)
    for unit, factor in took.items():
        if factor is not None and factor > SLOW_UNIT * usual:
            times = np.where((units == unit)[:, None], usual / factor, 1.0)
            yield Suspect("unit", Place(unit=unit), lambda state, times=times: _scaled(state, times, none),
                          most_s(graph, graph.recorded.compute * (1 - times)))


def _least_factor(graph: Graph, own: NDArray[np.bool_]) -> float | None:
    """Time over the profile's, of the rank of a unit that is fastest for its work; None where that is not known."""
    if graph.crowded or not (graph.predicted[own] > 0).any():
        return None
    _, ranks = np.unique(graph.rank[own], return_inverse=True)
    took, expected = (np.bincount(ranks, values[own].sum(axis=1)) for values in (graph.recorded.compute,
                                                                                  graph.predicted))
    return float((took[expected > 0] / expected[expected > 0]).min())


def _transfers(graph: Graph) -> Iterator[Suspect]:
    """By cut, and at the end of the step: nothing slower than usual."""
    usual = graph.without_delays()
    for place, own in graph.cuts().items():
        pick = np.zeros((len(graph.rank), 1), dtype=bool)
        pick[own] = True
        late = np.where(pick, (graph.recorded.transfer - usual.transfer).clip(0.0), 0.0)
        waits = np.where(pick, (graph.recorded.handover - usual.handover).clip(0.0), 0.0)
        if graph.crowded > CROWDED:  # who is ready to receive waits for a core
            late = np.zeros_like(late)
        yield Suspect("communication", Place(unit=place[0], stage=place[1]),
                      lambda state, late=late, waits=waits: _with(_with(
                          state, TRANSFER, state[TRANSFER] - late), HANDOVER, state[HANDOVER] - waits),
                      most_s(graph, late + waits))
    late_update = (graph.recorded.update - usual.update).clip(0.0)
    yield Suspect("communication", Place(), lambda state: _with(state, UPDATE, state[UPDATE] - late_update),
                  float(late_update.mean()))


def _data(graph: Graph) -> Iterator[Suspect]:
    for unit in dict.fromkeys(graph.unit):
        own = (np.asarray(graph.unit) == unit)[:, None]
        yield Suspect("data", Place(unit=unit),
                      lambda state, own=own: _with(state, LOAD, np.where(own, 0.0, state[LOAD])),
                      most_s(graph, np.where(own, graph.recorded.load, 0.0)))


def _hosts(graph: Graph, why: Explained, where: Mapping[int, Place]) -> list[Suspect]:
    """No moments between passes, and passes that take what their rank's usually do."""
    recorded = graph.recorded
    late = (recorded.transfer - graph.without_delays().transfer).clip(0.0) * (graph.crowded > CROWDED)
    steady = np.divide(why.ranked, recorded.compute, out=np.ones_like(why.ranked), where=recorded.compute > 0)

    def mend(pick: NDArray[np.bool_]) -> Callable[[State], State]:
        own = pick[:, None]

        def mended(state: State) -> State:
            state = _scaled(state, np.where(own, steady, 1.0), np.zeros_like(steady))
            state = _with(state, TRANSFER, state[TRANSFER] - np.where(own, late, 0.0))
            return _with(state, GAP, np.where(own, 0.0, state[GAP]))
        return mended

    return by_rank("host", graph.rank, where, recorded.gap + late + (recorded.compute - why.ranked).clip(0.0), mend)
