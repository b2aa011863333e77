"""Critical path of a step: backwards from its last kernel, always to what had to end before.

A kernel began when its device was free (then the kernel that ended last precedes it) or, if it was
launched later than that, when its host launched it. A host's path goes back to the call or polling
loop in which it last waited for its device, and to the kernel that it waited for, else to the start
of the step. A collective that waited continues at the rank that joined it last, so the path changes
ranks. Dependencies that traces do not record (events between streams, locks between threads of a
host) are not followed: on one device any kernel may have waited for the one that ended last.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from disttrain_cli.analysis.kineto.database import KinetoDatabase
from disttrain_cli.analysis.result.devices import CriticalPath, PathPart
from disttrain_cli.analysis.walk import Ints

#: Most kernels of a step for which a path is computed, and most parts that are shown.
MOST_KERNELS, MOST_PARTS = 1_000_000, 30
#: Overlaps up to this are due to rounding, or to different clocks of engines.
ROUNDED_NS = 2000
#: Parts of a path that are no kernels.
HOST, LAUNCH = "host", "launch"


def critical_path(database: KinetoDatabase) -> CriticalPath | None:
    """Return the critical path of the measured step of median length.

    It is None if no kernel ran on a device, or too many.
    """
    if not database.sql("SELECT count(*) AS n FROM categories WHERE class = 1")[0]["n"]:
        return None
    steps = [
        row["step"]
        for row in database.sql(
            "SELECT step FROM step_lengths WHERE measured GROUP BY step ORDER BY max(length_s),"
            " step"
        )
    ]
    step = steps[len(steps) // 2] if steps else None
    count = database.sql(
        "SELECT count(*) AS n FROM raw_kernels WHERE measured AND end_ns > start_ns "
        "AND ($step IS NULL OR step = $step)",
        {"step": step},
    )[0]["n"]
    if not 0 < count <= MOST_KERNELS:
        return None
    begun = {
        row["rank"]: row["start_ns"]
        for row in database.sql(
            "SELECT rank, min(start_ns) AS start_ns FROM steps WHERE step = $step GROUP BY rank",
            {"step": step},
        )
    }
    path = find_path(
        database.columns("path_kernels", step=step), database.columns("path_waits"), begun
    )
    names = dict(database.connection.execute("SELECT id, name FROM names").fetchall())
    return _critical_path(step, path, names)


@dataclass
class Path:
    """Sums of a path by (kind, rank, number of the name, -1: none): ns and number of stretches."""

    parts: dict[tuple[str, int, int], list[int]] = field(
        default_factory=lambda: defaultdict(lambda: [0, 0])
    )

    def add(self, kind: str, rank: int, name: int, ns: int) -> None:
        if ns > 0:
            part = self.parts[kind, rank, name]
            part[0] += ns
            part[1] += 1


def find_path(kernels: dict[str, Any], waits: dict[str, Any], begun: dict[int, int]) -> Path:
    """Walk back from the kernel that ends last.

    Args:
        kernels: columns of `path_kernels.sql`, by rank and end.
        waits: columns of `path_waits.sql`, by rank and end.
        begun: start of the step on each rank, if it is marked.
    """
    rank, start, end = kernels["rank"], kernels["start_ns"], kernels["end_ns"]
    launched = np.ma.filled(np.ma.asarray(kernels["launched_ns"]).astype(np.int64), -1)
    latest = np.ma.filled(np.ma.asarray(kernels["latest_ns"]).astype(np.int64), -1)
    last = np.ma.filled(np.ma.asarray(kernels["last_place"]).astype(np.int64), -1)
    at_place = {int(index): number for number, index in enumerate(kernels["place"])}
    of_rank = {int(one): np.flatnonzero(rank == one) for one in np.unique(rank)}
    calls = {
        one: (waits["start_ns"][waits["rank"] == one], waits["end_ns"][waits["rank"] == one])
        for one in of_rank
    }

    def ended(of: int, by_ns: int, before: int) -> int:
        """Return the kernel of a rank that ended last, by `by_ns` or slightly later; -1: none.

        It began before `before`.
        """
        nodes = of_rank[of]
        at = int(np.searchsorted(end[nodes], by_ns + ROUNDED_NS, side="right")) - 1
        while at >= 0 and start[nodes[at]] >= before:
            at -= 1
        return int(nodes[at]) if at >= 0 else -1

    path, number, until = Path(), int(np.argmax(end)), int(end.max())
    for _ in range(2 * len(start) + 2):
        here, began = int(rank[number]), int(start[number])
        joined = at_place.get(int(last[number])) if last[number] >= 0 else None
        if joined is not None:  # it waited for another rank, which let it end
            moved = max(began, int(latest[number]))
            path.add(
                str(kernels["kind"][number]), here, int(kernels["name"][number]), until - moved
            )
            number, until = joined, int(start[joined])
            last[joined] = -1
            continue
        path.add(str(kernels["kind"][number]), here, int(kernels["name"][number]), until - began)
        before, asked = ended(here, began, began), int(launched[number])
        if before >= 0 and end[before] >= asked:
            number, until = before, min(began, int(end[before]))
            path.add(LAUNCH, here, -1, began - until)
            continue
        if asked < 0:
            break
        path.add(LAUNCH, here, -1, began - asked)
        waited = _waited(calls[here], asked, lambda by_ns, of=here: ended(of, by_ns, by_ns), end)
        if waited is None:
            first = begun.get(
                here, int(launched[of_rank[here]][launched[of_rank[here]] >= 0].min())
            )
            path.add(HOST, here, -1, asked - first)
            break
        number, until = waited, min(asked, int(end[waited]))
        path.add(HOST, here, -1, asked - until)
    return path


def _waited(calls: tuple[Ints, Ints], by_ns: int, ended: Any, end: NDArray[Any]) -> int | None:
    """Return the kernel that the host waited for in its last call that ended by `by_ns`.

    It is None if there is none.
    """
    starts, ends = calls
    for at in range(int(np.searchsorted(ends, by_ns, side="right")) - 1, -1, -1):
        kernel = ended(int(ends[at]))
        if kernel >= 0 and end[kernel] >= starts[at]:
            return int(kernel)
    return None


def _critical_path(step: int | None, path: Path, names: dict[int, str]) -> CriticalPath | None:
    total = sum(ns for ns, _ in path.parts.values())
    if not total:
        return None
    shares, ranks = defaultdict[str, float](float), defaultdict[int, float](float)
    for (kind, rank, _), (ns, _) in path.parts.items():
        shares[kind] += ns / total
        ranks[rank] += ns / total
    most = sorted(path.parts.items(), key=lambda part: (-part[1][0], part[0]))[:MOST_PARTS]
    return CriticalPath(
        step=step,
        length_us=total / 1e3,
        shares=dict(sorted(shares.items(), key=lambda item: -item[1])),
        ranks={str(rank): share for rank, share in sorted(ranks.items())},
        parts=[
            PathPart(
                kind=kind,
                rank=rank,
                name=names.get(name, kind),
                count=count,
                us=ns / 1e3,
                share=ns / total,
            )
            for (kind, rank, name), (ns, count) in most
        ],
    )
