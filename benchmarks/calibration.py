"""Whether verdicts are as often right as they say: hundreds of jobs of which is known what slows
them.

    python -m benchmarks.calibration --out FILE                       simulated steps and altered
    real traces python -m benchmarks.calibration --out FILE --rehearsals 40       and rehearsals (a
    minute each on two free cores) python -m benchmarks.calibration --out FILE --held-out
    what the confidence was not fitted on, too python -m benchmarks.calibration --out FILE --fit
    prints the table of `analysis/confidence.py`

Drawn are the fault, its place and its size, from nothing to half of a step; how many steps there
are, how much the times vary, and whose traces are missing. A verdict is right where it names the
fault whose mending gains most (or one that gains within a hundredth of a step as much), if that is
5 % of a step or more, and `none` where no fault does; what mending gains is simulated without the
fault. Kinds: see `known.DEVELOPED`, and `known.HELD_OUT`, which with other seeds of the former are
looked at once, after the fit. A case that is in FILE already is not analysed again.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from msgspec.structs import asdict

from benchmarks import altered, kineto_jobs, known
from benchmarks.common import Tables, table
from disttrain_cli.analysis import confidence
from disttrain_cli.analysis.analyze import analyze
from disttrain_cli.analysis.causes import LEAST_SHARE
from disttrain_cli.analysis.result.verdicts import Verdict

Row = dict[str, Any]
#: Gains that differ by less of a step count as the same.
SAME_SHARE = 0.01
#: Of the seeds that were not developed on; moved on once they were looked at.
FIRST_HELD_OUT = 2000
BINS = (0.0, 0.5, 0.7, 0.8, 0.9, 1.01)
RAW_BINS = (0.0, 0.3, 0.5, 0.7, 0.85, 0.95, 0.99, 1.01)
#: By family, seeds of every kind: developed on, and held out.
SEEDS = {"simulated": (6, 4), "operations": (8, 6), "kineto": (6, 4), "kineto_jobs": (12, 6)}
#: By family, kinds of fault that confidence was not fitted on.
NEVER = {
    "simulated": known.HELD_OUT,
    "rehearsed": known.HELD_OUT,
    "operations": altered.OPERATIONS_HELD_OUT,
    "kineto": altered.KINETO_HELD_OUT,
    "kineto_jobs": kineto_jobs.HELD_OUT,
}


def right(verdict: Verdict, truths: list[known.Truth]) -> bool:
    """Whether a verdict names what mending gains most (`unknown`: its place), or none where nothing
    gains enough."""
    together = max((one.together for one in truths), default=0.0)
    large = [one for one in truths if one.share >= LEAST_SHARE]
    most = max((one.share for one in truths), default=0.0)
    if not large and together < LEAST_SHARE:
        return verdict.cause == "none"
    place = asdict(verdict.place)
    named = [
        one
        for one in truths
        if verdict.cause in (one.cause, "unknown") and one.place.items() <= place.items()
    ]
    if not large:  # each hides the other: none of them is the one
        return bool(named)
    return any(one.share >= max(LEAST_SHARE, most - SAME_SHARE) for one in named)


def cases(
    folder: Path, held_out: bool, rehearsals: int
) -> Iterator[tuple[str, str, str, Callable[[Path], Any]]]:
    """(family, kind, name, what writes the case's traces to a path and gives its truths)."""
    for family, (developed, kept) in SEEDS.items():
        kinds = {
            "simulated": known.DEVELOPED,
            "operations": altered.OPERATIONS,
            "kineto": altered.KINETO,
            "kineto_jobs": kineto_jobs.DEVELOPED,
        }[family]
        never = NEVER[family]
        for kind in (*kinds, *(never if held_out else ())):
            seeds = [] if kind in never else list(range(developed))
            seeds += list(range(FIRST_HELD_OUT, FIRST_HELD_OUT + kept)) if held_out else []
            for seed in seeds:
                yield (
                    family,
                    kind,
                    f"{family} {kind} {seed}",
                    partial(_write, folder, family, kind, seed),
                )
    for number in range(rehearsals):
        kinds = (*known.DEVELOPED[:6], "small", "unit")
        kind, seed = (
            kinds[number % len(kinds)],
            number if number < rehearsals // 2 else FIRST_HELD_OUT + number,
        )
        if held_out or (seed < FIRST_HELD_OUT and kind in known.DEVELOPED):
            yield (
                "rehearsed",
                kind,
                f"rehearsed {kind} {seed}",
                partial(_write, folder, "rehearsed", kind, seed),
            )


def _write(folder: Path, family: str, kind: str, seed: int, traces: Path) -> list[known.Truth]:
    if family == "operations":
        return altered.operations(kind, seed, traces)
    if family == "kineto":
        return altered.kineto(kind, seed, traces)
    if family == "kineto_jobs":
        return kineto_jobs.kineto_job(kind, seed, traces)
    jobs = list(known.JOBS)[:2] if family == "rehearsed" else list(known.JOBS)
    job = random.Random(seed).choice(jobs)
    profile, layout = known.prepared(folder, job)
    drawn = known.draw(kind, seed, layout, job)
    return (
        known.rehearse(drawn, folder, traces)
        if family == "rehearsed"
        else known.simulate(drawn, profile, layout, traces)
    )


def measure(out: Path, held_out: bool = False, rehearsals: int = 0, only: str = "") -> list[Row]:
    """A row per case; those in `out` are kept."""
    rows = [json.loads(line) for line in out.read_text().splitlines()] if out.is_file() else []
    done = {row["case"] for row in rows}
    plain = dict.fromkeys(confidence.CALIBRATION, ((0.0, 0.0), (1.0, 1.0)))
    with (
        tempfile.TemporaryDirectory() as name,
        mock.patch.dict(os.environ, XDG_CACHE_HOME=name),
        mock.patch.dict(confidence.CALIBRATION, plain),
    ):
        for family, kind, case, write in cases(out.parent / "jobs", held_out, rehearsals):
            if case in done or only not in case:
                continue
            traces = Path(name) / case.replace(" ", "-")
            truths = write(traces)
            if truths is None:
                continue
            found = analyze([traces])
            said = {
                key: value
                for key, value in asdict(found.verdict.place).items()
                if value is not None
            }
            row = {
                "case": case,
                "family": family,
                "kind": kind,
                "format": found.format,
                "right": right(found.verdict, truths),
                "said": found.verdict.cause,
                "place": said,
                "raw": found.verdict.confidence,
                "gain": found.verdict.lost_s / (found.job.iteration_s or 1.0),
                "truth": [_plain(one) for one in truths],
            }
            with out.open("a") as file:
                file.write(json.dumps(row) + "\n")
            rows.append(row)
    return rows


def _plain(truth: known.Truth) -> Row:
    """A truth as JSON."""
    return {
        "cause": truth.cause,
        "place": truth.place,
        "share": round(truth.share, 4),
        "together": round(truth.together, 4),
    }


def is_held_out(row: Row) -> bool:
    """Whether a row was kept from the fit."""
    return int(row["case"].split()[-1]) >= FIRST_HELD_OUT or row["kind"] in NEVER[row["family"]]


def is_claim(row: Row) -> bool:
    """True unless the verdict is `unknown` without any confidence, which claims nothing."""
    return bool(row["said"] != "unknown" or row["raw"])


def fit(rows: list[Row]) -> dict[str, list[tuple[float, float]]]:
    """By format, mean raw evidence and share that was right, of bins; one more right and one more
    wrong each.

    Bins in which less are right than in the one below are joined with it, so that more evidence is
    never less sure.
    """
    found = {}
    for kind in sorted({row["format"] for row in rows}):
        own = [
            row for row in rows if row["format"] == kind and not is_held_out(row) and is_claim(row)
        ]
        joined = list[list[Row]]()
        for least, most in itertools.pairwise(RAW_BINS):
            members = [row for row in own if least <= row["raw"] < most]
            if not members:
                continue
            joined.append(members)
            while len(joined) > 1 and _share(joined[-1]) <= _share(joined[-2]):
                joined[-2:] = [joined[-2] + joined[-1]]
        found[kind] = [
            (0.0, 0.0),
            *(
                (
                    round(float(np.mean([row["raw"] for row in members])), 3),
                    round(_share(members), 3),
                )
                for members in joined
            ),
        ]
    return found


def _share(rows: list[Row]) -> float:
    return (sum(row["right"] for row in rows) + 1) / (len(rows) + 2)


def reliability(rows: list[Row]) -> list[Row]:
    """By what was said, how often it was right."""
    for row in rows:
        row["sure"] = confidence.calibrated(row["raw"], row["format"])
    found = []
    for least, most in itertools.pairwise(BINS):
        own = [row for row in rows if least <= row["sure"] < most and is_claim(row)]
        if own:
            found.append(
                {
                    "said": f"{100 * least:.0f} to {100 * min(1, most):.0f} %",
                    "mean said %": 100 * float(np.mean([row["sure"] for row in own])),
                    "right %": 100 * float(np.mean([row["right"] for row in own])),
                    "n": len(own),
                }
            )
    return found


def tables(rows: list[Row]) -> Tables:
    """Reliability, and what was right by family and kind."""
    found: Tables = {}
    for title, own in (
        ("Developed on", [row for row in rows if not is_held_out(row)]),
        ("Held out", [row for row in rows if is_held_out(row)]),
    ):
        if own:
            found[title] = reliability(own)
            kinds = sorted({(row["family"], row["kind"]) for row in own})
            found[f"{title}, by kind"] = [
                {
                    "family": family,
                    "kind": kind,
                    "right": sum(row["right"] for row in those),
                    "unknown": sum(not is_claim(row) for row in those),
                    "n": len(those),
                    "mean said": float(np.mean([row["sure"] for row in those])),
                }
                for family, kind in kinds
                for those in [
                    [row for row in own if (row["family"], row["kind"]) == (family, kind)]
                ]
            ]
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--out", type=Path, required=True, metavar="FILE", help="rows, one a line; kept and gone on"
    )
    parser.add_argument("--held-out", action="store_true", help="also what was not developed on")
    parser.add_argument(
        "--rehearsals", type=int, default=0, metavar="N", help="rehearse so many jobs too"
    )
    parser.add_argument("--only", default="", metavar="TEXT", help="cases with TEXT in their names")
    parser.add_argument(
        "--fit", action="store_true", help="print the table for analysis/confidence.py"
    )
    options = parser.parse_args()
    options.out.parent.mkdir(parents=True, exist_ok=True)
    measured = measure(options.out, options.held_out, options.rehearsals, options.only)
    print("\n\n".join(table(title, rows) for title, rows in tables(measured).items()))
    if options.fit:
        print(json.dumps(fit(measured)))
