"""Recording what a rank does: rows of `spec.trace.TRACE_COLUMNS`, written as whole Parquet segments."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from disttrain_cli.runtime.units.topology import Place
from disttrain_cli.runtime.watching.pulse import Pulse
from disttrain_cli.spec.trace import SAMPLE_COLUMNS, SIZE_COLUMNS, STEP_COLUMNS, TRACE_COLUMNS
from disttrain_cli.spec.whole import write_whole

if TYPE_CHECKING:
    from disttrain_cli.runtime.watching.profiles import Marks

SEGMENT_ROWS = 20_000
_NOTHING = {"slot": -1, "module": "", "tokens": 0, "images": 0, "sequences": 0,
            "sum_length_sq": 0, "bytes": 0, "peer": -1}


@dataclass
class SegmentWriter:
    """Collects rows of a fixed schema; `flush` writes them as one segment (temporary name, then rename)."""

    folder: Path
    columns: dict[str, str]
    run: str
    rows: list[dict[str, Any]] = field(default_factory=list)
    segments: int = 0

    def flush(self) -> None:
        """Write what was collected, if anything."""
        if not self.rows:
            return
        import pyarrow as pa
        import pyarrow.parquet as pq

        kinds = {"string": pa.string(), "int32": pa.int32(), "int64": pa.int64(), "float64": pa.float64(),
                 "list<int64>": pa.list_(pa.int64()), "list<string>": pa.list_(pa.string()),
                 "map<string,float64>": pa.map_(pa.string(), pa.float64())}
        schema = pa.schema([(name, kinds[kind]) for name, kind in self.columns.items()])
        sink = pa.BufferOutputStream()
        pq.write_table(pa.Table.from_pylist(self.rows, schema=schema), sink, compression="zstd")
        write_whole(self.folder / f"segment-{self.run}-{self.segments:05d}.parquet", sink.getvalue().to_pybytes())
        self.segments += 1
        self.rows.clear()


class Tracer:
    """The trace of one rank. Times are nanoseconds of the host's wall clock, taken from a monotonic counter."""

    pulse: Pulse | None = None
    marks: Marks | None = None  # in torch's profile, while there is one
    silent = False  # rows are dropped

    def __init__(self, folder: Path, run: str, place: Place, clock: Callable[[], int]) -> None:
        self._writer = SegmentWriter(folder / f"rank-{place.rank:05d}", TRACE_COLUMNS, run)
        self.now = clock
        self.step = 0
        self._place: dict[str, Any] = {"run": run, "unit": place.unit.name, "stage": place.stage.index,
                                       "replica": place.replica, "tp_rank": place.tp_rank, "rank": place.rank,
                                       "host": socket.gethostname()}

    def begin(self, operation: str, slot: int = -1, module: str = "") -> None:
        """Say what the rank turns to, for whoever looks for a job that hangs, and in torch's profile."""
        if self.pulse is not None:
            self.pulse.begin(operation, self.step, slot, module)
        if self.marks is not None:
            self.marks.begin(operation, slot, module)

    def record(self, operation: str, start_ns: int, end_ns: int | None = None, **amounts: Any) -> int:
        """Add a row, which ends now unless told otherwise; returns its duration in ns."""
        end_ns = self.now() if end_ns is None else end_ns
        if self.marks is not None:
            self.marks.end()
        if self.silent:
            return end_ns - start_ns
        self._writer.rows.append(self._place | _NOTHING | amounts | {
            "step": self.step, "operation": operation, "start_ns": start_ns, "end_ns": end_ns})
        return end_ns - start_ns

    def end_step(self) -> None:
        """Write a segment when enough rows have come together."""
        if len(self._writer.rows) >= SEGMENT_ROWS:
            self._writer.flush()

    def close(self) -> None:
        """Write what is left."""
        self._writer.flush()


def wall_clock(synchronize: Callable[[], None] | None = None) -> Callable[[], int]:
    """A clock that gives the time after the device has finished what it was given."""
    offset = time.time_ns() - time.perf_counter_ns()

    def now() -> int:
        if synchronize is not None:
            synchronize()
        return time.perf_counter_ns() + offset
    return now


def step_writer(folder: Path, run: str) -> SegmentWriter:
    """Writer of the per-step rows (rank 0)."""
    return SegmentWriter(folder / "steps", STEP_COLUMNS, run)


def size_writer(folder: Path, run: str) -> SegmentWriter:
    """Writer of the sizes of a few sequences of every step (rank 0)."""
    return SegmentWriter(folder / "sizes", SIZE_COLUMNS, run)


def sample_writer(folder: Path, run: str) -> SegmentWriter:
    """Writer of what every slot is made of (rank 0)."""
    return SegmentWriter(folder / "samples", SAMPLE_COLUMNS, run)
