"""Finding the files of a trace: which folder, which segments can be read, and what is wrong with the others."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from disttrain_cli.analysis.formats import RECORD
from disttrain_cli.errors import DataError, SpecError
from disttrain_cli.spec.trace import LATER_COLUMNS, SIZE_COLUMNS, STEP_COLUMNS, TRACE_COLUMNS, Job, read_job


@dataclass
class TraceFiles:
    """Readable segments of one or several trace folders, the job they describe, and what had to be left out."""

    segments: list[Path] = field(default_factory=list)
    steps: list[Path] = field(default_factory=list)
    sizes: list[Path] = field(default_factory=list)
    job: Job | None = None
    warnings: list[str] = field(default_factory=list)
    rows: int = 0  # of all segments

    @property
    def all(self) -> list[Path]:
        return [*self.segments, *self.steps, *self.sizes]


def find_traces(paths: list[Path]) -> TraceFiles:
    """Look through folders (a run's folder or its `traces` folder) for readable segments.

    Several folders are parts of one job's trace, each with ranks of its own (hosts without a shared disk).

    Raises:
        DataError: a path does not exist, or no segment with rows can be read in any of them.
    """
    found = TraceFiles()
    problems: list[str] = []
    ranks: set[str] = set()
    for path in paths:
        if not path.is_dir():
            raise DataError(
                f"There is no trace folder at {path}",
                "a folder with rank-*/segment-*.parquet is needed",
                RECORD,
            )
        folder = path / "traces" if (path / "traces").is_dir() else path
        again = sorted({file.parent.name for file in folder.glob("rank-*/segment-*.parquet")} & ranks)
        if again:
            problems.append(
                f"{path} holds {again[0]} once more, so it is another job and left out; "
                "set two jobs side by side with --compare"
            )
            continue
        _read_job(folder, found)
        before = len(found.segments)
        for file in sorted(folder.glob("rank-*/segment-*.parquet")):
            found.rows += _keep_if_readable(file, folder, TRACE_COLUMNS, found.segments, problems)
        for kind, columns, kept in (("steps", STEP_COLUMNS, found.steps), ("sizes", SIZE_COLUMNS, found.sizes)):
            for file in sorted(folder.glob(f"{kind}/segment-*.parquet")):
                _keep_if_readable(file, folder, columns, kept, problems)
        ranks |= {file.parent.name for file in found.segments[before:]}
        if len(found.segments) == before:
            problems.append(f"{path} holds no readable trace segment")
    if not found.segments:
        raise DataError(
            f"No trace can be read in {', '.join(str(path) for path in paths)}", "; ".join(problems[:5]), RECORD
        )
    found.warnings += problems[:5]
    if len(problems) > 5:
        found.warnings.append(f"{len(problems) - 5} more trace file(s) could not be read")
    return found


def _read_job(folder: Path, found: TraceFiles) -> None:
    if found.job is not None:
        return
    try:
        found.job = read_job(folder / "job.json")
    except SpecError as error:
        found.warnings.append(f"{error.what}: no MFU, no prediction and no plan can be shown beside the trace")


def _keep_if_readable(
    file: Path, folder: Path, columns: dict[str, str], kept: list[Path], problems: list[str]
) -> int:
    """Add `file` to `kept` when its footer can be read, its columns are there and it has rows; how many of them."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    name = file.relative_to(folder)
    try:
        with pq.ParquetFile(file) as parquet:
            missing = [column for column in columns
                       if column not in LATER_COLUMNS and column not in parquet.schema_arrow.names]
            rows = parquet.metadata.num_rows
    except (OSError, pa.ArrowException):
        problems.append(f"{name} is empty or half-written; skipped")
        return 0
    if missing:
        problems.append(f"{name} lacks the column(s) {', '.join(missing[:4])}; skipped")
        return 0
    if rows:
        kept.append(file)
    return rows
