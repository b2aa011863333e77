"""Traces that grow: those of a folder, written again step by step as ranks write theirs."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from disttrain_cli.runtime.watching.tracing import SegmentWriter
from disttrain_cli.spec.trace import (
    OPEN_SEGMENT,
    SIZE_COLUMNS,
    STEP_COLUMNS,
    TRACE_COLUMNS,
    read_job,
    segments_of,
)

Row = dict[str, Any]


class Growing:
    """Writes the steps of `source` into `target`, which is a `traces` folder too; of ranks and
    sizes `kept_steps` are kept."""

    def __init__(self, source: Path, target: Path, kept_steps: int | None = None) -> None:
        target.mkdir(parents=True, exist_ok=True)
        shutil.copy(source / "job.json", target / "job.json")
        self.run = read_job(source / "job.json").run
        self.go_on(source)
        columns = {"steps": STEP_COLUMNS, "sizes": SIZE_COLUMNS}
        self._writers = {
            name: SegmentWriter(
                target / name,
                columns.get(name, TRACE_COLUMNS),
                self.run,
                kept_steps=None if name == "steps" else kept_steps,
            )
            for name in self._rows
            if name in columns or name.startswith("rank-")
        }

    def go_on(self, source: Path) -> None:
        """Have the next steps written from another folder of the same ranks."""
        self._rows = {
            folder.name: by_step(folder) for folder in sorted(source.iterdir()) if folder.is_dir()
        }

    @property
    def steps(self) -> list[int]:
        return sorted(self._rows["steps"])

    def reported(self, step: int) -> list[Row]:
        """What rank 0 reports of a step."""
        return self._rows["steps"][step]

    def write(
        self, step: int, change: Callable[[Row], Row] = lambda row: row, only: str = ""
    ) -> None:
        """Append a step; `only` that of folders with this in their names."""
        for name, writer in self._writers.items():
            if only in name:
                writer.rows += [change(row) for row in self._rows[name].get(step, [])]
                writer.keep()

    def flush(self) -> None:
        """Replace open segments, as checkpoints and the end do."""
        for writer in self._writers.values():
            writer.flush()


def by_step(folder: Path) -> dict[int, list[Row]]:
    """Rows of a folder of segments, by step."""
    whole, opened = segments_of([folder])
    tables = [pq.read_table(file) for file in whole]
    for file in opened:
        assert file.suffix == OPEN_SEGMENT
        with pa.ipc.open_stream(file.read_bytes()) as stream:
            tables += [pa.Table.from_batches([batch]) for batch in stream]
    rows: dict[int, list[Row]] = {}
    for table in tables:
        for row in table.to_pylist():
            rows.setdefault(row["step"], []).append(row)
    return rows
