"""Detection of the format of traces in a path.

Formats are disttrain's Parquet segments, Kineto/Chrome JSON, operations in Parquet, and dumps of
PyTorch's flight recorder, which are no traces.
"""

from __future__ import annotations

import gzip
import os
import zlib
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Literal, NamedTuple

from disttrain_cli.analysis.figures import counted
from disttrain_cli.analysis.flight.dumps import MOST_BYTES, is_pickled_dump, rank_of
from disttrain_cli.analysis.json_members import Members
from disttrain_cli.calls import call
from disttrain_cli.errors import DataError

RECORD = f"Record a trace with: {call('train')}"
Format = Literal["disttrain", "kineto", "operations", "flight recorder"]
JSON_ENDINGS = (".json", ".json.gz")
#: Files of a run's folder that are no traces.
_NO_TRACE = frozenset({"job.json", "profile.json", "index.parquet"})
#: Columns that a Parquet file of operations must have.
_OF_OPERATIONS = frozenset({"dp_rank", "stage", "optype", "duration"})
Content = Literal["own trace", "trace", "dump", "other"]
#: Top-level keys of Chrome traces; nested arguments and headers may have any key of a dump.
_OF_TRACES = frozenset({b"traceEvents", b"schemaVersion", b"deviceProperties", b"distributedInfo"})
_OF_CHROME = frozenset({b"displayTimeUnit", b"baseTimeNanoseconds"})
#: Key before the events of disttrain traces in Chrome JSON (`analyze --perfetto`).
_OWN_CHROME = b"disttrain"
#: Top-level keys of a dump: every dump has the version; one without operations has no entries.
_ENTRIES, _VERSION = b"entries", b"version"
_OF_GROUPS = frozenset({b"pg_config", b"pg_status"})
_READ_BYTES = 2**16


_FORMATS: dict[Content, Format] = {
    "own trace": "disttrain",
    "trace": "kineto",
    "other": "kineto",
    "dump": "flight recorder",
}


class Traces(NamedTuple):
    """Format of the traces, and their files.

    The files of disttrain traces are the paths themselves, which their reader searches.
    """

    format: Format
    files: list[Path]
    said: list[str]  # files that were skipped, and why


def find_format(paths: list[Path]) -> Traces:
    """Return the format and files of the traces in the paths.

    Raises:
        DataError: a path does not exist, the paths hold different formats, or none of their files
            can be read.
    """
    by_format: dict[Format, list[Path]] = {}
    said: list[str] = []
    for path in paths:
        kind, files, about = _look(path)
        said += about
        by_format.setdefault(kind, []).extend(
            file for file in files if file not in by_format.get(kind, [])
        )
    if len(by_format) > 1:
        raise DataError(
            "These traces are of different formats",
            " and ".join(sorted(by_format)),
            "Analyse one at a time.",
        )
    kind, files = next(iter(by_format.items()))
    if not files:
        raise DataError(
            "No readable trace here",
            "; ".join(said[:5]),
            "Make the files readable, or pass others.",
        )
    return Traces(kind, files, said)


def files_of(trace_format: Format, paths: list[Path]) -> list[Path]:
    """Return every file that the analysis of these paths depends on.

    Args:
        trace_format: format of the traces.
        paths: `Traces.files` of `find_format`.
    """
    if trace_format == "disttrain":
        folders = [
            (path / "traces" if (path / "traces").is_dir() else path).resolve() for path in paths
        ]
        return sorted(
            file
            for folder in folders
            for file in (folder.rglob("*") if folder.is_dir() else [folder])
            if file.is_file()
        )
    if trace_format == "kineto":
        from disttrain_cli.analysis.kineto.kernels import users_patterns

        return [*paths, *(file for file in [users_patterns()] if file.is_file())]
    return paths


def _look(path: Path) -> Traces:
    rank = path.parent if path.name.startswith("segment-") else path
    if rank.name.startswith("rank-") and any(rank.glob("segment-*")):
        raise DataError(
            f"{path} is one rank's part of a run's traces",
            "a step can only be analysed with all of its ranks",
            f"Analyse the run: {call('analyze', rank.resolve().parent)}",
        )
    if path.is_dir():
        return _look_through(path)
    if not path.exists():
        raise DataError(
            f"There is no trace folder or file at {path}",
            "a run's folder, Kineto/Chrome JSON files (or .gz) or Parquet files of operations are"
            " needed",
            RECORD,
        )
    if path.suffix == ".parquet":
        return Traces("operations", [path], [])
    try:
        return Traces(_FORMATS[_content(path)], [path], [])
    except OSError as error:
        return Traces("kineto", [], [_unreadable(path, error)])


def _look_through(folder: Path) -> Traces:
    """Return the traces in a folder: a run's own, operations in Parquet, or JSON, in this order."""
    if any(
        any(path.glob("rank-*/segment-*")) or (path / "job.json").is_file()
        for path in (folder, folder / "traces")
    ):
        return Traces("disttrain", [folder], [])
    runs = sorted(file.parent.parent for file in folder.glob("*/traces/job.json"))
    if runs:
        raise DataError(
            f"{folder} contains no trace itself, but the traces of {counted(len(runs), 'run')}",
            ", ".join(str(run) for run in runs[:5]),
            f"Pass one of them: {call('analyze', runs[0])}",
        )
    said: list[str] = []
    files: dict[Content, list[Path]] = {"own trace": [], "trace": [], "dump": [], "other": []}
    for file in _possible(folder, said):
        try:
            content = _content(file)
        except OSError as error:
            said.append(_unreadable(file, error))
            continue
        if file.name.endswith(JSON_ENDINGS) or content == "dump":
            files[content].append(file)
    ours, foreign = files["own trace"], sorted([*files["trace"], *files["other"]])
    if dumps := files["dump"]:
        others = [*ours, *foreign, *sorted(folder.glob("*.parquet"))]
        said += _left_out(others, "the flight recorder's dumps are analysed")
        return Traces("flight recorder", dumps, said)
    tables = sorted(file for file in folder.glob("*.parquet") if file.name not in _NO_TRACE)
    holds = {file: _holds_operations(file) for file in tables}
    of_operations = [file for file, are in holds.items() if are is not False]
    others = files["trace"] + ours
    if any(holds.values()) or (tables and not others):
        return Traces(
            "operations",
            of_operations or tables,
            [*said, *_left_out(others, "operations in Parquet files are analysed")],
        )
    if foreign and (others != ours or not ours):
        return Traces(
            "kineto",
            foreign,
            [
                *said,
                *_left_out(ours, "they are disttrain traces exported as Chrome JSON"),
                *_left_out(tables, "they contain no operations of a job"),
            ],
        )
    if ours:
        return Traces(
            "disttrain", ours[:1], [*said, *_left_out(ours[1:], f"{ours[0].name} is analysed")]
        )
    return Traces("kineto", [], said) if said else Traces("disttrain", [folder], [])


def _left_out(files: list[Path], why: str) -> list[str]:
    if not files:
        return []
    more = f" and {counted(len(files) - 1, 'more file')}" if len(files) > 1 else ""
    return [
        f"{files[0].name}{more} in the same folder left out ({why}); pass the files to have them"
        " analysed"
    ]


def _possible(folder: Path, said: list[str]) -> list[Path]:
    """Return the folder's files that may be traces or dumps by their names.

    These are JSON files, also in subfolders, and files of the folder itself with a rank in the
    name. Folders that cannot be listed are appended to `said`.
    """
    files: list[Path] = []

    def skip(error: OSError) -> None:
        said.append(f"{error.filename} cannot be listed ({error.strerror}); left out")

    for path, folders, names in os.walk(folder, onerror=skip):
        folders.sort()
        files += [
            file
            for file in (Path(path) / name for name in names if name not in _NO_TRACE)
            if file.name.endswith(JSON_ENDINGS)
            or (file.parent == folder and rank_of(file) is not None and file.is_file())
        ]
    return sorted(file for file in files if file.is_symlink() or file.is_file())


def _content(file: Path) -> Content:
    """Return a file's kind by the top-level keys of its JSON, in any order, or as a pickle."""
    chunks = _chunks(file)
    first = next(chunks, b"")
    if first.startswith(b"\x80"):
        return "dump" if is_pickled_dump(first, chunks) else "other"
    members = Members(chain((first,), chunks))
    if members.begins == b"[":
        return "trace"
    keys: set[bytes] = set()
    for key in members:
        if key == _OWN_CHROME:
            return "own trace"
        if key in _OF_TRACES:
            return "trace"
        keys.add(key)
    if keys & _OF_CHROME:
        return "trace"
    cut = _ENTRIES in keys and not members.ended
    return "dump" if cut or (_VERSION in keys and keys & {_ENTRIES, *_OF_GROUPS}) else "other"


def _chunks(file: Path) -> Iterator[bytes]:
    """Yield a file's decompressed bytes, up to the size of a dump or up to where it is damaged."""
    with file.open("rb") as source:
        packed = source.peek(2).startswith(b"\x1f\x8b")
        content = gzip.GzipFile(fileobj=source) if packed else source
        length = 0
        try:
            while length <= MOST_BYTES and (chunk := content.read1(_READ_BYTES)):
                length += len(chunk)
                yield chunk
        except (EOFError, zlib.error, gzip.BadGzipFile):
            return  # the reader uses the intact part


def _unreadable(file: Path, error: OSError) -> str:
    return f"{file.name} cannot be read ({error.strerror}); left out"


def _holds_operations(file: Path) -> bool | None:
    """Return True if a Parquet file has the columns of operations; None if it cannot be read."""
    import duckdb

    from disttrain_cli.analysis.sql import connect, literals, no_glob

    try:
        rows = (
            connect()
            .execute(f"SELECT name FROM parquet_schema({literals([file], no_glob)})")
            .fetchall()
        )
    except duckdb.Error:
        return None
    return {name for (name,) in rows} >= _OF_OPERATIONS
