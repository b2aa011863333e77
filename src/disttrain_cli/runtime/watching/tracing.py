"""Recording of a rank's work: rows of `spec.trace.TRACE_COLUMNS`, per step, later in Parquet."""

from __future__ import annotations

import errno
import io
import math
import os
import re
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from disttrain_cli.errors import SpecError
from disttrain_cli.runtime.watching.pulse import Pulse
from disttrain_cli.spec.stage_graph import RankCoords
from disttrain_cli.spec.trace import (
    OPEN_SEGMENT,
    TRACE_COLUMNS,
    arrow_schema,
)
from disttrain_cli.spec.whole import write_whole

if TYPE_CHECKING:
    from disttrain_cli.runtime.watching.device_clock import DeviceClock, Later, Mark
    from disttrain_cli.runtime.watching.marks import Marks

    Time = int | Mark | Later  # host time, or a point in the device's work
    Spans = list[tuple[Time, Time]]

#: Size at which an open segment becomes Parquet: rows of 100 to 1,000 steps.
SEGMENT_BYTES = 8 * 2**20
_NOTHING = {
    "slot": -1,
    "module": "",
    "tokens": 0,
    "images": 0,
    "sequences": 0,
    "sum_length_sq": 0,
    "bytes": 0,
    "peer": -1,
    "late_ns": 0,
}


class SegmentWriter:
    """Writer of rows of a fixed schema as segments.

    `keep` appends them to the open segment, a stream of Arrow batches that stays readable however
    this process ends; `flush` replaces it by one of Parquet (temporary name, then rename). An error
    such as a full disk is reported once, and nothing is recorded from then on: training continues.

    Args:
        kept_steps: newest steps whose segments are retained, also of earlier starts; the others are
            deleted when a segment is written. None: all.
        abandoned: folders of segments that no process writes any more, deleted by the same rule.
    """

    def __init__(
        self,
        folder: Path,
        columns: dict[str, str],
        run: str,
        say: Callable[[str], None] = print,
        kept_steps: int | None = None,
        abandoned: Sequence[Path] = (),
    ) -> None:
        self.rows: list[dict[str, Any]] = []
        self._schema = arrow_schema(columns)
        self._folder, self._run, self._say = folder, run, say
        self._segments = 0
        self._open: io.FileIO | None = None
        self._open_steps = 0
        self._failed = False
        self._kept_steps, self._abandoned = kept_steps, abandoned
        self._last_steps: dict[Path, int | None] = {}  # last step by segment

    def keep(self) -> None:
        """Append the collected rows to the open segment, and flush it if it is long."""
        self._attempt(self._append)
        self._open_steps += 1
        if self._open is not None and (
            self._open.tell() >= SEGMENT_BYTES or self._open_steps >= (self._kept_steps or math.inf)
        ):
            self.flush()

    def flush(self) -> None:
        """Write the open segment as Parquet, including newly collected rows."""
        self._attempt(self._finish)

    def _attempt(self, write: Callable[[], None]) -> None:
        try:
            if not self._failed:
                write()
        except (OSError, SpecError) as error:
            self._failed = True
            reason = error.why if isinstance(error, SpecError) else error.strerror
            self._say(
                f"warning: no more traces in {self._folder.parent}: {reason}; training goes on"
                " without them"
            )
        finally:
            self.rows.clear()

    def _append(self) -> None:
        import pyarrow as pa

        if not self.rows:
            return
        batch = pa.RecordBatch.from_pylist(self.rows, schema=self._schema)
        content = batch.serialize().to_pybytes()
        if self._open is None:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._open = self._segment(OPEN_SEGMENT).open("wb", buffering=0)
            content = self._schema.serialize().to_pybytes() + content
        if self._open.write(content) < len(content):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def _finish(self) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        self._append()
        if self._open is None:
            return
        self._open.close()
        self._open, self._open_steps = None, 0
        with pa.ipc.open_stream(self._segment(OPEN_SEGMENT).read_bytes()) as stream:
            table = stream.read_all()
        sink = pa.BufferOutputStream()
        pq.write_table(table.combine_chunks(), sink, compression="zstd")
        write_whole(self._segment(".parquet"), sink.getvalue().to_pybytes())
        self._segment(OPEN_SEGMENT).unlink()
        self._segments += 1
        if self._kept_steps is not None:
            self._prune(self._kept_steps)

    def _prune(self, kept_steps: int) -> None:
        for folder in (self._folder, *self._abandoned):
            for file in folder.glob("segment-*"):
                if file not in self._last_steps:
                    self._last_steps[file] = last_step(file)
        newest = self._last_steps.get(self._segment(".parquet", self._segments - 1))
        for file, last in list(self._last_steps.items()):
            if newest is not None and last is not None and last <= newest - kept_steps:
                with suppress(OSError):  # the file stays: nothing is lost
                    file.unlink(missing_ok=True)
                    del self._last_steps[file]
        for folder in self._abandoned:
            with suppress(OSError):  # it is not empty, or gone
                folder.rmdir()

    def _segment(self, ending: str, number: int | None = None) -> Path:
        number = self._segments if number is None else number
        return self._folder / f"segment-{self._run}-{number:05d}{ending}"


def last_step(segment: Path) -> int | None:
    """Return the last step of a segment, complete or open; None where it cannot be read.

    A process that ended early leaves an open one.
    """
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    steps: list[int] = []
    try:
        if segment.suffix == OPEN_SEGMENT:
            with pa.ipc.open_stream(pa.BufferReader(segment.read_bytes())) as stream:
                steps.extend(pc.max(batch.column("step")).as_py() for batch in stream)
        else:
            steps.append(pc.max(pq.read_table(segment, columns=["step"]).column("step")).as_py())
    except (OSError, KeyError, pa.ArrowException):  # an open segment may end within a batch
        pass
    return max(steps, default=None)


class Tracer:
    """Trace of one rank. Times are ns of the host's wall clock, by a monotonic counter.

    Args:
        clock: the host's (`wall_clock`).
        device_clock: given if the host runs ahead of its device; then rows have the device's times.
        kept_steps: as of `SegmentWriter`.
        ranks: number of ranks; rank 0 also deletes old segments of ranks beyond it, which a start
            on more ranks left.
    """

    pulse: Pulse | None = None
    marks: Marks | None = None  # of torch's profile, while recording
    silent = False  # True to drop rows
    _device: DeviceClock | None = None
    # exchanges with the rank's TP, CP and EP groups in the current operation, if it has any
    _exchanges: Spans | None = None

    def __init__(
        self,
        folder: Path,
        run: str,
        coords: RankCoords,
        clock: Callable[[], int],
        say: Callable[[str], None] = print,
        device_clock: DeviceClock | None = None,
        kept_steps: int | None = None,
        ranks: float = math.inf,
    ) -> None:
        others = () if coords.rank else folder.glob("rank-*")
        self._writer = SegmentWriter(
            folder / f"rank-{coords.rank:05d}",
            TRACE_COLUMNS,
            run,
            say,
            kept_steps,
            [
                path
                for path in others
                if re.fullmatch(r"rank-[0-9]{5,}", path.name)
                and not path.is_symlink()
                and int(path.name[5:]) >= ranks
            ],
        )
        self.now, self._device = clock, device_clock
        # rows whose times are not known yet
        self._ahead: list[tuple[dict[str, Any], Mark | Later, Mark | Later, Spans | None]] = []
        if coords.unit.tp_cp_size > 1 or coords.unit.ep > 1:
            self._exchanges = []
        self.step = 0
        self._coords: dict[str, Any] = {
            "run": run,
            "unit": coords.unit.name,
            "stage": coords.stage.index,
            "replica": coords.replica,
            "tp_rank": coords.tp_rank,
            "cp_rank": coords.cp_rank,
            "rank": coords.rank,
            "host": socket.gethostname(),
        }

    @property
    def stage(self) -> int:
        """Stage of its unit that the next rows belong to."""
        return int(self._coords["stage"])

    @stage.setter
    def stage(self, index: int) -> None:
        self._coords["stage"] = index

    def begin(self, operation: str, slot: int = -1, module: str = "") -> None:
        """Start an operation, for the detection of hangs and for torch's profile."""
        if self.pulse is not None:
            reached = None if self._device is None else self._device.mark().passed
            self.pulse.begin(operation, self.step, slot, module, reached, self.stage)
        if self.marks is not None:
            self.marks.begin(operation, slot, module)
        if self._exchanges is not None:
            self._exchanges = []

    def mark(self) -> int | Mark:
        """Return a mark for the start or end of a row: a time, or a point in the device's work."""
        return self.now() if self._device is None else self._device.mark()

    def anchor(self) -> None:
        """Anchor the device's clock: the host has just waited for all of the device's work."""
        if self._device is not None:
            self._device.anchor()

    @contextmanager
    def exchanging(self) -> Iterator[None]:
        """Record an exchange of a forward or backward with the rank's TP, CP or EP group."""
        start = self.mark()
        yield
        if self._exchanges is not None:
            self._exchanges.append((start, self.mark()))

    def record(self, operation: str, start: Time, end: Time | None = None, **amounts: Any) -> None:
        """Add a row from one mark to another, or to now."""
        end = self.mark() if end is None else end
        if self.marks is not None:
            self.marks.end()
        if self.silent:
            return
        row = (
            self._coords
            | _NOTHING
            | amounts
            | {
                "step": self.step,
                "operation": operation,
                "start_ns": start,
                "end_ns": end,
            }
        )
        exchanges = self._exchanges if operation in ("forward", "backward") else None
        if isinstance(start, int):
            self._writer.rows.append(row | _exchanged(exchanges))
        else:
            assert not isinstance(end, int)
            self._ahead.append((row, start, end, exchanges))

    def end_step(self) -> None:
        """Save the step's rows; those that the device has yet to pass are saved a step later."""
        self._learn()
        self._writer.keep()

    def close(self) -> None:
        """Write the remaining rows, without waiting for a device that may have failed."""
        self._learn()
        self._writer.flush()

    def _learn(self) -> None:
        if self._device is None:
            return
        self._device.read()
        known = list(takewhile(lambda row: row[2].ns is not None, self._ahead))
        self._writer.rows += [
            row | {"start_ns": start.ns, "end_ns": end.ns} | _exchanged(exchanges)
            for row, start, end, exchanges in known
        ]
        del self._ahead[: len(known)]


def _exchanged(spans: Spans | None) -> dict[str, int]:
    """Return the column `exchange_ns` of a row; none where exchanges are not recorded."""

    def ns(time: Time) -> int:
        known = time if isinstance(time, int) else time.ns
        assert known is not None, "marks are read in the stream's order"
        return known

    if spans is None:
        return {}
    return {"exchange_ns": sum(ns(end) - ns(start) for start, end in spans)}


def wall_clock() -> Callable[[], int]:
    """Return the host's clock: ns since 1970, by a counter that never goes backwards."""
    offset = time.time_ns() - time.perf_counter_ns()
    return lambda: time.perf_counter_ns() + offset
