"""Breakdown of the ranks' time, and the part that stragglers cost the others.

Every moment of a judged step of a rank is of exactly one kind, so compute, which is the ideal, and
the losses sum to the step. By key of `lost_s`:

- `worker`: waiting, not overlapped with compute, for the ranks that are last more often than by
  chance.
- `communication`: waiting for any other last rank, on the device or between hosts, transfers, and
  copies and fills, where they are not overlapped with compute.
- `data`: the device is idle while the CPU loads data (an annotation or operator named after the
  DataLoader).
- `host`: the device is idle and its host delays it: the next kernel was launched only after the
  device had become idle, or, if its launch is not recorded, the host was running operators or
  calls. Before the first kernel of a step and after its last one, for more than 1 ms, the host must
  be recorded running something.
- `unexplained`: the device is idle for no recorded reason; or the next kernel was launched long
  before, so it waited for something else.
- `unit`, `stage`, `intra_microbatch`, `inter_microbatch`: always 0. Such traces name no units,
  stages, microbatches or samples; the cost of uneven ones is in `worker` if it is always the same
  rank, else in `communication`.

Delayed ranks are found by replaying the collectives (`late.py`); the saving of fixing them is
`worker`: waiting for them, and what they compute, load or idle longer than others, which is
subtracted from its part. If the replay finds none, `worker` is the waiting for a straggler.

A straggler is a rank that joins collectives and messages last more often than by chance, and for
which the others wait long. The null hypothesis: each rank is last with probability 1/n,
independently; the p-value is the tail of the binomial, times n because any rank could have been the
one. Being last into a message says little: a pipeline fills and drains, and the last rank may have
waited itself. The share of waiting at messages that is for a rank is therefore estimated: by how
much it computes, copies and loads data longer than the mean of the others, once for every other
rank, and no more than all waiting at messages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import comb, exp, log
from typing import NamedTuple

import numpy as np

from disttrain_cli.analysis.kineto.steps import JudgedSteps, Row
from disttrain_cli.analysis.losses import CAUSES
from disttrain_cli.analysis.walk import Floats

#: Significance level of a straggler.
LEAST_SURE = 0.05
#: If a larger share of the waiting is for one rank, that rank may be the straggler, unless its
#: p-value is larger than `MOST_CHANCE`.
MOST_WAITING, MOST_CHANCE = 0.8, 0.5
#: Finer kinds of lost time → the key of `lost_s` that they are part of.
KEY_OF = {
    "worker": "worker",
    "others": "communication",
    "transfers": "communication",
    "host_waits": "communication",
    "host_copies": "communication",
    "device_copies": "communication",
    "data": "data",
    "host_works": "host",
    "host_silent": "host",
    "queued": "unexplained",
    "unrecorded": "unexplained",
}
_MOST_EXACT = 500
#: Delayed ranks that cost a smaller share of a step are no stragglers.
LEAST_STRAGGLER = 0.05
#: Activity of a rank → its column of `times`.
_WORKS = {
    "compute": "compute_ns",
    "data": "idle_data_ns",
    "host_works": "idle_cpu_ns",
    "host_silent": "idle_late_ns",
    "host_copies": "host_copies_ns",
    "unrecorded": "idle_unrecorded_ns",
}


class Turns(NamedTuple):
    """Counts of collectives that a rank, or one of several, joins, and joins last."""

    joined: int
    last: int
    expected: float  # expected number of last joins if every rank were last equally often


@dataclass(frozen=True)
class Blame:
    """Evidence that others wait for some ranks."""

    turns: Turns  # collectives that one of them joins
    costly: Turns  # those of them in which others wait long
    share: float  # share of all waiting
    chance: float  # p-value of being last this often

    @property
    def sure(self) -> bool:
        return self.chance < LEAST_SURE


@dataclass(frozen=True)
class Straggler(Blame):
    """A rank that others wait for."""

    rank: int


@dataclass(frozen=True)
class Late(Blame):
    """Delayed ranks, one or several that hide each other, with those before them fixed."""

    ranks: list[int]
    gain_s: Floats  # [steps] seconds saved by fixing them, after those before them
    waited_s: float  # part of it that others waited, per step and rank
    alone_s: list[float]  # seconds saved by fixing each alone
    steps: list[int]


@dataclass(frozen=True)
class Losses:
    """Breakdown of every rank's time in the judged steps, and of waiting by the rank waited for.

    `blame` has the rows of `kineto/blame.sql`.
    """

    judged: JudgedSteps
    blame: list[Row]
    present: float = 1.0  # share of the job's ranks with traces
    crowded: bool = False  # ranks that cannot be separated are read as one
    late: Sequence[Late] = ()  # delayed ranks, by saving
    unclassified: float = 0.0  # share of the kernels' time of unknown kind
    repaired: float = 0.0  # share of the kernels with impossible times

    @property
    def marked(self) -> bool:
        """True if steps are marked; else the whole recording is one."""
        return self.judged.steps != [None]

    @cached_property
    def ranks(self) -> list[Row]:
        """Mean row of each rank over its judged steps."""
        sums = dict[int, Row]()
        for row in self.judged.rows:
            own = sums.setdefault(row["rank"], dict.fromkeys(row, 0.0) | {"rank": row["rank"]})
            for column, value in row.items():
                if column.endswith("_ns"):
                    own[column] += value / len(self.judged.steps)
        return list(sums.values())

    @property
    def step_s(self) -> float:
        """Seconds of a judged step, mean over the ranks."""
        return self.mean("step_ns")

    def mean(self, column: str) -> float:
        """Return the mean over the ranks of a column in ns, as s per step."""
        return sum(of(row, column) for row in self.ranks) / len(self.ranks)

    @cached_property
    def shares(self) -> dict[str, Floats]:
        """Share of every judged step by key of `lost_s`, mean over the ranks."""
        index = {step: number for number, step in enumerate(self.judged.steps)}
        step_s = np.full(len(index), 1e-12)
        lost_s = {key: np.zeros(len(index)) for key in CAUSES}
        for row in self.judged.rows:
            if row["step"] in index:
                step_s[index[row["step"]]] += of(row, "step_ns")
                for key, seconds in by_key(parts(row, 0.0)).items():
                    lost_s[key][index[row["step"]]] += seconds
        return {key: seconds / step_s for key, seconds in lost_s.items()}

    @cached_property
    def straggler(self) -> Straggler | None:
        """Rank that others wait for most; None if nothing was matched."""
        return next(iter(self.waited_for), None)

    @cached_property
    def waited_for(self) -> list[Straggler]:
        """Ranks in matched operations, the one that others wait for most first."""
        if not any(row["wait_ns"] for row in self.blame):
            return []
        stragglers = []
        for row in self.blame:
            turns = Turns(row["joined"], row["last"], float(row["expected"]))
            costly = Turns(row["costly_joined"], row["costly_last"], float(row["costly_expected"]))
            stragglers.append(
                Straggler(
                    turns,
                    costly,
                    self._share(row),
                    p_value(turns, costly, len(self.blame)),
                    row["rank"],
                )
            )
        return sorted(stragglers, key=lambda one: -one.share)

    def cost_s(self, one: Straggler) -> float:
        """Return the seconds per step and rank that waiting for a rank costs."""
        return one.share * self.mean("exposed_wait_ns")

    @cached_property
    def at_messages(self) -> float:
        """Share of the waiting that is at messages."""
        waited = sum(row["wait_ns"] for row in self.blame)
        return sum(row["wait_at_messages_ns"] for row in self.blame) / waited if waited else 0.0

    @cached_property
    def worker_share(self) -> float:
        """Share of the waiting that is for ranks that are last significantly often."""
        return min(1.0, sum(one.share for one in self.waited_for if one.sure))

    def longer_ns(self, rank: int) -> float:
        """Return by how much a rank's compute, copies and data loading exceed the others' mean."""
        works = {
            row["rank"]: row["compute_ns"] + row["memory_ns"] + row["idle_data_ns"]
            for row in self.ranks
        }
        others = [ns for other, ns in works.items() if other != rank]
        return works[rank] - sum(others) / len(others) if others else 0.0

    def _share(self, row: Row) -> float:
        """Return the share of all waiting that is for a rank (a row of `blame`)."""
        in_collectives = row["blamed_ns"] / sum(other["wait_ns"] for other in self.blame)
        exposed_ns = sum(other["exposed_wait_ns"] for other in self.ranks)
        if not self.at_messages or not exposed_ns:
            return float(in_collectives)
        longer_ns = max(0.0, self.longer_ns(row["rank"])) * (len(self.ranks) - 1)
        return float(in_collectives + min(self.at_messages, longer_ns / exposed_ns))

    @cached_property
    def stragglers(self) -> list[Late]:
        """Delayed ranks that cost enough and are last significantly often.

        If there are none, the rank that most of the waiting is for, if its p-value is low.
        """
        costly = [one for one in self.late if one.gain_s.mean() >= LEAST_STRAGGLER * self.step_s]
        return [one for one in costly if one.sure] or [
            one for one in costly[:1] if one.share >= MOST_WAITING and one.chance <= MOST_CHANCE
        ]

    def mean_parts(self) -> dict[str, float]:
        """Return lost seconds per step by finer kind, mean over the ranks."""
        share = 0.0 if self.stragglers else self.worker_share
        of_ranks = [parts(row, share) for row in self.ranks]
        means = {part: sum(own[part] for own in of_ranks) / len(of_ranks) for part in KEY_OF}
        for part, gain_s in self.regained.items():
            means["worker"] += gain_s
            if part in means:
                means[part] -= gain_s
        return means

    def ideal_s(self) -> float:
        """Return compute per step and rank, without what stragglers compute longer than others."""
        return self.mean("compute_ns") - self.regained.get("compute", 0.0)

    @cached_property
    def regained(self) -> dict[str, float]:
        """Saving of fixing the stragglers by kind of time, seconds per step, mean over the ranks.

        It consists of the others' waiting for them, what they do longer than others, and transfers
        that would then be overlapped.
        """
        if not self.stragglers:
            return {}
        left_s = sum(float(one.gain_s.mean()) for one in self.stragglers)
        waited_s = min(sum(one.waited_s for one in self.stragglers), self.mean("exposed_wait_ns"))
        longer = self.longer_of([rank for one in self.stragglers for rank in one.ranks])
        regained_s, total_s = {"others": waited_s}, sum(longer.values())
        left_s -= waited_s
        if total_s:
            regained_s |= {
                part: min(left_s * more_s / total_s, self.mean(_WORKS[part]))
                for part, more_s in longer.items()
            }
        left_s -= sum(regained_s.values()) - waited_s
        return regained_s | {
            "transfers": max(
                0.0, min(left_s, self.mean("exposed_ns") - self.mean("exposed_wait_ns"))
            )
        }

    def longer_of(self, ranks: Sequence[int]) -> dict[str, float]:
        """Return by how much ranks do each activity longer than the others' (lower) median.

        It is in seconds per step, summed over the ranks.
        """
        longer = dict.fromkeys(_WORKS, 0.0)
        for part, column in _WORKS.items():
            others = sorted(of(row, column) for row in self.ranks if row["rank"] not in ranks)
            for row in self.ranks:
                if others and row["rank"] in ranks:
                    longer[part] += max(0.0, of(row, column) - others[(len(others) - 1) // 2])
        return longer

    def lost_s(self) -> dict[str, float]:
        """Return seconds per step and rank by cause: the keys of every analysis."""
        return by_key(self.mean_parts())


def of(row: Row, column: str) -> float:
    """Convert a column in ns to seconds."""
    return float(row[column]) / 1e9


def parts(row: Row, worker_share: float) -> dict[str, float]:
    """Return lost seconds of a row by finer kind.

    Args:
        row: times of a rank.
        worker_share: share of its waiting that is for stragglers.
    """
    wait_s, host_copies_s = of(row, "exposed_wait_ns"), of(row, "host_copies_ns")
    return {
        "worker": worker_share * wait_s,
        "others": wait_s - worker_share * wait_s,
        "transfers": of(row, "exposed_ns") - wait_s,
        "host_waits": of(row, "idle_host_wait_ns"),
        "host_copies": host_copies_s,
        "device_copies": of(row, "memory_ns") - host_copies_s,
        "data": of(row, "idle_data_ns"),
        "host_works": of(row, "idle_cpu_ns"),
        "host_silent": of(row, "idle_late_ns"),
        "queued": of(row, "idle_queued_ns"),
        "unrecorded": of(row, "idle_unrecorded_ns"),
    }


def by_key(parts: dict[str, float]) -> dict[str, float]:
    """Sum finer kinds to the keys of `lost_s`."""
    return {
        key: sum(seconds for part, seconds in parts.items() if KEY_OF[part] == key) + 0.0
        for key in CAUSES
    }


def recurring(shares: Floats, least: float) -> float:
    """Return the share of steps in which a cause costs enough if it is half or fewer, else 1.

    With half or fewer, more steps may show another typical step.
    """
    share = float((shares >= least).mean())
    return share if share <= 0.5 else 1.0


def p_value(turns: Turns, costly: Turns, sets: int) -> float:
    """Return the p-value of one of `sets` sets of ranks being last this often.

    It is by all collectives or by the costly ones, whichever shows more; if these differ, it is
    doubled for the two tests.
    """
    tests = {turns, costly}
    return min(1.0, len(tests) * sets * min(tail(*one) for one in tests))


def tail(joined: int, last: int, expected: float) -> float:
    """Return the probability of being last at least so often.

    If the exact sum would be long, it is Chernoff's bound of it.
    """
    chance = expected / joined
    if joined <= _MOST_EXACT:
        return sum(
            comb(joined, k) * chance**k * (1 - chance) ** (joined - k)
            for k in range(last, joined + 1)
        )
    seen = last / joined
    if seen <= chance:
        return 1.0
    rest = 0.0 if seen == 1 else (1 - seen) * log((1 - seen) / (1 - chance))
    return exp(-joined * (seen * log(seen / chance) + rest))
