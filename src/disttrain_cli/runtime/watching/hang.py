"""Detection of a hanging job, and of the rank that the others wait for.

A job hangs when no rank has made progress for `train.hang_s`. Every rank publishes its current
operation (`pulse`); which ranks it waits for follows from the operation and the plan: a transfer
waits for the neighbour of its stage, the end of sends for those of all stages of the rank, a
reduction for the other ranks of its group and for the tied-embedding peer. The ranks that are
waited for and do not wait themselves are the cause; if there are none, the ranks wait for each
other in a cycle.
"""

from __future__ import annotations

import signal
import socket
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from disttrain_cli.calls import call
from disttrain_cli.errors import RankLostError
from disttrain_cli.runtime.watching.flight import records
from disttrain_cli.runtime.watching.pulse import State, interval_s, read_state
from disttrain_cli.runtime.watching.verdict import Verdict, publish_verdict
from disttrain_cli.spec.rundir import flight_recorder, rank_log
from disttrain_cli.spec.stage_graph import Stage
from disttrain_cli.spec.trace import COMPUTE

MISSED_BEATS = 5  # number after which a rank counts as not responding
MOST_NAMED = 4
UPSTREAM = ("receive_activation", "send_gradient")
DOWNSTREAM = ("receive_gradient", "send_activation")
#: Operations in which every rank waits for all others.
TOGETHER = ("preflight", "losses", "step", "checkpoint", "evaluation")
#: Operations before the first step, limited by `train.timeout_s`, as large models take long.
START = ("starting", "joining", "building")


class Hang(NamedTuple):
    """Diagnosis of a hanging job."""

    # ranks that the others wait for; several if ambiguous, or if they form a cycle
    causes: list[int]
    circle: bool
    waits: dict[int, list[int]]  # ranks that each rank waits for


def diagnose(states: Mapping[int, State], stages: Sequence[Stage], silent: set[int]) -> Hang:
    """Return the diagnosis from every rank's operation.

    Args:
        silent: ranks that have stopped publishing their state.
    """
    waits = {
        rank: [] if rank in silent else _waits_for(state, states, stages)
        for rank, state in states.items()
    }
    asked = Counter(other for others in waits.values() for other in others)
    causes = [rank for rank in states if not waits[rank] and (asked[rank] or rank in silent)]
    if silent & set(causes):
        causes = sorted(silent & set(causes))
    if causes:
        return Hang(sorted(causes, key=lambda rank: (-asked[rank], rank)), False, waits)
    return Hang(_circle(waits) or sorted(states), True, waits)


def _waits_for(state: State, states: Mapping[int, State], stages: Sequence[Stage]) -> list[int]:
    """Return the ranks that a rank's operation waits for; none where it runs locally."""
    own = [stage for stage in stages if state.rank in stage.ranks]
    stage = own[0]
    if state.operation in (*UPSTREAM, *DOWNSTREAM, "wait"):
        moving = [one for one in own if state.operation == "wait" or state.stage in (-1, one.index)]
        numbers = (
            *(one for each in moving if state.operation not in DOWNSTREAM for one in each.before),
            *(one for each in moving if state.operation not in UPSTREAM for one in each.after),
        )
        return [rank for number in numbers for rank in stages[number].ranks]
    if state.operation in TOGETHER:
        group: Sequence[int] = list(states)
    elif state.operation == "reduce":
        twins = [rank for one in own if one.twin is not None for rank in stages[one.twin].ranks]
        place = stage.ranks.index(state.rank)
        group = [*stage.ranks, *twins[place : place + 1]]
    elif state.operation not in COMPUTE:
        return []
    else:  # the ranks that share the replica's layers
        width = stage.unit.tp_cp_size
        first = stage.ranks.index(state.rank) // width * width
        group = stage.ranks[first : first + width]

    def at(state: State) -> tuple[object, ...]:
        stage = state.stage if state.operation in COMPUTE else None
        return state.step, state.operation, state.slot, stage

    return [
        rank
        for rank in group
        if rank in states and rank != state.rank and at(states[rank]) != at(state)
    ]


def _circle(waits: Mapping[int, list[int]]) -> list[int]:
    """Return ranks that wait for each other, each for the next one."""
    rank, path = min(waits), list[int]()
    while rank not in path:
        path.append(rank)
        if not waits[rank]:
            return []
        rank = waits[rank][0]
    return path[path.index(rank) :]


class HangWatch:
    """Periodic check of the ranks' states for a hang, once every rank has published one."""

    def __init__(self, folder: Path, logs: Path, stages: Sequence[Stage], hang_s: float) -> None:
        self._folder, self._logs, self._stages, self._hang_s = folder, logs, stages, hang_s
        self._ranks = [rank for stage in stages if not stage.chunk for rank in stage.ranks]
        self._several = {rank for stage in stages if stage.chunk for rank in stage.ranks}
        self._states: dict[int, State] = {}
        self._beaten_s: dict[int, float] = {}
        self._moved_s = self._looked_s = time.monotonic()

    def poll(self) -> None:
        """Check the ranks, if it is time.

        Raises:
            RankLostError: no rank has made progress for too long; the ranks write their stacks to
                their logs and exit.
        """
        now_s = time.monotonic()
        if now_s - self._looked_s < interval_s(self._hang_s):
            return
        if now_s - self._looked_s > 3 * interval_s(self._hang_s):  # this process was suspended
            self._moved_s = now_s
        self._looked_s = now_s
        self._look(now_s)
        silent = {
            rank
            for rank, beaten_s in self._beaten_s.items()
            if now_s - beaten_s > MISSED_BEATS * interval_s(self._hang_s)
        }
        if any(
            state.operation in START for rank, state in self._states.items() if rank not in silent
        ):
            self._moved_s = now_s
        if len(self._states) < len(self._ranks) or now_s - self._moved_s < self._hang_s:
            return
        error = self._error(diagnose(self._states, self._stages, silent), silent)
        publish_verdict(self._folder, Verdict(text=f"{error}\n", shown_on=None, hang=True))
        time.sleep(2 * interval_s(self._hang_s))  # the ranks poll for the verdict at this interval
        raise error

    def _look(self, now_s: float) -> None:
        for rank in self._ranks:
            state, before = read_state(self._folder, rank), self._states.get(rank)
            if state is None:
                continue
            if before is None or state.beat != before.beat:
                self._beaten_s[rank] = now_s
            if before is None or state.moves != before.moves:
                self._moved_s = now_s
            self._states[rank] = state

    def _error(self, hang: Hang, silent: set[int]) -> RankLostError:
        named = hang.causes[:MOST_NAMED]
        more = f" and {len(hang.causes) - MOST_NAMED} more" if len(hang.causes) > MOST_NAMED else ""
        if hang.circle:
            what = (
                f"The job hangs: ranks {', '.join(map(str, hang.causes[:16]))} wait for each other"
            )
        else:
            what = "The job hangs: the others wait for " + ", ".join(map(self._named, named)) + more
        lines = [f"rank {rank} {self._condition(rank, silent)}" for rank in named]
        waiting = [rank for rank in self._ranks if rank not in named and hang.waits[rank]]
        lines += [f"rank {rank} {self._condition(rank, silent)}" for rank in waiting[:MOST_NAMED]]
        if len(waiting) > MOST_NAMED:
            lines.append(f"and {len(waiting) - MOST_NAMED} more ranks wait")
        lines.append(
            f"No rank made progress for {self._hang_s:g} s (train.hang_s). What each was doing is"
            f" at the end of its log: {rank_log(self._logs, named[0])}"
        )
        if records():
            dumps = flight_recorder(self._logs)
            lines.append(
                "Which collective they wait in, and who has not joined it, ranks dump as they end"
                f" (PyTorch's flight recorder): {call('explain_hang', dumps)}"
            )
        lost = RankLostError(
            what,
            "\n".join(lines),
            "Read those logs, and go on from the newest checkpoint, if there "
            f"is one: {call('train', resume=True)}",
        )
        lost.rank = hang.causes[0] if len(hang.causes) == 1 and not hang.circle else None
        return lost

    def _named(self, rank: int) -> str:
        stage = next(stage for stage in self._stages if rank in stage.ranks)
        return (
            f"rank {rank} ({stage.unit.name}, stage {stage.index}, host {self._states[rank].host})"
        )

    def _condition(self, rank: int, silent: set[int]) -> str:
        state = self._states[rank]
        doing = state.operation.replace("_", " ")
        details = (
            [f"stage {state.stage}"] * (rank in self._several and state.stage >= 0)
            + [f"slot {state.slot}"] * (state.slot >= 0)
            + [f"step {state.step}"] * (state.step >= 0)
            + [state.module] * bool(state.module)
        )
        where = f"{doing} ({', '.join(details)})" if details else doing
        if rank in silent:
            return f"{_absence(state)}, in {where}"
        return f"is in {where}"


def _absence(state: State) -> str:
    """Return a description of a rank that stopped publishing, as far as this host can see."""
    if state.host != socket.gethostname():
        return "does not answer"
    try:
        letter = Path(f"/proc/{state.process}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "does not answer"
    return f"is stopped ({signal.Signals.SIGSTOP.name})" if letter in "Tt" else "does not answer"
