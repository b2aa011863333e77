"""Suspects in disttrain's traces: those of all formats, and transfers, data, hosts, whole units."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from disttrain_cli.analysis.causes import State, Suspect
from disttrain_cli.analysis.graph import Delays, Graph
from disttrain_cli.analysis.job.remedies.groups import held_up, of_groups, without
from disttrain_cli.analysis.losses import CROWDED, Explained, explain
from disttrain_cli.analysis.result.verdicts import Place
from disttrain_cli.analysis.suspects import by_rank, common, most_s, of_passes
from disttrain_cli.analysis.walk import Floats

COMPUTE, TRANSFER, HANDOVER, LOAD, GAP, UPDATE = range(6)  # indices in a state
#: Stages and units are slow if they take this many times as long for their work as others do, by
#: the profile.
SLOW_STAGE, SLOW_UNIT = 1.03, 1.1


def state_of(delays: Delays) -> State:
    """Return the input of a replay."""
    return (
        delays.compute,
        delays.transfer,
        delays.handover,
        delays.load,
        delays.gap,
        delays.update,
    )


def replayed(graph: Graph, state: State) -> Floats:
    """Return the seconds of every step [steps]."""
    return graph.replay(Delays(*state))


def own_suspects(graph: Graph, why: Explained, where: Mapping[int, Place]) -> list[Suspect]:
    """Return every possible fault that can be fixed without another layout."""
    share, level, alike = held_up(graph), graph, why
    if share.any():  # waits for the slow rank of a group are no fault of the others
        compute = graph.recorded.compute * without(graph, share)
        level = replace(graph, recorded=replace(graph.recorded, compute=compute))
        alike = explain(level, compute, graph.predicted)
    return [
        *_one_per_rank([*of_passes(graph, alike, _scaled, where), *of_groups(graph, share, where)]),
        *_slow_places(level),
        *_transfers(graph),
        *_unheard(graph),
        *_data(graph),
        *_hosts(graph, why, where),
        *_emulation(graph, where),
    ]


def _one_per_rank(suspects: Iterable[Suspect]) -> list[Suspect]:
    """Merge the suspects of a rank that is slow among replicas and delays its group as well."""
    merged: dict[object, Suspect] = {}
    for number, one in enumerate(suspects):
        key = number if one.place.rank is None else (one.cause, one.place)
        merged[key] = _both(merged[key], one) if key in merged else one
    return list(merged.values())


def _both(first: Suspect, second: Suspect) -> Suspect:
    return replace(
        first,
        mend=lambda state: second.mend(first.mend(state)),
        most_s=first.most_s + second.most_s,
    )


def is_split(suspect: Suspect) -> bool:
    """Return True if it is the plan's partition of a unit's layers over its stages."""
    return suspect.cause == "stage" and suspect.place.stage is None


def is_update(suspect: Suspect) -> bool:
    """Return True if it is the time after the last pass of a step."""
    return suspect.cause == "communication" and suspect.place.unit is None


def _scaled(state: State, factor: Floats, more: Floats) -> State:
    return (state[COMPUTE] * factor + more, *state[TRANSFER:])


def _with(state: State, column: int, values: Floats) -> State:
    return (*state[:column], values, *state[column + 1 :])


def _slow_places(graph: Graph) -> Iterator[Suspect]:
    """Yield stages that are slower for their work than their unit's others, and slow units.

    A unit is slow if all of its stages are.
    """
    units, none = np.asarray(graph.unit), np.zeros_like(graph.predicted)
    took = {unit: _factors(graph, units == unit) for unit in dict.fromkeys(graph.unit)}
    best = {unit: min(factors.values(), key=np.mean) for unit, factors in took.items() if factors}
    usual = max(1.0, min((float(factor.mean()) for factor in best.values()), default=1.0))

    def suspect(
        cause: str, place: Place, mask: NDArray[np.bool_], factor: Floats | float
    ) -> Suspect:
        times = np.where(mask[:, None], factor, 1.0)
        return Suspect(
            cause,
            place,
            lambda state: _scaled(state, times, none),
            most_s(graph, graph.recorded.compute * (1 - times)),
        )

    for unit, factor in best.items():
        for stage, mask in took[unit].items():
            if mask.mean() > SLOW_STAGE * factor.mean():
                yield suspect(
                    "stage",
                    Place(unit=unit, stage=stage),
                    (units == unit) & (graph.stage == stage),
                    np.minimum(1.0, factor / mask),
                )
        if factor.mean() > SLOW_UNIT * usual:
            yield suspect("unit", Place(unit=unit), units == unit, usual / float(factor.mean()))


def _factors(graph: Graph, mask: NDArray[np.bool_]) -> dict[int, Floats]:
    """Return, by stage of a unit, its time over the profile's [steps], of its (lower) median rank.

    It is empty if the profile predicts nothing or cores are shared.
    """
    factors: dict[int, Floats] = {}
    for stage in np.unique(graph.stage[mask]).tolist() if not graph.crowded else ():
        pick = mask & (graph.stage == stage)
        _, ranks = np.unique(graph.rank[pick], return_inverse=True)
        took, expected = (
            np.stack([values[pick][ranks == rank].sum(axis=0) for rank in range(ranks.max() + 1)])
            for values in (graph.recorded.compute, graph.predicted)
        )
        known = expected.sum(axis=1) > 0
        if not known.any():
            return {}
        ratio = took[known].sum(axis=1) / expected[known].sum(axis=1)
        usual = int(np.argsort(ratio)[(len(ratio) - 1) // 2])
        factors[stage] = np.divide(
            took[known][usual],
            expected[known][usual],
            where=expected[known][usual] > 0,
            out=np.full(took.shape[1], ratio[usual]),
        )
    return factors


def _transfers(graph: Graph) -> Iterator[Suspect]:
    """Yield, by cut and for the end of the step, what is slower than usual."""
    usual = graph.without_delays()
    for stage, mask in graph.cuts().items():
        pick = np.zeros((len(graph.rank), 1), dtype=bool)
        pick[mask] = True
        pick[graph.unheard >= 0] = False
        late = np.where(pick, (graph.recorded.transfer - usual.transfer).clip(0.0), 0.0)
        waits = np.where(pick, (graph.recorded.handover - usual.handover).clip(0.0), 0.0)
        if graph.crowded > CROWDED:  # a rank that is ready to receive waits for a core
            late = np.zeros_like(late)
        yield Suspect(
            "communication",
            Place(unit=stage[0], stage=stage[1]),
            partial(_sooner, late=late, waits=waits),
            most_s(graph, late + waits),
        )
    late_update = (graph.recorded.update - usual.update).clip(0.0)
    yield Suspect(
        "communication",
        Place(),
        lambda state: _with(state, UPDATE, state[UPDATE] - late_update),
        float(late_update.mean()),
    )


def _unheard(graph: Graph) -> Iterator[Suspect]:
    """Yield ranks without a trace that may have sent later than usual, or over slow links."""
    late = (graph.recorded.transfer - graph.without_delays().transfer).clip(0.0)
    for number, ranks in enumerate(graph.lost):
        mask = np.where((graph.unheard == number)[:, None], late, 0.0)
        yield Suspect(
            "unknown",
            common(
                [Place(unit=unit, stage=stage, replica=replica) for unit, stage, replica in ranks]
            ),
            partial(_sooner, late=mask, waits=np.zeros_like(mask)),
            most_s(graph, mask),
        )


def _sooner(state: State, late: Floats, waits: Floats) -> State:
    return _with(_with(state, TRANSFER, state[TRANSFER] - late), HANDOVER, state[HANDOVER] - waits)


def _ready(state: State, mask: NDArray[np.bool_]) -> State:
    return _with(state, LOAD, np.where(mask, 0.0, state[LOAD]))


def _data(graph: Graph) -> Iterator[Suspect]:
    for unit in dict.fromkeys(graph.unit):
        mask = (np.asarray(graph.unit) == unit)[:, None]
        yield Suspect(
            "data",
            Place(unit=unit),
            partial(_ready, mask=mask),
            most_s(graph, np.where(mask, graph.recorded.load, 0.0)),
        )


def _hosts(graph: Graph, why: Explained, where: Mapping[int, Place]) -> list[Suspect]:
    """Return ranks with gaps between passes, and with passes longer than the rank's usual time."""
    recorded, gap = graph.recorded, graph.recorded.gap - graph.late
    late = (recorded.transfer - graph.without_delays().transfer).clip(0.0) * (
        graph.crowded > CROWDED
    )
    steady = np.divide(
        why.ranked, recorded.compute, out=np.ones_like(why.ranked), where=recorded.compute > 0
    )

    def mend(pick: NDArray[np.bool_]) -> Callable[[State], State]:
        mask = pick[:, None]

        def mended(state: State) -> State:
            state = _scaled(state, np.where(mask, steady, 1.0), np.zeros_like(steady))
            state = _with(state, TRANSFER, state[TRANSFER] - np.where(mask, late, 0.0))
            return _with(state, GAP, state[GAP] - np.where(mask, gap, 0.0))

        return mended

    return by_rank(
        "host", graph.rank, where, gap + late + (recorded.compute - why.ranked).clip(0.0), mend
    )


def _emulation(graph: Graph, where: Mapping[int, Place]) -> Iterator[Suspect]:
    """Yield the start delay of a rehearsal's own host, which says nothing about the plan."""
    if graph.late.any():
        yield Suspect(
            "unknown",
            Place(host=next(iter(where.values())).host),
            lambda state: _with(state, GAP, state[GAP] - graph.late),
            most_s(graph, graph.late),
        )
