"""Train the tiny preset under its own plan and under the best `megatron` plan, alternating;
measured beside predicted.

Without a GPU all ranks share the machine's cores: nothing is won by giving each module its own
devices, so this measures the overhead of the units and how well the prediction knows it, not the
gain of disaggregation. The full form took 7.5 minutes on 2 cores that others used too (profile, two
plans, three pairs of 12 steps, the start of the ranks included); --small trains one pair of 2
steps. Wall time: other work on the machine shows.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.common import Tables, main, paired_ratio

STRATEGIES = ("disaggregated", "megatron")


def disttrain(folder: Path, *words: object) -> dict[str, Any]:
    """The JSON document of a command run in `folder`; its messages go to stderr, and a failure ends
    the benchmark."""
    command = [sys.executable, "-m", "disttrain_cli", *map(str, words), "--json"]
    done = subprocess.run(
        command,
        cwd=folder,
        stdout=subprocess.PIPE,
        text=True,
        stdin=subprocess.DEVNULL,
        env={"OMP_NUM_THREADS": "1"} | os.environ,
    )
    if done.returncode:
        raise SystemExit(
            f"disttrain {words[0]} failed with exit code {done.returncode}:\n{done.stdout}"
        )
    document: dict[str, Any] = json.loads(done.stdout)
    return document


def prepared(folder: Path) -> dict[str, dict[str, Any]]:
    """A profiled run in `folder` that generates no images, and its plan for each strategy."""
    disttrain(folder, "init", ".", "--preset", "tiny", "--sample-data")
    run_file = folder / "disttrain.yaml"
    text = run_file.read_text(encoding="utf-8")
    run_file.write_text(
        text[: text.index("\nsamples:")] + "\nsamples: {images: 0}\n", encoding="utf-8"
    )
    disttrain(folder, "profile", "--device", "cpu")
    return {
        name: disttrain(folder, "plan", "--strategy", name, "--out", f"{name}.yaml")
        for name in STRATEGIES
    }


def measure(small: bool = False) -> Tables:
    """Two tables: each strategy's step, and the ratio of the two."""
    pairs, steps, warm = (1, 2, 1) if small else (3, 12, 3)
    seconds: dict[str, list[float]] = {name: [] for name in STRATEGIES}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        plans = prepared(folder)
        for _ in range(pairs):
            for strategy in STRATEGIES:
                trained = disttrain(
                    folder, "train", "--restart", "--plan", f"{strategy}.yaml", "--steps", steps
                )
                seconds[strategy].append(
                    median(step["iteration_s"] for step in trained["steps"][warm:])
                )
    predicted = {name: plans[name]["predicted"]["iteration_s"] for name in STRATEGIES}
    ours, theirs = (seconds[name] for name in STRATEGIES)
    measured = paired_ratio(theirs, ours)
    expected = predicted["megatron"] / predicted["disaggregated"]
    return {
        f"Seconds per step, {pairs} run(s) each of {steps} steps, the first {warm} dropped": [
            {
                "strategy": name,
                "layout": _layout(plans[name]["plan"]),
                "ranks": plans[name]["plan"]["gpus_used"],
                "predicted": predicted[name],
                "measured": median(seconds[name]),
                "measured, each run": " ".join(f"{value:.3f}" for value in seconds[name]),
            }
            for name in STRATEGIES
        ],
        "Throughput of disaggregated over megatron, all ranks on the same cores (overhead)": [
            {
                "measured": measured,
                "predicted": expected,
                "measured over predicted": measured / expected,
                "pairs": " ".join(f"{a / b:.3f}" for a, b in zip(theirs, ours, strict=True)),
            }
        ],
    }


def _layout(plan: dict[str, Any]) -> str:
    units = ", ".join(f"{unit['name']} DP {unit['dp']} PP {unit['pp']}" for unit in plan["units"])
    return f"{units}, M {plan['microbatch_size']}"


if __name__ == "__main__":
    main(__doc__, measure)
