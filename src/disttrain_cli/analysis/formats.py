"""What kind of traces a path holds: own Parquet segments, Kineto/Chrome JSON, or operations as Parquet."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from disttrain_cli.errors import DataError

RECORD = "Record a trace with: disttrain train"
Format = Literal["disttrain", "kineto", "operations"]
JSON_ENDINGS = (".json", ".json.gz")
#: What lies in a run's folder and is no trace.
_NO_TRACE = frozenset({"job.json", "profile.json", "index.parquet"})


def find_format(paths: list[Path]) -> tuple[Format, list[Path]]:
    """The one format of all paths, and its files (of own traces, whose reader looks itself, the paths).

    Raises:
        DataError: a path does not exist, or the paths hold different formats.
    """
    found: dict[Format, list[Path]] = {}
    for path in paths:
        kind, files = _look(path)
        found.setdefault(kind, []).extend(file for file in files if file not in found.get(kind, []))
    if len(found) > 1:
        raise DataError("These traces are of different formats", " and ".join(sorted(found)),
                        "Analyse one at a time.")
    return next(iter(found.items()))


def files_of(found: Format, paths: list[Path]) -> list[Path]:
    """Every file on which the analysis of these paths, as `find_format` gave them, depends."""
    if found == "disttrain":
        folders = [(path / "traces" if (path / "traces").is_dir() else path).resolve() for path in paths]
        return sorted(file for folder in folders for file in folder.rglob("*") if file.is_file())
    if found == "kineto":
        from disttrain_cli.analysis.kineto.kernels import users_patterns

        return [*paths, *(file for file in [users_patterns()] if file.is_file())]
    return paths


def _look(path: Path) -> tuple[Format, list[Path]]:
    if path.is_file():
        return ("operations" if path.suffix == ".parquet" else "kineto"), [path]
    if not path.is_dir():
        raise DataError(
            f"There is no trace folder or file at {path}",
            "a run's folder, Kineto/Chrome JSON files (or .gz) or Parquet files of operations are needed",
            RECORD,
        )
    if (path / "traces").is_dir() or any(path.glob("rank-*/segment-*")):
        return "disttrain", [path]
    operations = sorted(file for file in path.glob("*.parquet") if file.name not in _NO_TRACE)
    if operations:
        return "operations", operations
    traces = sorted(file for file in path.rglob("*")
                    if file.name.endswith(JSON_ENDINGS) and file.name not in _NO_TRACE and file.is_file())
    return ("kineto", traces) if traces else ("disttrain", [path])
