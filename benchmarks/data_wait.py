"""Training's wait for its data, as a share of the step: the tiny preset with its sample data, on
the CPU.

A step's wait is that of the rank that waited longest, over all its slots, from asking for the
inputs of a slot to having them as tensors. `in the ranks` decodes in threads of the ranks,
`service` pulls from one `disttrain data serve` on the same machine. The first step is left out: it
waits for the first images, which nothing can hide. With one rank, which computes in one thread, a
machine of two cores has one left for the data. Six ranks share those cores with each other, their
decoding and the service, so that any thread is often without one, and every such pause while a slot
is handed over counts as waiting: what is seen then is the machine, not the data. Wall time.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from benchmarks.common import Tables, main
from benchmarks.strategies import disttrain

RUN_FILE = "disttrain.yaml"
DEVICES = (1, 6)


def prepared(folder: Path, devices: int) -> None:
    """A profiled and planned run in `folder` that generates no images."""
    disttrain(folder, "init", ".", "--preset", "tiny", "--sample-data")
    edit(folder, "samples", images=0)
    edit(folder, "cluster", gpus_per_node=devices)
    disttrain(folder, "profile", "--device", "cpu")
    disttrain(folder, "plan")


def edit(folder: Path, section: str, **fields: object) -> None:
    """Change a section of the run file."""
    path = folder / RUN_FILE
    document = yaml.safe_load(path.read_text(encoding="utf-8"))
    document[section] |= fields
    path.write_text(yaml.safe_dump(document), encoding="utf-8")


@contextmanager
def service(folder: Path) -> Iterator[None]:
    """A service that the run in `folder` is fed by."""
    command = [
        sys.executable,
        "-m",
        "disttrain_cli",
        "data",
        "serve",
        "--port",
        "0",
        "--json",
        "--quiet",
    ]
    with subprocess.Popen(
        command,
        cwd=folder,
        stdout=subprocess.PIPE,
        text=True,
        stdin=subprocess.DEVNULL,
        env={"OMP_NUM_THREADS": "1"} | os.environ,
    ) as process:
        try:
            edit(folder, "preprocess", addresses=_document(process)["addresses"])
            yield
        finally:
            edit(folder, "preprocess", addresses=[])
            process.terminate()


def _document(process: subprocess.Popen[str]) -> dict[str, Any]:
    """The first JSON document that a process prints."""
    assert process.stdout is not None
    text = ""
    for line in process.stdout:
        text += line
        try:
            return dict(json.loads(text))
        except ValueError:
            continue
    raise SystemExit(f"disttrain data serve ended with exit code {process.wait()}")


def loads(folder: Path) -> list[dict[str, Any]]:
    """Rows per unit: how long a rank waits for the first slot of a step, and for the others, first
    step left out."""
    import duckdb

    found = duckdb.sql(f"""
        SELECT unit, slot = 0 AS first, count(*), median(end_ns - start_ns) / 1e6,
               quantile_cont(end_ns - start_ns, 0.95) / 1e6, max(end_ns - start_ns) / 1e6
        FROM '{folder}/runs/tiny/traces/rank-*/*.parquet' WHERE operation = 'load' AND step > 0
        GROUP BY ALL ORDER BY unit, first DESC""").fetchall()
    columns = ("loads", "median ms", "95 % ms", "longest ms")
    return [
        {
            "unit": unit,
            "slot": "first" if first else "others",
            **dict(zip(columns, figures, strict=True)),
        }
        for unit, first, *figures in found
    ]


def measure(small: bool = False) -> Tables:
    """Shares of the step for one rank and for six, both ways in turns, then where the waits are."""
    rounds, steps = (1, 3) if small else (2, 15)
    rows, places = [], {}
    for devices in DEVICES[:1] if small else DEVICES:
        seconds: dict[str, list[tuple[float, float]]] = {"in the ranks": [], "service": []}
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            prepared(folder, devices)
            for _ in range(rounds):
                for way, own in seconds.items():
                    with service(folder) if way == "service" else nullcontext():
                        trained = disttrain(folder, "train", "--restart", "--steps", steps)[
                            "steps"
                        ][1:]
                    own += [(step["data_wait_s"], step["iteration_s"]) for step in trained]
                    places[f"Waits of {devices} rank(s), {way}, last round"] = loads(folder)
        rows += [row(devices, way, own) for way, own in seconds.items()]
    return {
        f"Wait for data over the step, {rounds} run(s) each of {steps} steps, the first left out": (
            rows
        ),
        **places,
    }


def row(ranks: int, way: str, seconds: list[tuple[float, float]]) -> dict[str, Any]:
    """Figures of a way: its waits, and each as a share of its step."""
    waits, steps = np.array(seconds).T
    shares = 100 * waits / steps
    return {
        "ranks": ranks,
        "data": way,
        "step s": float(np.median(steps)),
        "wait ms": 1e3 * float(np.median(waits)),
        "share %": float(np.median(shares)),
        "95 % of steps below %": float(np.quantile(shares, 0.95)),
        "worst %": float(shares.max()),
        "all waits over all steps %": 100 * float(waits.sum() / steps.sum()),
    }


if __name__ == "__main__":
    main(__doc__, measure)
