"""Repeated analyses of a running job: verdicts on its last steps, reported when they change.

A look is an analysis of the last steps, by the same code as `analyze`. One step more or less can
change an uncertain verdict, so a verdict stands once its confidence is high enough, or if two looks
in succession have it. A cause with a saving near the threshold of a fault would come and go: it is
reported once it saves clearly more, and is over once it saves clearly less.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from msgspec import to_builtins
from msgspec.structs import asdict

from disttrain_cli.analysis.causes import LEAST_SHARE
from disttrain_cli.analysis.job.analysis import analyze_database
from disttrain_cli.analysis.job.database import open_database
from disttrain_cli.analysis.job.hosts import blamed, host_of
from disttrain_cli.analysis.result.summary import Analysis
from disttrain_cli.analysis.result.verdicts import Place
from disttrain_cli.analysis.verdict import OF_HOSTS
from disttrain_cli.analysis.watching.ending import Ending
from disttrain_cli.analysis.watching.remembering import KnownLayouts
from disttrain_cli.analysis.watching.tail import Tail
from disttrain_cli.errors import DataError
from disttrain_cli.spec.rundir import RunDir
from disttrain_cli.spec.trace import Job

#: Steps of a look, and warm-up steps before them that an analysis leaves out.
STEPS, WARM_UP = 5, 2
#: A verdict with this confidence stands at once.
SURE = 0.9
#: Looks in succession at which a verdict must stand with one cause at one host (or rank, if there
#: is one host) to be persistent; the last of them judges none of the steps of the first.
STAYS = 3
#: Share of a step by which a fault must exceed `LEAST_SHARE`, or fall below it to be over.
MARGIN = 0.01
#: CPU time of looks as a share of all cores of this host, if no interval is requested.
SHARE = 0.005
POLL_S, QUIET_S = 1.0, 5.0
#: Seconds to wait for the next start of a run that is over already.
NEXT_START_S = 120.0
#: Most early looks in succession, number of steps, and their relative change: a look is early if
#: the last `LATEST` steps take that much more or less time than those of the last look, or if its
#: verdict does not stand.
EARLY, LATEST, MOVED = 2, 3, 0.03

#: Content of a verdict, without its figures.
Said = tuple[str, tuple[tuple[str, Any], ...], tuple[str, ...], str, tuple[int, ...]]


@dataclass(frozen=True)
class Look:
    """Analysis of the last steps of a job."""

    analysis: Analysis
    first: int  # step
    last: int
    at: datetime
    stands: bool  # confidence is high enough, or the look before had the same verdict
    changed: bool  # it stands and differs from the one that stood before
    stays: bool = False  # it has now stood for long enough (`STAYS`)
    blamed: tuple[int, ...] = ()  # ranks whose devices or hosts are slow
    live: bool = False  # a step was recorded since the watcher began: not those of an earlier start

    @property
    def found(self) -> bool:
        """True if there is a fault."""
        return self.analysis.verdict.cause not in ("none", "unknown")

    def row(self) -> dict[str, Any]:
        """Return the look as a row of figures and texts."""
        analysis, verdict = self.analysis, self.analysis.verdict
        step_s = analysis.job.iteration_s or 0.0
        return {
            "at": self.at.isoformat(timespec="seconds"),
            "first_step": self.first,
            "last_step": self.last,
            "steps_measured": analysis.job.steps_measured,
            "iteration_s": step_s,
            "sequences_per_s": analysis.job.sequences_per_s,
            "cause": verdict.cause,
            "place": {
                name: value for name, value in asdict(verdict.place).items() if value is not None
            },
            "headline": verdict.headline,
            "lost_s": verdict.lost_s,
            "lost_fraction": verdict.lost_s / step_s if step_s else 0.0,
            "confidence": verdict.confidence,
            "stays": self.stays,
            "blamed_ranks": list(self.blamed),
            "advice": verdict.advice,
            "next_command": verdict.next_command,
            "remedies": [asdict(one) for one in analysis.remedies if one.worth][:3],
            "collapsed_routers": [one.layer for one in analysis.experts if one.collapsed],
            "drift": [asdict(one) | {"sentence": one.sentence} for one in analysis.drift],
            "learning": to_builtins(analysis.learning) | {"headline": analysis.learning.headline}
            if analysis.learning
            else None,
            "warnings": analysis.warnings,
        }


@dataclass(frozen=True)
class Staying:
    """Duration for which a verdict has stood."""

    where: object = None  # cause and place
    looks: int = 0
    last: int = -1  # step of the first of these looks
    long_enough: bool = False

    def on(self, first: int, last: int) -> Staying:
        """Return the state after one more look.

        Args:
            first: first step of the look, which is warm-up.
            last: last step of the look.
        """
        looks = self.looks + 1
        since = self.last if self.looks else last
        return Staying(self.where, looks, since, looks >= STAYS and first >= since)


class Watcher:
    """Analyses of the last steps of a run's traces, compared with earlier verdicts.

    Args:
        root: the run's folder.
        steps: number of steps that are judged.
    """

    def __init__(self, root: Path, steps: int = STEPS) -> None:
        self._root = root
        self._tail = Tail(root / "traces", steps + WARM_UP)
        self._layouts = KnownLayouts()
        self._step_s: float | None = None  # step time of the last look
        self._before: Said | None = None
        self._stood: Said | None = None
        self._staying = Staying()
        self._joined: tuple[object, int] | None = None  # last step at the first look

    def moved(self) -> bool:
        """Return True if the last steps' time differs from that of the last look.

        This needs no analysis.
        """
        now_s, before_s = self._tail.latest_s(LATEST), self._step_s
        return now_s is not None and before_s is not None and abs(now_s / before_s - 1) > MOVED

    def look(self) -> Look | None:
        """Analyse the job now; None if there is no new complete step since the last look.

        Raises:
            SpecError: job.json of the traces cannot be read.
            DataError: the traces cannot be read.
        """
        reached = self._tail.reached()
        self._joined = self._joined or reached
        if not self._tail.grow():
            return None
        files = self._tail.files()
        if not files.rows or self._tail.last == self._tail.first:  # only warm-up
            return None
        database = open_database([self._root], held=files)
        try:
            if not database.query("iterations")[0]["measured"]:
                return None
            analysis, job = analyze_database(database, self._layouts), database.job
        finally:
            database.close()
        self._step_s = analysis.job.iteration_s
        said = _said(analysis)
        stands = (said == self._before or analysis.verdict.confidence >= SURE) and _clear(
            analysis, self._stood and self._stood[0]
        )
        changed = stands and said != self._stood
        if not stands:  # so that the next look computes it again
            self._layouts.forget()
        self._before, self._stood = said, said if stands else self._stood
        found = analysis.verdict.cause not in ("none", "unknown")
        ranks, where = _blamed(analysis, job)
        staying = self._staying if where == self._staying.where else Staying(where)
        self._staying = (
            staying.on(self._tail.first, self._tail.last) if stands and found else Staying()
        )
        return Look(
            analysis,
            self._tail.first,
            self._tail.last,
            datetime.now(UTC),
            stands,
            changed,
            stays=self._staying.long_enough and not staying.long_enough,
            blamed=tuple(ranks),
            live=reached != self._joined,
        )


def _clear(analysis: Analysis, stood: str | None) -> bool:
    """Return True if a verdict is clearly a fault or clearly none.

    Args:
        analysis: analysis of the last steps.
        stood: cause that stood before, if any.
    """
    verdict, step_s = analysis.verdict, analysis.job.iteration_s or 0.0
    if verdict.cause == "none":
        left_s = max((one.gain_s for one in analysis.causes if one.cause == stood), default=0.0)
        return left_s < (LEAST_SHARE - MARGIN) * step_s
    return (
        verdict.lost_s == 0.0  # unknown cause
        or verdict.cause == stood
        or verdict.lost_s >= (LEAST_SHARE + MARGIN) * step_s
    )


def _blamed(analysis: Analysis, job: Job | None) -> tuple[list[int], tuple[object, ...]]:
    """Return the ranks that a verdict blames, and the key that must not change for it to persist.

    The key is the cause, and the location or, if there are several hosts, the host of these ranks.
    """
    cause, place = analysis.verdict.cause, analysis.verdict.place
    where = {
        one.rank: Place(
            unit=one.unit, stage=one.stage, rank=one.rank, host=host_of(job, one.rank, one.host)
        )
        for one in analysis.ranks
    }
    ranks = blamed(job, cause, [place], where)
    hosts = {where[rank].host for rank in ranks if rank in where}
    if len(hosts) == 1 and len({one.host for one in where.values()}) > 1:
        return ranks, (cause in OF_HOSTS, *hosts)
    return ranks, (cause, place)


def _said(analysis: Analysis) -> Said:
    """Return the identity of a verdict.

    It is its location, drifting data, the fault in learning, and the layers of collapsed routers.
    """
    place = asdict(analysis.verdict.place)
    return (
        analysis.verdict.cause,
        tuple((name, value) for name, value in place.items() if value is not None),
        tuple(sorted(one.what for one in analysis.drift)),
        analysis.learning.verdict if analysis.learning and analysis.learning.bad else "",
        tuple(one.layer for one in analysis.experts if one.collapsed),
    )


def looks(root: Path, steps: int = STEPS, every_s: float | None = None) -> Iterator[Look]:
    """Yield looks at a run until it is over, after new steps, at limited cost.

    Args:
        root: the run's folder.
        steps: number of steps that are judged.
        every_s: minimum seconds between two looks; None: as many as keep them at `SHARE` of this
            host's cores, some of them early and compensated later (`EARLY`).

    Raises:
        As `Watcher.look`.
    """
    watcher, ending = Watcher(root, steps), Ending(RunDir(root))
    next_s = grown_s = time.monotonic()
    early, unsure = 0, False  # number of early looks; last verdict does not stand
    live = False
    ending.over()  # detects if training holds its lock now
    while True:
        # checked first, so that steps before the end are read
        quiet_s = time.monotonic() - grown_s
        over = quiet_s >= QUIET_S and ending.over()
        over &= live or ending.begun or quiet_s >= NEXT_START_S
        due = over or time.monotonic() >= next_s
        hurry = every_s is None and early < EARLY and (unsure or watcher.moved())
        if due or hurry:
            began_s = time.process_time()
            look = watcher.look()
            if look is not None:
                grown_s = time.monotonic()
                taken_s = time.process_time() - began_s
                early, unsure = 0 if due else early + 1, not look.stands
                live |= look.live
                next_s = max(grown_s, next_s) + (
                    taken_s / (SHARE * (os.cpu_count() or 1)) if every_s is None else every_s
                )
                yield look
        if over:
            return
        time.sleep(POLL_S)


def look_once(root: Path, steps: int = STEPS) -> Look:
    """Analyse a run once, running or not.

    Raises:
        DataError: no complete step of all ranks was recorded yet. Others as `Watcher.look`.
    """
    look = Watcher(root, steps).look()
    if look is None:
        raise DataError(
            f"There is no complete step to analyse in {root / 'traces'} yet",
            "the first step of a start is warm-up, and a step is complete once all ranks have"
            " recorded it",
            "Try again after two steps.",
        )
    return look
