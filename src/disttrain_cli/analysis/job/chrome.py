"""Export of disttrain's traces as Chrome JSON, which ui.perfetto.dev and chrome://tracing show.

One process per unit, one thread per rank; arrows from the send to the receive that waited for it;
counters of the ranks that compute, of memory, loss and MFU. Times are µs after
`baseTimeNanoseconds` (Unix time), as in Kineto's files, so that both can be shown together. All
else is in the header, so that `unpacking` can read the file back. Limits: as many measured steps as
fit into `MOST_EVENTS`, from the first on; a receive from several ranks has one arrow, from the last
sender.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from disttrain_cli.analysis.job.database import Database
from disttrain_cli.analysis.job.unpacking import PLACE, VERSION
from disttrain_cli.analysis.result.verdicts import LANE, Place
from disttrain_cli.analysis.sql import query_text
from disttrain_cli.spec.progress import Progress, silent
from disttrain_cli.spec.whole import whole_file

#: Most events in a file; Perfetto's page reads about this many (300 MB) without trouble.
MOST_EVENTS = 2_000_000
EVENTS_PER_ROW = 2.2  # rows plus arrows and counters
ROWS_AT_ONCE = 100_000


@dataclass(frozen=True)
class ChromeTrace:
    """Summary of the file that was written."""

    path: str
    steps: list[int]
    events: int
    steps_left_out: int


def write_chrome_trace(
    database: Database, out: Path, progress: Progress = silent, most_events: int = MOST_EVENTS
) -> ChromeTrace:
    """Write measured steps to `out` (compressed if its name ends in .gz), as `whole_file` does.

    Raises:
        SpecError: the file cannot be written.
    """
    steps = database.query("chrome_steps")
    chosen = _fitting([step for step in steps if step["measured"]] or steps, most_events)
    events = 0
    with (
        whole_file(out) as file,
        _packed(file) if out.name.endswith(".gz") else nullcontext(file) as lines,
    ):
        origin = min((step["first_ns"] for step in chosen), default=0)
        lines.write(
            f'{{"displayTimeUnit": "ms", "disttrain": {_header(database, chosen)}, '
            f'"baseTimeNanoseconds": {origin}, "traceEvents": [\n'.encode()
        )
        for line in _lines(database, chosen, origin, progress):
            lines.write(((",\n" if events else "") + line).encode())
            events += 1
        lines.write(b"\n]}\n")
    return ChromeTrace(
        str(out), [step["step"] for step in chosen], events, len(steps) - len(chosen)
    )


def _packed(file: BinaryIO) -> gzip.GzipFile:
    return gzip.GzipFile("", "wb", compresslevel=4, fileobj=file)


def _fitting(steps: list[dict[str, Any]], most_events: int) -> list[dict[str, Any]]:
    """Return the first steps that fit, at least one."""
    fitting: list[dict[str, Any]] = []
    events = 0.0
    for step in steps:
        events += EVENTS_PER_ROW * step["rows"]
        if fitting and events > most_events:
            break
        fitting.append(step)
    return fitting


def _lines(
    database: Database, steps: list[dict[str, Any]], origin: int, progress: Progress
) -> Iterator[str]:
    """Yield every event as one line of JSON."""
    yield from map(json.dumps, _names(database))
    yield from map(json.dumps, _per_step(steps, origin))
    text, first_id, done = query_text("chrome_trace"), 0, 0
    for batch in _batches(steps):
        cursor = database.connection.execute(
            text, {"steps": batch, "origin": origin, "first_id": first_id}
        )
        while rows := cursor.fetchmany(10_000):
            yield from (row[0] for row in rows)
        first_id += sum(step["rows"] for step in steps if step["step"] in batch)
        done += len(batch)
        progress("writing steps", done, len(steps))


def _header(database: Database, chosen: list[dict[str, Any]]) -> str:
    """Return, as JSON, what `unpacking` needs in addition to the events."""
    steps = {"steps": [step["step"] for step in chosen]}

    def rows(query: str) -> Any:  # NaN and infinity become null
        text = database.connection.execute(
            f"SELECT coalesce(to_json(list(s)), '[]') FROM ({query}) s", steps
        )
        return json.loads(text.fetchall()[0][0], parse_constant=lambda name: None)

    return json.dumps(
        {
            "version": VERSION,
            "name": database.name,
            "job": None if database.job is None else database.job.model_dump(mode="json"),
            "ranks": rows(
                f"SELECT rank, {', '.join(f'any_value({name}) AS {name}' for name in PLACE)} FROM"
                " seen WHERE list_contains($steps, step) GROUP BY rank ORDER BY rank"
            ),
            "windows": rows(
                "SELECT * REPLACE (measured AND list_contains($steps, step) AS measured) FROM"
                " windows ORDER BY step"
            ),
            "steps": rows("FROM steps WHERE list_contains($steps, step) ORDER BY step"),
            "sizes": rows("FROM sizes WHERE list_contains($steps, step) ORDER BY step"),
            "experts": rows("FROM experts WHERE list_contains($steps, step) ORDER BY step, layer"),
            "samples": rows(
                "SELECT s.* FROM sample_segments s JOIN kept USING (step, run) "
                "WHERE list_contains($steps, step) ORDER BY step"
            ),
        }
    )


def _names(database: Database) -> Iterable[dict[str, Any]]:
    """Yield the names of processes and threads, in the order of the pipeline."""
    threads = database.query("chrome_threads")
    for index, unit in sorted({(row["place"], row["unit"]) for row in threads}):
        yield _meta("process_name", index, 0, {"name": unit})
        yield _meta("process_sort_index", index, 0, {"sort_index": index})
    for row in threads:
        name = Place(**{part: row[part] for part in LANE}).lane
        yield _meta("thread_name", row["place"], row["rank"], {"name": name})
        yield _meta("thread_sort_index", row["place"], row["rank"], {"sort_index": row["sorted"]})


def _meta(name: str, pid: int, tid: int, args: dict[str, Any]) -> dict[str, Any]:
    return {"ph": "M", "name": name, "pid": pid, "tid": tid, "ts": 0, "args": args}


#: Process of events that belong to no unit.
_JOB = 1_000_000


def _per_step(steps: list[dict[str, Any]], origin: int) -> Iterable[dict[str, Any]]:
    """Yield a bar per step, and loss and MFU as counters."""
    yield _meta("process_name", _JOB, 0, {"name": "job"})
    yield _meta("process_sort_index", _JOB, 0, {"sort_index": -1})
    yield _meta("thread_name", _JOB, 0, {"name": "steps"})
    for step in steps:
        at = (step["start_ns"] - origin) / 1e3
        yield {
            "ph": "X",
            "name": f"step {step['step']}",
            "cat": "iteration",
            "pid": _JOB,
            "tid": 0,
            "ts": at,
            "dur": (step["end_ns"] - step["start_ns"]) / 1e3,
            "args": {"step": step["step"]},
        }
        for name in ("loss", "mfu"):
            if step[name] is not None:
                yield {"ph": "C", "name": name, "pid": _JOB, "ts": at, "args": {name: step[name]}}


def _batches(steps: list[dict[str, Any]]) -> Iterator[list[int]]:
    """Yield the steps whose rows are queried together."""
    batch, rows = [], 0
    for step in steps:
        batch.append(step["step"])
        rows += step["rows"]
        if rows >= ROWS_AT_ONCE:
            yield batch
            batch, rows = [], 0
    if batch:
        yield batch
