"""How soon `watch` names a fault that begins while a job runs, and whether it stays calm else.

    python -m benchmarks.watching                       simulated jobs, seeds that were developed on
    python -m benchmarks.watching --rehearse --out DIR  rehearsed ones (a minute and a half each; a
                                                        quiet machine)
    python -m benchmarks.watching --held-out            other seeds, and two kinds of fault that
                                                        were not developed on: to be scored once

A job runs without a fault, then with one that costs 8 % of a step or more, simulated or rehearsed.
Its traces are written again step by step, as ranks write them, and after every step `watch` looks.
A case is right where the first verdict that it tells from when the fault begins names cause and
place, within five steps. A clean job is right where it
tells nothing but `none`. Where a host was too busy to rehearse, that is said and is no verdict.
`--out` keeps what was rehearsed, and the row of every case: what is there is not done again.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import calibration, known, verdicts
from benchmarks.common import Tables, table
from benchmarks.rehearsal import edit
from benchmarks.strategies import disttrain
from disttrain_cli.analysis.watching.looking import Look, Watcher
from disttrain_cli.spec.plan import Layout, read_plan
from disttrain_cli.spec.profile import Profile, read_profile
from tests.analysis.growing import Growing

Row = dict[str, Any]
#: Kinds of faults that were developed on, and those that were not; by how many cases of each.
DEVELOPED, HELD_OUT = ("rank", "stage", "link", "data", "two ranks"), ("unit", "host")
#: Steps before the fault begins, steps with it, and after how many it must be named.
BEFORE, WITH, SOON = 8, 6, 5
LEAST_SHARE = 0.08  # of a step, what a fault costs
WORKERS = 1  # that prepare a replica's data: what is drawn must be able to cost that much
LAYOUT = "two"  # of `verdicts`: two replicas of everything, an LLM of three stages, even data


def cases(held_out: bool, each: int, clean: int) -> list[tuple[str, int]]:
    """(kind, seed) of every case."""
    first = calibration.FIRST_HELD_OUT if held_out else 0
    kinds = (*DEVELOPED, *HELD_OUT) if held_out else DEVELOPED
    return [(kind, first + seed) for seed in range(each) for kind in kinds] + [
        ("clean", first + seed) for seed in range(clean)
    ]


class Prepared(NamedTuple):
    """A profiled run with even data, and a plan for it."""

    folder: Path
    plan: Path
    profile: Profile
    layout: Layout
    time_scale: float


def prepared(folder: Path) -> Prepared:
    """The run in a folder, made where it is not there."""
    run = folder / "run"
    if not (run / "runs").is_dir():
        run.mkdir(parents=True)
        verdicts.prepare(run)
        edit(run, preprocess={"workers": WORKERS})
    path = verdicts.plan_of(run, LAYOUT)
    plan = read_plan(path)
    profile = read_profile(run / "runs" / "mllm-9b" / "profile.json")
    return Prepared(run, path, profile, plan.plan, verdicts.STEP_S / plan.predicted.iteration_s)


def drawn(job: Prepared, kind: str, seed: int) -> tuple[known.Drawn, list[known.Truth]]:
    """A job with a fault that is large enough, and what it costs, simulated."""
    random_ = random.Random(f"{kind} {seed}")
    while True:
        one = known.draw(kind, random_.randrange(10**6), job.layout, LAYOUT)
        one = replace(one, workers=WORKERS)
        if kind == "clean":
            return one, []
        once = any(held.step is not None for held in one.held_up)
        with tempfile.TemporaryDirectory() as name:
            truths = known.simulate(one, job.profile, job.layout, Path(name) / "traces")
        if not once and max(truth.share for truth in truths) >= LEAST_SHARE:
            return one, truths


def recorded(job: Prepared, one: known.Drawn, rehearse: bool, out: Path) -> Path:
    """Traces of a job whose faults begin after some steps."""
    if out.is_dir():
        return out
    faults = [fault.model_copy(update={"from_step": BEFORE}) for fault in one.faults]
    held_up = [held._replace(from_step=BEFORE) for held in one.held_up]
    if not rehearse:
        workers = WORKERS if any(fault.slow == "worker" for fault in faults) else 0
        known.simulated.write(
            out,
            job.profile,
            job.layout,
            BEFORE + WITH,
            faults=faults,
            held_up=held_up,
            noise=one.noise,
            seed=one.seed,
            workers=workers,
        )
        return out
    put = [fault.model_dump(exclude_none=True) for fault in faults]
    put += [_held_up(job, one)] if one.held_up else []
    edit(
        job.folder,
        train={"seed": one.seed},
        rehearse={"faults": put, "noise": one.noise, "time_scale": job.time_scale},
    )
    disttrain(
        job.folder, "train", "--rehearse", "--restart", "--plan", job.plan, "--steps", BEFORE + WITH
    )
    shutil.copytree(job.folder / "runs" / "mllm-9b" / "rehearsal" / "traces", out)
    return out


def _held_up(job: Prepared, one: known.Drawn) -> Row:
    """The fault of a rehearsal nearest to a simulated one that holds up a host."""
    ((_, place),) = one.causes
    unit = next(unit for unit in job.layout.units if unit.name == place["unit"])
    time = job.profile.modules[unit.modules[0]].tp[str(unit.tp)]
    pass_s = (time.forward_ms + time.backward_ms) / 2e3 / unit.pp
    factor = 1.0 + one.held_up[0].seconds / pass_s
    return {"slow": "host", "factor": factor, "from_step": BEFORE, **place}


def looks(traces: Path, target: Path) -> Iterator[tuple[int, Look]]:
    """Looks after every step, with the number of steps since the fault began."""
    growing, watcher = Growing(traces, target / "traces"), Watcher(target)
    for step in range(BEFORE + WITH):
        growing.write(step)
        if (look := watcher.look()) is not None:
            yield max(0, step + 1 - BEFORE), look


def judged(kind: str, truths: list[known.Truth], seen: list[tuple[int, Look]]) -> Row:
    """What was told, and whether that is right."""
    told = [
        (step, look.analysis.verdict)
        for step, look in seen
        if look.changed and look.analysis.verdict.cause != "unknown"
    ]
    false = [verdict.cause for step, verdict in told if not step and verdict.cause != "none"]
    after = [(step, verdict) for step, verdict in told if step]
    first = next(iter(after), None)
    if kind == "clean":
        false += [verdict.cause for _, verdict in after if verdict.cause != "none"]
    right = not false if kind == "clean" else False
    if kind != "clean" and first is not None:
        right = first[0] <= SOON and calibration.right(first[1], truths)
    return {
        "right": right,
        "false alarms": " ".join(false) or "-",
        "after steps": first[0] if first and kind != "clean" else None,
        "told": " ".join(f"{step}:{verdict.cause}" for step, verdict in after) or "-",
        "truth": " ".join(f"{one.cause} {100 * one.share:.0f} %" for one in truths) or "none",
        "sure": round(first[1].confidence, 2) if first else None,
    }


def measure(
    out: Path | None = None,
    rehearse: bool = False,
    held_out: bool = False,
    each: int = 4,
    clean: int = 5,
    only: str = "",
) -> Tables:
    """A row per case with `only` in its name."""
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) if out is None else out
        folder.mkdir(parents=True, exist_ok=True)
        kept = folder / f"{'rehearsed' if rehearse else 'simulated'}.jsonl"
        done = {row["case"]: row for row in map(json.loads, kept.open())} if kept.exists() else {}
        for kind, seed in cases(held_out, each, clean):
            case = f"{kind} {seed}"
            if only not in case:
                continue
            if case not in done:
                done[case] = {"case": case} | _case(folder, kind, seed, rehearse)
                with kept.open("a") as file:
                    file.write(json.dumps(done[case]) + "\n")
                print(json.dumps(done[case]), flush=True)
            rows.append(done[case])
    faults = [row for row in rows if not row["case"].startswith("clean")]
    named = sum(row["right"] for row in faults)
    alarms = sum(row["false alarms"] != "-" for row in rows)
    title = f"Watched: {named} of {len(faults)} faults named within {SOON} steps; false alarms in"
    return {f"{title} {alarms} of {len(rows)} jobs": rows}


def _case(folder: Path, kind: str, seed: int, rehearse: bool) -> Row:
    job = prepared(folder)
    one, truths = drawn(job, kind, seed)
    family = "rehearsed" if rehearse else "simulated"
    with tempfile.TemporaryDirectory() as name:
        traces = folder / "kept" if rehearse else Path(name)
        stem = f"{kind}-{seed}".replace(" ", "-")
        recording = recorded(job, one, rehearse, traces / f"{family}-{stem}")
        began_s = time.process_time()
        seen = list(looks(recording, Path(name) / "watched"))
        look_s = (time.process_time() - began_s) / len(seen)
    return judged(kind, truths, seen) | {"CPU s per step and look": round(look_s, 2)}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="keep rows and rehearsals here")
    parser.add_argument("--rehearse", action="store_true", help="rehearse instead of simulating")
    parser.add_argument("--held-out", action="store_true", help="score what was not developed on")
    parser.add_argument("--each", type=int, default=4, metavar="N", help="cases of each kind")
    parser.add_argument("--clean", type=int, default=5, metavar="N", help="jobs without a fault")
    parser.add_argument("--only", default="", metavar="TEXT", help="cases with TEXT in their names")
    options = parser.parse_args()
    tables = measure(
        options.out,
        options.rehearse,
        options.held_out,
        options.each,
        options.clean,
        options.only,
    )
    print("\n\n".join(table(title, rows) for title, rows in tables.items()))
