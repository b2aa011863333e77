"""`disttrain analyze` on own traces, as a whole process: how long until the verdict, and how much
memory it takes.

The trace is 64 ranks × 200 steps × 16 slots of a made-up job (tests/analysis/synthetic.py): 1.4
million rows in Parquet segments as the trainer writes them. Every call is a process of its own,
first on files that were not seen before, then again, with modules compiled as those of an installed
package (the first, small trace sees to that). Other traces show what grows: ranks, steps, and
segments (a run that was resumed often). Wall time, so other work on the machine shows. Run from the
repository with the `dev` extra installed.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from benchmarks.common import Tables, main
from disttrain_cli.spec.trace import STEP_COLUMNS, TRACE_COLUMNS
from tests.analysis import synthetic

ROUNDS = 3
#: Ends in a line with the largest resident memory of the process, in KiB.
_CALL = (
    "import resource, runpy, sys\n"
    "sys.argv = ['disttrain', *sys.argv[1:]]\n"
    "try:\n    runpy.run_module('disttrain_cli', run_name='__main__')\n"
    "except SystemExit as end:\n    assert not end.code, end.code\n"
    "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, file=sys.stderr)\n"
)


def make_trace(folder: Path, ranks: int, steps: int, slots: int, segments: int = 2) -> int:
    """Write a run with one slow rank; two steps are simulated, the others are as they were, later.
    Returns its rows."""
    spec = synthetic.Synthetic(steps=2, slots=slots, dp=(ranks - 2) // 2, slow_rank={3: 1.4})
    truth = synthetic.simulate(spec)
    length_ns = truth.windows[-1][1] - truth.windows[0][0]
    schema = pa.schema([(name, synthetic.TYPES[kind]) for name, kind in TRACE_COLUMNS.items()])
    rows = 0
    for rank in range(len(spec.ranks)):
        once = pa.Table.from_pylist(
            [row for row in truth.rows if row["rank"] == rank], schema=schema
        )
        table = pa.concat_tables(
            [_later(once, turn, length_ns, ("start_ns", "end_ns")) for turn in range(steps // 2)]
        )
        rows += len(table)
        _write(folder / "traces" / f"rank-{rank:05d}", table, segments)
    reported = [
        {
            "run": spec.run,
            "step": step,
            "loss": 5.0,
            "loss_text": 4.0,
            "loss_image": 1.0,
            "grad_norm": 1.0,
            "iteration_s": (end - start) / 1e9,
            "sequences_per_s": spec.dp * slots * 1e9 / (end - start),
            "mfu": 0.3,
            "data_wait_s": 0.0,
            "tokens": 1,
            "images": 1,
            "targets": 1,
            "model_flops": truth.flops / 2,
            "end_ns": end,
        }
        for step, (start, end) in enumerate(truth.windows)
    ]
    once = pa.Table.from_pylist(
        reported,
        schema=pa.schema([(name, synthetic.TYPES[kind]) for name, kind in STEP_COLUMNS.items()]),
    )
    _write(
        folder / "traces" / "steps",
        pa.concat_tables(
            [_later(once, turn, length_ns, ("end_ns",)) for turn in range(steps // 2)]
        ),
        1,
    )
    (folder / "traces" / "job.json").write_text(synthetic.make_job(spec).model_dump_json())
    return rows


def _later(table: pa.Table, turn: int, length_ns: int, times: tuple[str, ...]) -> pa.Table:
    for name, more in [("step", 2 * turn), *((name, turn * length_ns) for name in times)]:
        place = table.schema.get_field_index(name)
        field = table.schema.field(place)
        table = table.set_column(place, field, pc.add(table[name], more).cast(field.type))
    return table


def _write(folder: Path, table: pa.Table, segments: int) -> None:
    folder.mkdir(parents=True)
    size = -(-len(table) // segments)
    for part in range(segments):
        pq.write_table(
            table.slice(part * size, size),
            folder / f"segment-{part:05d}.parquet",
            compression="zstd",
        )


def call(*arguments: str) -> tuple[float, float, dict[str, Any]]:
    """Seconds and MiB of one `disttrain` process, and the JSON it printed."""
    start = time.perf_counter()
    ended = subprocess.run(
        [sys.executable, "-c", _CALL, *arguments],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"PYTHONDONTWRITEBYTECODE": ""},
    )
    seconds = time.perf_counter() - start
    return seconds, int(ended.stderr.split()[-1]) / 1024, json.loads(ended.stdout)


def row(name: str, folder: Path, rows: int) -> dict[str, Any]:
    """First and further calls on one trace."""
    first_s, first_mib, found = call("analyze", str(folder), "--json")
    again = [call("analyze", str(folder), "--json") for _ in range(ROUNDS)]
    assert all(document == found for _, _, document in again)
    asked_s = [
        call("analyze", str(folder), "--json", "--sql", "SELECT count(*) FROM trace")[0]
        for _ in range(1 + ROUNDS)
    ]
    place = found["verdict"]["place"]
    return {
        "trace": name,
        "rows": rows,
        "first call s": first_s,
        "again s": min(seconds for seconds, _, _ in again),
        "--sql s": asked_s[0],
        "--sql again s": min(asked_s[1:]),
        "MiB": first_mib,
        "report MiB": Path(found["report"]).stat().st_size / 2**20,
        "verdict": f"{found['verdict']['cause']}, rank {place['rank']}",
    }


def measure(small: bool) -> Tables:
    """Traces of several shapes."""
    shapes = {"8 ranks × 4 steps": (8, 4, 4, 2)} | (
        {}
        if small
        else {
            "64 ranks × 200 steps": (64, 200, 16, 2),
            "64 ranks × 200 steps, 20 segments a rank": (64, 200, 16, 20),
            "64 ranks × 800 steps": (64, 800, 16, 8),
            "512 ranks × 20 steps": (512, 20, 16, 1),
            "2,000 ranks × 4 steps": (2000, 4, 4, 1),
        }
    )
    rows = []
    for name, shape in shapes.items():
        folder = Path(tempfile.mkdtemp())
        try:
            rows.append(row(name, folder, make_trace(folder, *shape)))
        finally:
            shutil.rmtree(folder)
    return {"disttrain analyze RUN --json": rows}


if __name__ == "__main__":
    main(__doc__, measure)
