"""Reading other programs' traces: `disttrain analyze` and HolisticTraceAnalysis on one large Kineto
file.

The file is made from a trace that is given (`DISTTRAIN_TRACE`, a Kineto JSON or .gz): its events
over and over, each time later and with correlation ids of their own, as one JSON object. Each
program runs in a process of its own, so that its peak memory is its own; HolisticTraceAnalysis runs
in the virtual environment that `DISTTRAIN_HTA_VENV` names (`python -m venv DIR && DIR/bin/pip
install HolisticTraceAnalysis`) and is left out where there is none. It computes the same measure,
the breakdown of GPU time. `disttrain` starts with an empty cache, then is asked again.
"""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.common import Tables, main

#: Sizes in MB, and the one that is read by both programs.
SIZES_MB, SMALL_MB, BOTH_MB = (47, 190, 379, 1200), (2,), (379, 2)
TRACE, VENV = "DISTTRAIN_TRACE", "DISTTRAIN_HTA_VENV"
_IDS = ("correlation", "External id")
_THEIRS = """
import logging, sys
logging.disable(logging.CRITICAL)
from hta.trace_analysis import TraceAnalysis
analysis = TraceAnalysis(trace_files={0: sys.argv[1]}, trace_dir="")
print(analysis.get_temporal_breakdown(visualize=False).to_string())
"""


def measure(small: bool) -> Tables:
    """Tables of seconds and peak memory over sizes, and of both programs."""
    rows, both = [], []
    with tempfile.TemporaryDirectory(prefix="kineto-") as name:
        folder = Path(name)
        for size_mb in SMALL_MB if small else SIZES_MB:
            trace = repeat(source(), size_mb, folder / f"trace-{size_mb}.json")
            ours = run_ours(trace, folder / f"cache-{size_mb}")
            again = run_ours(trace, folder / f"cache-{size_mb}")
            asked = run_ours(
                trace, folder / f"cache-{size_mb}", "--sql", "SELECT count(*) FROM kernels"
            )
            rows.append(
                {
                    "MB": trace.stat().st_size / 1e6,
                    "s": ours["s"],
                    "CPU s": ours["cpu_s"],
                    "peak MiB": ours["peak_mib"],
                    "again s": again["s"],
                    "again CPU s": again["cpu_s"],
                    "--sql s": asked["s"],
                    "--sql CPU s": asked["cpu_s"],
                }
            )
            if size_mb in BOTH_MB:
                both = side_by_side(trace, folder, rounds=1 if small else 2)
            trace.unlink()
    return {
        "disttrain analyze over the size of the file": rows,
        f"{BOTH_MB[0]} MB, both programs": both,
    }


def side_by_side(trace: Path, folder: Path, rounds: int) -> list[dict[str, Any]]:
    """One after the other, in turns; the better time of each."""
    found: dict[str, list[dict[str, float]]] = {}
    for turn in range(rounds):
        found.setdefault("disttrain, empty cache", []).append(
            run_ours(trace, folder / f"cold-{turn}")
        )
        theirs = run_theirs(trace)
        if theirs is not None:
            found.setdefault("HolisticTraceAnalysis", []).append(theirs)
    ours = min(run["s"] for run in found["disttrain, empty cache"])
    return [
        {
            "program": program,
            "s": min(run["s"] for run in runs),
            "CPU s": min(run["cpu_s"] for run in runs),
            "peak MiB": max(run["peak_mib"] for run in runs),
            "× disttrain": min(run["s"] for run in runs) / ours,
        }
        for program, runs in found.items()
    ]


def source() -> dict[str, Any]:
    """The trace to repeat.

    Raises:
        SystemExit: none was named.
    """
    path = os.environ.get(TRACE)
    if not path:
        raise SystemExit(f"Name a Kineto trace to repeat: {TRACE}=FILE")
    text = Path(path).read_bytes()
    document: dict[str, Any] = json.loads(
        gzip.decompress(text) if text[:2] == b"\x1f\x8b" else text
    )
    return document


def repeat(document: dict[str, Any], size_mb: float, path: Path) -> Path:
    """A single-object file of about `size_mb`: the events again and again, later, with ids of their
    own."""
    events = document["traceEvents"]
    times = [event["ts"] for event in events if event.get("ph") == "X"]
    length = (
        max(event["ts"] + event.get("dur", 0) for event in events if event.get("ph") == "X")
        - min(times)
        + 1000
    )
    ids = 1 + max(
        (event.get("args", {}).get(name, 0) for event in events for name in _IDS), default=0
    )
    with path.open("w") as file:
        header = {name: value for name, value in document.items() if name != "traceEvents"}
        file.write(json.dumps(header)[:-1] + ', "traceEvents": [\n')
        count = 0
        while file.tell() < size_mb * 1e6:
            shifted = (_shifted(event, count * length, count * ids) for event in events)
            file.write(
                (",\n" if count else "") + ",\n".join(json.dumps(event) for event in shifted)
            )
            count += 1
        file.write("\n]}")
    return path


def _shifted(event: dict[str, Any], later_us: float, more: int) -> dict[str, Any]:
    event = dict(event)
    if "ts" in event:
        event["ts"] += later_us
    if "id" in event and isinstance(event["id"], int):
        event["id"] += more
    args = event.get("args")
    if isinstance(args, dict):
        event["args"] = {
            name: value + more if name in _IDS else value for name, value in args.items()
        }
    return event


def run_ours(trace: Path, cache: Path, *more: str) -> dict[str, float]:
    """`disttrain analyze` as a process, with a cache folder of its own."""
    words = [
        sys.executable,
        "-c",
        "from disttrain_cli.app import main; main()",
        "analyze",
        str(trace),
        "--json",
        *more,
    ]
    return timed(words, {"XDG_CACHE_HOME": str(cache)})


def run_theirs(trace: Path) -> dict[str, float] | None:
    """HolisticTraceAnalysis as a process, or None without its environment."""
    venv = os.environ.get(VENV)
    return (
        None
        if not venv
        else timed([str(Path(venv) / "bin" / "python"), "-c", _THEIRS, str(trace)], {})
    )


def timed(words: list[str], environment: dict[str, str]) -> dict[str, float]:
    """Seconds, CPU seconds and peak memory of a process, from a child that starts nothing else."""
    watch = (
        "import resource, subprocess, sys\ncode = subprocess.call(sys.argv[1:],"
        " stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)\nused ="
        " resource.getrusage(resource.RUSAGE_CHILDREN)\nprint(used.ru_maxrss / 1024, used.ru_utime"
        " + used.ru_stime)\nsys.exit(code)"
    )
    start = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", watch, *words],
        env=os.environ | environment,
        check=True,
        capture_output=True,
        text=True,
    )
    peak_mib, cpu_s = map(float, done.stdout.split())
    return {"s": time.perf_counter() - start, "cpu_s": cpu_s, "peak_mib": peak_mib}


if __name__ == "__main__":
    main(__doc__, measure)
