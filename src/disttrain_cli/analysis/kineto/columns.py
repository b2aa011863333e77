"""Conversion of decoded events to numeric columns; strings are numbered as they first appear."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from disttrain_cli.analysis.kineto.events import (
    EXACT_BELOW_US,
    NO_ARGS,
    NOTHING,
    Args,
    Event,
    exact_starts_ns,
)
from disttrain_cli.analysis.kineto.shapes import is_counted
from disttrain_cli.analysis.kineto.splitting import Batch

Columns = dict[str, NDArray[Any]]
#: Classes of categories; 0 is anything else.
KERNEL, MEMORY, OPERATOR, RUNTIME, ANNOTATION, GPU_ANNOTATION, HOST = range(1, 8)
_CLASSES = {
    "kernel": KERNEL,
    "gpu_memcpy": MEMORY,
    "gpu_memset": MEMORY,
    "memcpy": MEMORY,
    "memset": MEMORY,
    "cpu_op": OPERATOR,
    "operator": OPERATOR,
    "user_annotation": ANNOTATION,
    "gpu_user_annotation": GPU_ANNOTATION,
    "python_function": HOST,
    "overhead": HOST,
    "trace": HOST,
}
#: Categories of events that have a stream and no category.
KERNEL_OF_STREAM, MEMORY_OF_STREAM = "kernel", "gpu_memcpy"
_SPANS, _INSTANTS = frozenset("XBE"), frozenset("iI")
#: Times beyond this (µs before or after 1970, or in length) are invalid; numbers are clipped beyond
#: twice as much. Three of them together still fit into 64 bits of ns.
FARTHEST_US = 3 * 10**15
_CLIPPED_US = 2 * FARTHEST_US


class Numbers(dict[Any, int]):
    """Numbers of values, in the order in which they first appeared."""

    def __missing__(self, value: Any) -> int:
        number = self[value] = len(self)
        return number


@dataclass
class Strings:
    """Strings and tuples that the numbers in the columns represent, over all files."""

    names: Numbers = field(default_factory=Numbers)
    categories: Numbers = field(default_factory=Numbers)
    threads: Numbers = field(default_factory=Numbers)  # (file, pid, tid)
    # (collective, group, about, ranks, size, elements, dtype, peers)
    calls: Numbers = field(default_factory=Numbers)
    # (number of the name, dims, types, concrete inputs), as JSON
    shapes: Numbers = field(default_factory=Numbers)
    thread_names: dict[tuple[int, str, str], str] = field(default_factory=dict)
    process_names: dict[tuple[int, str], set[str]] = field(default_factory=dict)
    # thread → `args.rank` of its events
    recorded_ranks: dict[int, set[int]] = field(default_factory=dict)


@dataclass
class Extent:
    """First start and last end of rows; false if there are none."""

    first_ns: int = 2**63 - 1
    last_ns: int = -(2**63)

    def include(self, columns: Columns, chosen: NDArray[np.bool_]) -> None:
        """Extend the range to the chosen rows."""
        if chosen.any():
            starts, lengths = columns["start_ns"][chosen], columns["duration_ns"][chosen]
            self.first_ns = min(self.first_ns, int(starts.min()))
            self.last_ns = max(self.last_ns, int((starts + lengths).max()))

    def __bool__(self) -> bool:
        return self.last_ns >= self.first_ns


def class_of(category: str) -> int:
    """Return the class of a category; Kineto writes these names for every kind of device."""
    name = category.lower()
    if name in _CLASSES:
        return _CLASSES[name]
    if name.endswith("kernel"):
        return KERNEL
    return RUNTIME if name.endswith(("runtime", "driver")) else 0


def device_categories(strings: Strings) -> list[int]:
    """Return the numbers of the categories of kernels, copies and fills."""
    return [
        number
        for category, number in strings.categories.items()
        if class_of(category) in (KERNEL, MEMORY)
    ]


def spans(
    file: int, batch: Batch, strings: Strings, is_step: Callable[[str], bool]
) -> tuple[Columns, int]:
    """Return complete events and begin/end marks (`phase` X, B, E), one row each.

    Also return the number of broken events, which are left out: those without a time or with an
    impossible one, that is, a start or a length that is missing, no number or infinite, or a
    negative length. Instants that mark steps (`is_step` of their name) are complete events of no
    length.
    """
    wanted = [
        index
        for index, event in enumerate(batch.events)
        if event.ph in _SPANS or (event.ph in _INSTANTS and is_step(event.name))
    ]
    indices = [
        index
        for index in wanted
        if batch.events[index].ts is not None
        and (batch.events[index].dur is not None or batch.events[index].ph != "X")
    ]
    events = [batch.events[index] for index in indices]
    starts = _starts_ns(events, batch, indices)
    args = [event.args or NO_ARGS for event in events]
    names, threads, calls = strings.names, strings.threads, strings.calls
    stream = _whole([arg.stream for arg in args])
    columns: Columns = {
        "file": np.full(len(events), file, np.int32),
        "phase": np.array(
            [ord(event.ph if event.ph in _SPANS else "X") for event in events], np.uint8
        ),
        "category": _categories(events, stream, strings.categories),
        "name": np.array([names[event.name] for event in events], np.int32),
        "thread": np.array([threads[file, event.pid, event.tid] for event in events], np.int32),
        "start_ns": starts,
        "duration_ns": _ns([0 if event.dur is None else event.dur for event in events]),
        "device": _whole([arg.device for arg in args]),
        "stream": stream,
        "correlation": _whole([arg.correlation for arg in args]),
        "external_id": _whole([arg.external_id for arg in args]),
        "bytes": _whole([arg.bytes for arg in args]),
        "step": _whole([arg.step_num for arg in args]),
        "iteration": _whole([arg.iteration for arg in args]),
        "shape": _shapes(events, args, strings),
        "call": np.array(
            [calls[_call(arg)] if arg.collective or arg.group else -1 for arg in args], np.int32
        ),
    }
    lengths, farthest = columns["duration_ns"], 1000 * FARTHEST_US
    possible = (starts > -farthest) & (starts < farthest) & (lengths >= 0) & (lengths < farthest)
    _keep_recorded_ranks(events, columns["thread"], strings)
    if not possible.all():
        columns = {name: values[possible] for name, values in columns.items()}
    return columns, len(wanted) - len(columns["file"])


def memory(file: int, events: list[Event], strings: Strings) -> Columns | None:
    """Return the profiler's `[memory]` events: bytes allocated and reserved on a device.

    Device type 0 is the CPU. None if there are no such events.
    """
    rows = [
        (event, event.args)
        for event in events
        if event.name == "[memory]" and event.args is not None and event.ts is not None
    ]
    if not rows:
        return None
    return {
        "file": np.full(len(rows), file, np.int32),
        "thread": np.array(
            [strings.threads[file, event.pid, event.tid] for event, _ in rows], np.int32
        ),
        "at_ns": _ns([event.ts for event, _ in rows]),
        "device_type": _whole([args.device_type for _, args in rows]),
        "device": _whole([args.memory_device for _, args in rows]),
        "allocated_bytes": _whole([args.allocated for _, args in rows]),
        "reserved_bytes": _whole([args.reserved for _, args in rows]),
    }


def keep_names(file: int, events: list[Event], strings: Strings) -> None:
    """Store the names that metadata events give to threads and processes."""
    for event in events:
        if event.ph != "M" or event.args is None:
            continue
        if event.name == "thread_name":
            strings.thread_names[file, str(event.pid), str(event.tid)] = event.args.name
        elif event.name == "process_name":
            strings.process_names.setdefault((file, str(event.pid)), set()).add(event.args.name)


def _keep_recorded_ranks(events: list[Event], threads: NDArray[np.int32], strings: Strings) -> None:
    """Store `args.rank` of the events of each thread, −1 for events without one.

    End marks never have arguments, so they do not count.
    """
    ranks = [(event.args or NO_ARGS).rank for event in events]
    if max(ranks, default=-1) < 0:
        return
    for thread, rank in {
        (int(thread), rank)
        for thread, rank, event in zip(threads, ranks, events, strict=True)
        if event.ph != "E"
    }:
        strings.recorded_ranks.setdefault(thread, set()).add(rank)


def _call(args: Args) -> tuple[str, str, str, str, int, int, str, int, int]:
    size, elements, source, destination = (
        int(number)
        for number in _whole([args.group_size, args.elements, args.source, args.destination])
    )
    return (
        args.collective,
        args.group,
        args.group_about,
        str(args.group_ranks),
        size,
        elements,
        args.dtype,
        source,
        destination,
    )


def _shapes(events: list[Event], args: list[Args], strings: Strings) -> NDArray[np.int32]:
    """Return the numbers of the shapes of counted operators, else -1."""
    shapes = np.full(len(events), -1, np.int32)
    for index, (event, arg) in enumerate(zip(events, args, strict=True)):
        if arg.shapes is not NOTHING and is_counted(event.name):
            shapes[index] = strings.shapes[
                strings.names[event.name], bytes(arg.shapes), bytes(arg.types), bytes(arg.concrete)
            ]
    return shapes


def _whole(numbers: list[int]) -> NDArray[np.int64]:
    """Return numbers as 64-bit integers, clipped to their range."""
    try:
        return np.array(numbers, np.int64)
    except OverflowError:
        return np.array([max(-(2**63), min(2**63 - 1, number)) for number in numbers], np.int64)


def _categories(
    events: list[Event], stream: NDArray[np.int64], categories: Numbers
) -> NDArray[np.int32]:
    numbers = np.array([categories[event.cat] for event in events], np.int32)
    if "" in categories:
        for at in np.flatnonzero((numbers == categories[""]) & (stream >= 0)):
            copies = events[at].name.lower().startswith(("memcpy", "memset"))
            numbers[at] = categories[MEMORY_OF_STREAM if copies else KERNEL_OF_STREAM]
    return numbers


def _starts_ns(events: list[Event], batch: Batch, indices: list[int]) -> NDArray[np.int64]:
    """Return start times, read from the text if a float of µs is too coarse for ns."""
    times = [event.ts for event in events]
    if any(isinstance(time, float) and abs(time) >= EXACT_BELOW_US for time in times):
        try:
            exact = exact_starts_ns(batch.text)
        except ValueError:
            return _ns(times)
        return _whole([exact[index] or 0 for index in indices])
    return _ns(times)


def _ns(times_us: list[Any]) -> NDArray[np.int64]:
    """Convert µs, integer or not, to ns, clipped to 64 bits."""
    us = np.array(times_us)
    if not len(us):
        return np.zeros(0, np.int64)
    if us.dtype.kind == "i" and abs(us).max() < _CLIPPED_US:
        return us.astype(np.int64) * 1000
    if us.dtype.kind == "f" and all(
        type(time) is float or abs(time) < EXACT_BELOW_US for time in times_us
    ):
        return np.rint(np.clip(us, -_CLIPPED_US, _CLIPPED_US) * 1000).astype(np.int64)
    return np.array(
        [round(max(-_CLIPPED_US, min(_CLIPPED_US, time)) * 1000) for time in times_us], np.int64
    )
