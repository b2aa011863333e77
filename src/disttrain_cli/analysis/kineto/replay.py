"""Replay of recorded collectives: the saving of fixing a rank, and ranks hidden behind others.

Between two of its collectives a rank works: all time but waiting for others that is not overlapped
with compute. A collective begins when the last of its ranks has joined, moves data as long as
recorded, and lets those ranks continue that it blocked: ranks whose compute continued meanwhile are
not blocked. One that was launched early and ran after another of its stream is ready when the
compute before its launch has ended. A message is a collective of two; a sender that has returned
before the receiver joins waits for no rank. Every measured step is replayed from the end of the
collectives of the step before; steps with another structure than most are left out.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from disttrain_cli.analysis.causes import SMALLEST_SHARE, State, Suspect
from disttrain_cli.analysis.kineto.database import KinetoDatabase
from disttrain_cli.analysis.result.verdicts import Place
from disttrain_cli.analysis.walk import Floats, Ints

#: A collective that begins so soon after the one before it on its stream waited for it, ns.
QUEUED_NS = 20_000
#: A collective blocks a rank if the rank computes nothing during more than this share of it.
HELD_SHARE = 0.1
#: Largest overlap that is due to rounding.
ROUNDED_NS = 2000
#: Share of communication in messages with an unknown end above which waiting cannot be separated
#: from work.
MOST_LONE = 0.05
#: Most ranks that are replayed, those that work longest beyond their peers first.
MOST_RANKS = 32


@dataclass(frozen=True)
class Collectives:
    """Collectives and messages of every replayed step, in the order in which they began.

    A node is a rank in one of them. Times are seconds, [nodes, steps] or [ranks, steps].
    """

    steps: list[int]  # replayed steps; -1 if none are marked
    ranks: list[int]
    rank_of: Ints  # index in `ranks` of every node
    members: list[Ints]  # nodes of every collective
    names: list[str]  # operation of every node, and its number of ranks
    behind: Ints  # previous node on its stream, which it may have waited for, or -1
    begin: Floats  # begin of each rank
    work: Floats  # from one node of the rank, or the begin, until it is ready for the next
    queued: NDArray[np.bool_]  # it waited for the previous node on its stream
    moves: Floats  # from the last arrival to the end
    waits: NDArray[np.bool_]  # the rank's earlier ones had ended when it joined
    holds: NDArray[np.bool_]  # the rank could not compute meanwhile
    gone: NDArray[np.bool_]  # it sent and returned before the receiver joined
    worked_s: Floats  # from being ready to the end, without exposed waiting

    def lengths(self, state: State) -> Floats:
        """Return the seconds of every step [steps] for other work, `state` = `(work,)`."""
        return self._play(state, lambda *_: None)

    def last(self, state: State) -> tuple[NDArray[np.int64], Floats]:
        """Return the last rank (its index) of each collective, and the others' waiting in seconds.

        Both are [collectives, steps]; the seconds are summed over the others.
        """
        last = np.zeros((len(self.members), state[0].shape[1]), np.int64)
        waited = np.zeros(last.shape)

        def note(number: int, came: Floats) -> None:
            nodes = self.members[number]
            last[number] = self.rank_of[nodes][came.argmax(axis=0)]
            waited[number] = np.where(self.gone[nodes], 0.0, came.max(axis=0) - came).sum(axis=0)

        self._play(state, note)
        return last, waited

    def _play(self, state: State, note: Callable[[int, Floats], None]) -> Floats:
        (work,) = state
        at, ended = self.begin.copy(), np.full(work.shape, -np.inf)
        # latest end of collectives that a rank has joined and not waited for yet
        held = np.full(at.shape, -np.inf)
        for number, nodes in enumerate(self.members):
            ranks, behind = self.rank_of[nodes], self.behind[nodes]
            ready = at[ranks] + work[nodes]
            until = held[ranks] + work[nodes]
            waits = self.waits[nodes]
            ready, until = (
                np.where(waits, np.maximum(ready, until), ready),
                np.where(waits, -np.inf, until),
            )
            came = np.where(
                self.queued[nodes] & (behind >= 0)[:, None], np.maximum(ready, ended[behind]), ready
            )
            note(number, came)
            ended[nodes] = np.where(self.gone[nodes], came, came.max(axis=0)) + self.moves[nodes]
            at[ranks] = ready
            held[ranks] = np.where(
                self.holds[nodes], np.maximum(until, ended[nodes] - self.worked_s[nodes]), until
            )
        lengths: Floats = ended.max(axis=0) - self.begin.max(axis=0)
        return lengths

    def suspects(self) -> list[Suspect]:
        """Return ranks that work longer than the (lower) median of ranks with the same collectives.

        If no rank has the same ones, as in stages of a pipeline, longer in a step than the median
        of all others.
        """
        of_rank = [np.flatnonzero(self.rank_of == index) for index in range(len(self.ranks))]
        alike = defaultdict[tuple[str, ...], list[int]](list)
        for index, nodes in enumerate(of_rank):
            alike[tuple(self.names[int(node)] for node in nodes)].append(index)
        usual = dict[int, Floats]()
        for peers in alike.values():
            if len(peers) > 1:
                works = np.stack([self.work[of_rank[index]] for index in peers])
                usual |= dict(zip(peers, np.minimum(works, _of_others(works)), strict=True))
        if not usual and len(of_rank) > 1:
            total = np.stack([self.work[nodes].sum(axis=0) for nodes in of_rank])
            share = np.minimum(1.0, _of_others(total) / np.maximum(total, 1e-9))
            usual = {index: self.work[nodes] * share[index] for index, nodes in enumerate(of_rank)}
        least_s = SMALLEST_SHARE * float(self.lengths((self.work,)).mean())
        suspects = []
        for index, less in usual.items():
            more_s = float((self.work[of_rank[index]] - less).sum(axis=0).mean())
            if more_s >= least_s:
                suspects.append(
                    Suspect(
                        "worker",
                        Place(rank=self.ranks[index]),
                        _as_usual(of_rank[index], less),
                        more_s,
                    )
                )
        return sorted(suspects, key=lambda one: -one.most_s)[:MOST_RANKS]


def _of_others(times: Floats) -> Floats:
    """Return, for every rank (first axis), the lower median of the others."""
    ordered, half = np.sort(times, axis=0), (len(times) - 2) // 2
    return np.where(times <= ordered[half], ordered[half + 1], ordered[half])


def _as_usual(nodes: Ints, usual: Floats) -> Callable[[State], State]:
    def mend(state: State) -> State:
        work = state[0].copy()
        work[nodes] = usual
        return (work,)

    return mend


def read_collectives(database: KinetoDatabase, judged: Sequence[int | None]) -> Collectives | None:
    """Return the collectives and messages of the judged steps.

    It is None if no two ranks joined one, or too many messages have an unknown end.
    """
    read = database.columns("participations")
    chosen = np.isin(read["step"], [-1 if step is None else step for step in judged])
    read = {name: column[chosen] for name, column in read.items()}
    if (
        not len(read["rank"])
        or (database.answer("totals")[0]["lone_messages_share"] or 0.0) > MOST_LONE
    ):
        return None
    rows = {name: np.ma.getdata(column) for name, column in read.items()}
    rows["launched_ns"] = np.where(
        np.ma.getmaskarray(read["launched_ns"]), rows["start_ns"], rows["launched_ns"]
    )
    steps, at = _alike(rows)
    nodes = at[0]
    ranks, rank_of = np.unique(rows["rank"][nodes], return_inverse=True)
    start, end, latest, launched = (
        rows[name][at].T for name in ("start_ns", "end_ns", "latest_ns", "launched_ns")
    )
    behind = _behind(rank_of, rows["stream"][nodes])
    queued = (behind >= 0)[:, None] & (start - end[behind] < QUEUED_NS)
    begin, waits = np.zeros((len(ranks), len(steps))), np.zeros(start.shape, bool)
    work, worked_s, idle = (np.zeros(start.shape) for _ in range(3))
    clocks = _clocks(database, rows)
    for index, rank in enumerate(ranks):
        mask, clock = rank_of == index, clocks[int(rank)]
        begins = _begins(rows, clock, int(rank), steps)
        could = np.minimum(
            np.maximum(launched[mask], clock.computed_before(launched[mask])), start[mask]
        )
        worked = clock.worked(np.vstack([begins[None], np.where(queued[mask], could, start[mask])]))
        work[mask], worked_s[mask] = np.diff(worked, axis=0), clock.worked(end[mask]) - worked[1:]
        idle[mask] = (end - start)[mask] - (clock.computed(end[mask]) - clock.computed(start[mask]))
        waits[mask] = (
            np.vstack([begins, np.maximum.accumulate(end[mask])[:-1]]) <= start[mask] + ROUNDED_NS
        )
        begin[index] = begins - rows["ahead_ns"][nodes][mask][0] - start.min()
    firsts = np.flatnonzero(np.diff(rows["number"][nodes], prepend=-1))
    return Collectives(
        steps=steps,
        ranks=ranks.tolist(),
        rank_of=rank_of,
        members=np.split(np.arange(len(nodes)), firsts[1:]),
        names=[f"{rows['name'][node]} {rows['ranks'][node]}" for node in nodes],
        gone=rows["gone"][at].T,
        behind=behind,
        begin=begin / 1e9,
        work=work / 1e9,
        queued=queued,
        moves=np.maximum(end - latest, 0) / 1e9,
        waits=waits,
        holds=idle > HELD_SHARE * (end - start),
        worked_s=worked_s / 1e9,
    )


def _behind(rank_of: Ints, stream: Ints) -> NDArray[np.int64]:
    """Return the node before each on its rank and stream, or -1."""
    order = np.lexsort((np.arange(len(stream)), stream, rank_of))
    same = (np.diff(rank_of[order]) == 0) & (np.diff(stream[order]) == 0)
    behind = np.full(len(stream), -1)
    behind[order[1:][same]] = order[:-1][same]
    return behind


@dataclass(frozen=True)
class _Clock:
    """Cumulative work and compute of a rank, up to a moment of its clock in ns."""

    first: int
    times: NDArray[np.int64]  # relative to `first`, as floats cannot represent ns since 1970
    waited: NDArray[np.int64]  # ns of exposed waiting up to each of the times
    busy: NDArray[np.int64]  # ns of compute
    launched: NDArray[np.int64]  # launches of compute kernels
    ended: NDArray[np.int64]  # latest end of the kernels launched so far

    def worked(self, at: NDArray[np.int64]) -> Floats:
        return np.asarray(at - self.first - np.interp(at - self.first, self.times, self.waited))

    def computed(self, at: NDArray[np.int64]) -> Floats:
        return np.interp(at - self.first, self.times, self.busy)

    def computed_before(self, launched: NDArray[Any]) -> NDArray[Any]:
        """Return the end of the compute that was launched before."""
        index = np.searchsorted(self.launched, launched, side="left") - 1
        return np.where(index >= 0, self.ended[np.maximum(index, 0)] if len(self.ended) else 0, 0)


def _clocks(database: KinetoDatabase, rows: dict[str, Any]) -> dict[int, _Clock]:
    compute = {
        name: np.ma.getdata(column) for name, column in database.columns("computing").items()
    }
    first = {
        row["rank"]: row["first_ns"]
        for row in database.sql(
            "SELECT rank, min(start_ns) AS first_ns FROM windows WHERE measured GROUP BY rank"
        )
    }
    clocks = {}
    for rank in np.unique(rows["rank"]):
        kernels, joined = compute["rank"] == rank, rows["rank"] == rank
        starts, ends = compute["start_ns"][kernels], compute["end_ns"][kernels]
        waits = (
            rows["start_ns"][joined],
            np.maximum(rows["latest_ns"][joined], rows["start_ns"][joined]),
        )
        times = np.concatenate([starts, ends, *waits])
        kinds = np.repeat([0, 0, 1, 1], [len(starts), len(ends), len(waits[0]), len(waits[1])])
        signs = np.repeat([1, -1, 1, -1], [len(starts), len(ends), len(waits[0]), len(waits[1])])
        order = np.argsort(times, kind="stable")
        times, kinds, signs = times[order], kinds[order], signs[order]
        computes = np.cumsum(np.where(kinds == 0, signs, 0)) > 0
        waiting = (np.cumsum(np.where(kinds == 1, signs, 0)) > 0) & ~computes
        spans = np.diff(times)
        launched = np.argsort(compute["launched_ns"][kernels], kind="stable")
        clocks[int(rank)] = _Clock(
            first=first[int(rank)],
            times=times - first[int(rank)],
            waited=np.concatenate([[0], np.cumsum(spans * waiting[:-1])]),
            busy=np.concatenate([[0], np.cumsum(spans * computes[:-1])]),
            launched=compute["launched_ns"][kernels][launched],
            ended=np.maximum.accumulate(ends[launched]) if len(ends) else ends,
        )
    return clocks


def _alike(rows: dict[str, Any]) -> tuple[list[int], NDArray[np.int64]]:
    """Return the steps with the same collectives as most, and their rows [steps, nodes].

    The rows are in the order in which the collectives began.
    """
    by_step = {int(step): np.flatnonzero(rows["step"] == step) for step in np.unique(rows["step"])}
    looks = {
        step: tuple(
            zip(*(rows[name][at].tolist() for name in ("number", "rank", "name")), strict=True)
        )
        for step, at in by_step.items()
    }
    most = Counter(looks.values()).most_common(1)[0][0]
    steps = [step for step, look in looks.items() if look == most]
    at = np.stack([by_step[step] for step in steps])
    latest = rows["latest_ns"][at] - rows["ahead_ns"][at]
    began = np.median(latest - latest.min(axis=1, keepdims=True), axis=0)
    number = rows["number"][at[0]]
    of_all = np.zeros(int(number.max()) + 1)
    np.maximum.at(of_all, number, began)
    return steps, at[:, np.lexsort((rows["rank"][at[0]], number, of_all[number]))]


def _begins(rows: dict[str, Any], clock: _Clock, rank: int, steps: list[int]) -> NDArray[np.int64]:
    """Return the begin of each step on a rank's clock, in ns.

    It is the end of its collectives of the step before.
    """
    mask = rows["rank"] == rank
    known, index = np.unique(rows["step"][mask], return_inverse=True)
    ends = np.zeros(len(known), np.int64)
    np.maximum.at(ends, index, rows["end_ns"][mask])
    before = np.searchsorted(known, steps) - 1
    return np.where(before >= 0, ends[before], clock.first)
