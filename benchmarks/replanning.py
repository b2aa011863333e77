"""Re-planning rehearsed: a node that stays slow, and one that is lost, with `train.on_straggler:
replan`.

    python -m benchmarks.replanning [--small] [--steps N] [--json]

MLLM-9B on four nodes of eight A800. One node computes half as fast from the beginning, or dies with
all its devices after some steps. Samples are what the view `samples` has of all steps, beside the
stream of the data, which knows of no plan; steps that were lost with the node are run again.
Rehearsed is the mean of the steps on the new plan but the first (of a start, warm-up), simulated
what the simulator says of these very steps, and predicted what that plan says. So the error has two
parts: the data of so few steps, which are not those of the mean (simulated over predicted), and the
emulation (rehearsed over simulated). `--small`: fewer steps. Quiet machine.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.common import Tables, main
from benchmarks.rehearsal import RUN_FILE, edit
from benchmarks.strategies import disttrain
from disttrain_cli.analysis.analyze import ask
from disttrain_cli.data.epochs.mixture import mixture_of
from disttrain_cli.data.index.sample_index import Index
from disttrain_cli.data.packing import SequenceStream
from disttrain_cli.runtime.rehearsal.feeding import rehearsed_index
from disttrain_cli.spec.profile import read_profile
from disttrain_cli.spec.rundir import RunDir
from disttrain_cli.spec.runfile import Run, read_run

Row = dict[str, Any]
NODES, BATCH = 4, 48
CASES: dict[str, Row] = {
    "node 1 half as fast": {"faults": [{"slow": "node", "node": 1, "factor": 2.0}], "lost": []},
    "node 2 lost in step 5": {"faults": [], "lost": [{"node": 2, "step": 5}]},
}
STEPS, SMALL_STEPS = 18, 14


def prepare(folder: Path) -> Run:
    """A planned run in `folder`."""
    disttrain(folder, "init", ".", "--preset", "mllm-9b")
    edit(
        folder,
        cluster={"nodes": NODES},
        train={
            "global_batch_size": BATCH,
            "checkpoint": {"every_steps": 2},
            "restarts": 3,
            "on_straggler": "replan",
        },
    )
    disttrain(folder, "profile")
    disttrain(folder, "plan", "--strategy", "disaggregated", "--top", 0)
    return read_run(folder / RUN_FILE)


def samples(run: Run, index: Index, folder: RunDir, steps: int) -> Row:
    """How many samples the steps trained by the traces in `folder`, and how many of them are lost
    or doubled beside the stream of an index."""
    profile = read_profile(run.dir.profile)
    each = run.file.train.global_batch_size
    stream = SequenceStream(mixture_of(index, run.file.train.seed, profile.data, each))
    batch = stream.batch(0, steps * each)
    expected = Counter(
        (sequence, sample)
        for place, sequence in enumerate(batch.ids.tolist())
        for sample in batch.samples[
            batch.sample_start[place] : batch.sample_start[place + 1]
        ].tolist()
    )
    asked = ask([folder.root], "SELECT sequence, sample FROM samples")
    seen = Counter((int(sequence), int(sample)) for sequence, sample in asked.rows)
    return {
        "samples": expected.total(),
        "lost": (expected - seen).total(),
        "doubled": (seen - expected).total(),
    }


def rehearsed(folder: Path, run: Run, case: str, steps: int) -> Row:
    """A case's row."""
    edit(folder, rehearse=CASES[case])
    result = disttrain(folder, "train", "--rehearse", "--steps", steps)
    replan = result["replans"][-1]
    index = rehearsed_index(run, read_profile(run.dir.profile).inputs)
    then_s, simulated_s = (
        mean(row["iteration_s"] for row in result[rows] if row["step"] > replan["step"])
        for rows in ("steps", "simulated")
    )
    predicted_s = replan["predicted_iteration_s"]
    before = [row["iteration_s"] for row in result["steps"] if 0 < row["step"] < replan["step"]]
    return {
        "case": case,
        "starts": 1 + len(result["restarts"]),
        "new plan from step": replan["step"],
        "devices": replan["gpus"],
        **samples(run, index, run.dir.rehearsal, steps),
        "before s": round(mean(before), 3),
        "predicted s": round(predicted_s, 3),
        "simulated s": round(simulated_s, 3),
        "rehearsed s": round(then_s, 3),
        "error %": percent(then_s, predicted_s),
        "of data %": percent(simulated_s, predicted_s),
        "of emulation %": percent(then_s, simulated_s),
        "late ms": round(result["late_ms"]["mean"], 2),
    }


def percent(these_s: float, those_s: float) -> float:
    """By how much these are more than those."""
    return round(100 * (these_s / those_s - 1), 2)


def measure(small: bool, steps: int | None = None) -> Tables:
    """A row per case."""
    steps = steps or (SMALL_STEPS if small else STEPS)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run = prepare(folder)
        return {"Re-planned": [rehearsed(folder, run, case, steps) for case in CASES]}


if __name__ == "__main__":
    main(__doc__, measure, steps="steps of each rehearsal")
