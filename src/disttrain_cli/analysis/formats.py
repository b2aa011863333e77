"""What kind of traces a path holds: own Parquet segments, Kineto/Chrome JSON, or operations as
Parquet; or dumps of PyTorch's flight recorder, which are no traces."""

from __future__ import annotations

import gzip
import os
import shlex
import zlib
from pathlib import Path
from typing import Literal, NamedTuple

from disttrain_cli.analysis.flight.dumps import is_dump, rank_of
from disttrain_cli.errors import DataError

RECORD = "Record a trace with: disttrain train"
Format = Literal["disttrain", "kineto", "operations", "flight recorder"]
JSON_ENDINGS = (".json", ".json.gz")
#: What lies in a run's folder and is no trace.
_NO_TRACE = frozenset({"job.json", "profile.json", "index.parquet"})
#: Columns without which a Parquet file holds no operations of a job.
_OF_OPERATIONS = frozenset({"dp_rank", "stage", "optype", "duration"})
#: Own traces that were written as Chrome JSON (`analyze --perfetto`) say so in their first bytes.
OWN_CHROME = b'"disttrain":'
_HEAD_BYTES = 4096


class Traces(NamedTuple):
    """The one format of all paths, and its files (of own traces, whose reader looks itself, the
    paths)."""

    format: Format
    files: list[Path]
    said: list[str]  # what had to be left out


def find_format(paths: list[Path]) -> Traces:
    """What the paths hold.

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
            "No trace can be read here",
            "; ".join(said[:5]),
            "Make the files readable, or name others.",
        )
    return Traces(kind, files, said)


def files_of(trace_format: Format, paths: list[Path]) -> list[Path]:
    """Every file on which the analysis of these paths, as `find_format` gave them, depends."""
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
        raise _one_rank(path, rank)
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
    head, problem = _head(path)
    if problem:
        return Traces("kineto", [], [problem])
    if is_dump(head):
        return Traces("flight recorder", [path], [])
    return Traces("disttrain" if OWN_CHROME in head else "kineto", [path], [])


def _look_through(folder: Path) -> Traces:
    """What a folder holds: a run's own traces, operations, or files of JSON, the first of these
    that is there."""
    if any(
        any(path.glob("rank-*/segment-*")) or (path / "job.json").is_file()
        for path in (folder, folder / "traces")
    ):
        return Traces("disttrain", [folder], [])
    runs = sorted(file.parent.parent for file in folder.glob("*/traces/job.json"))
    if runs:
        raise DataError(
            f"{folder} holds no trace of its own, but those of {len(runs)} run(s)",
            ", ".join(str(run) for run in runs[:5]),
            f"Name one of them: disttrain analyze {shlex.quote(str(runs[0]))}",
        )
    said: list[str] = []
    if dumps := _dumps(folder):
        beside = [*_json_files(folder, said), *sorted(folder.glob("*.parquet"))]
        others = [file for file in beside if file not in dumps]
        said += _left_out(others, "the flight recorder's dumps are analysed")
        return Traces("flight recorder", dumps, said)
    kinds: dict[bytes, list[Path]] = {OWN_CHROME: [], b"": []}
    for file in _json_files(folder, said):
        head, problem = _head(file)
        if problem:
            said.append(problem)
        else:
            kinds[OWN_CHROME if OWN_CHROME in head else b""].append(file)
    ours, foreign = kinds.values()
    tables = sorted(file for file in folder.glob("*.parquet") if file.name not in _NO_TRACE)
    holds = {file: _holds_operations(file) for file in tables}
    of_operations = [file for file, are in holds.items() if are is not False]
    beside = [file for file in foreign if _is_trace(file)] + ours
    if any(holds.values()) or (tables and not beside):
        return Traces(
            "operations",
            of_operations or tables,
            [*said, *_left_out(beside, "operations in Parquet files are analysed")],
        )
    if foreign and (beside != ours or not ours):
        return Traces(
            "kineto",
            foreign,
            [
                *said,
                *_left_out(ours, "they are own traces, written with --perfetto"),
                *_left_out(tables, "they hold no operations of a job"),
            ],
        )
    if ours:
        return Traces(
            "disttrain", ours[:1], [*said, *_left_out(ours[1:], f"{ours[0].name} is analysed")]
        )
    return Traces("kineto", [], said) if said else Traces("disttrain", [folder], [])


def _dumps(folder: Path) -> list[Path]:
    """The flight recorder's dumps in a folder: their names end in a rank."""
    return [
        file
        for file in sorted(folder.iterdir())
        if rank_of(file) is not None and file.is_file() and is_dump(_head(file)[0])
    ]


def _one_rank(path: Path, folder: Path) -> DataError:
    return DataError(
        f"{path} is one rank's part of a run's traces",
        "a step is understood from all of its ranks",
        f"Analyse the run: disttrain analyze {shlex.quote(str(folder.resolve().parent))}",
    )


def _left_out(files: list[Path], why: str) -> list[str]:
    if not files:
        return []
    more = f" and {len(files) - 1} more file(s)" if len(files) > 1 else ""
    return [
        f"{files[0].name}{more} in the same folder left out ({why}); name files to have them"
        " analysed"
    ]


def _json_files(folder: Path, said: list[str]) -> list[Path]:
    """Files of JSON in a folder and those inside it; folders that cannot be listed are said."""
    files: list[Path] = []

    def skip(error: OSError) -> None:
        said.append(f"{error.filename} cannot be listed ({error.strerror}); left out")

    for path, folders, names in os.walk(folder, onerror=skip):
        folders.sort()
        files += [
            Path(path) / name
            for name in names
            if name.endswith(JSON_ENDINGS) and name not in _NO_TRACE
        ]
    return sorted(file for file in files if file.is_symlink() or file.is_file())


def _head(file: Path) -> tuple[bytes, str]:
    """The first bytes of a file, unpacked, or why it cannot be read."""
    try:
        with file.open("rb") as source:
            head = source.read(_HEAD_BYTES)
        if head.startswith(b"\x1f\x8b"):
            with gzip.open(file) as unpacked:
                head = unpacked.read(_HEAD_BYTES)
        return head, ""
    except (EOFError, zlib.error, gzip.BadGzipFile):
        return b"", ""  # damaged: the reader takes what it can
    except OSError as error:
        return b"", f"{file.name} cannot be read ({error.strerror}); left out"


def _is_trace(file: Path) -> bool:
    head, _ = _head(file)
    return b"traceEvents" in head or head.lstrip().startswith(b"[")


def _holds_operations(file: Path) -> bool | None:
    """Whether a Parquet file has the columns of operations; None where it cannot be read."""
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
