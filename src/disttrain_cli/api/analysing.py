"""Analysis of traces: `analyze`, `sql`, `watch`, Perfetto export, hangs and conditions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from disttrain_cli.api.opening import check_number, name_run, not_over, open_run, path_of
from disttrain_cli.calls import DEFAULT_RUN_FILE, call
from disttrain_cli.errors import DataError, UsageError
from disttrain_cli.naming import run_file_beside, with_named
from disttrain_cli.spec.progress import Progress, silent

if TYPE_CHECKING:
    import pyarrow

    from disttrain_cli.analysis.compare import Change, Times
    from disttrain_cli.analysis.flight.verdict import Dumped
    from disttrain_cli.analysis.job.chrome import ChromeTrace
    from disttrain_cli.analysis.result.summary import Analysis
    from disttrain_cli.analysis.watching.looking import Look
    from disttrain_cli.spec.rundir import RunDir


@dataclass(frozen=True)
class AnalyzeResult:
    """The analysis of the traces, the report page, and the changes against an earlier run."""

    analysis: Analysis
    report: Path | None  # None where the traces are not in a run's folder and no file was named
    changes: list[Change]
    times: Times | None  # step times of both runs; None where no other run was named


def analyze(
    *paths: Path | str,
    html: Path | str | None = None,
    compare: Path | str | None = None,
    progress: Progress = silent,
) -> AnalyzeResult:
    """Explain a run from its traces, and write the report page.

    Args:
        paths: run folders, folders of run files, trace folders, or traces of any PyTorch job
            (Kineto); if none is given, the run of ./disttrain.yaml.
        html: file for the report page, instead of the one in the run's folder.
        compare: an earlier run to compare this one with.

    Raises:
        DataError: nothing in a path can be read, or the paths are of different formats.
        UsageError: `html` is one of the paths.
    """
    named, folders = _named(paths)
    page, earlier = path_of(html), None if compare is None else folder_of(compare)
    not_over(page, *folders)
    from disttrain_cli.analysis import analyze as analysing
    from disttrain_cli.analysis.compare import compare as changes_between
    from disttrain_cli.analysis.compare import compare_times
    from disttrain_cli.analysis.sampled import samples_of
    from disttrain_cli.spec.rundir import RunDir, run_folder

    # before the traces are opened: DuckDB opens a file only once per process
    samples = [samples_of(of, progress) for of in ([earlier], folders)] if earlier else []
    analysis, pictures = analysing.analyze_open(folders, progress)
    analysis = _with_named(analysis, named)
    root = run_folder(folders[0])
    report = page or (root and RunDir(root).report)
    if report is not None:
        from disttrain_cli.analysis.report import write_report

        write_report(analysis, pictures(), samples_in(RunDir(root)) if root else [], report)
    if earlier is None:
        return AnalyzeResult(analysis, report, [], None)
    return AnalyzeResult(
        analysis,
        report,
        changes_between(analysing.analyze([earlier]), analysis),
        compare_times(*samples),
    )


def _named(paths: Sequence[Path | str]) -> tuple[list[Path], list[Path]]:
    """Return the paths, and the folders to read: the run of ./disttrain.yaml if none is given."""
    named = [folder_of(path) for path in paths]
    if not named:
        return [], [open_run().dir.root]
    name_run(run_file_beside(named[0]), named)
    return named, named


def folder_of(path: Path | str) -> Path:
    """Return a path of traces; that of a run file's folder is its run's.

    Raises:
        SpecError: the run file is wrong.
    """
    from disttrain_cli.spec.runfile import read_run

    folder = Path(path)
    if not (folder / DEFAULT_RUN_FILE).is_file():
        return folder
    run = read_run(folder / DEFAULT_RUN_FILE)
    return folder / run.dir.root.relative_to(run.folder)  # as typed


def sql(query: str, *paths: Path | str, progress: Progress = silent) -> pyarrow.Table:
    """Run one SELECT over the documented views of traces (docs/traces.md), read-only.

    Args:
        paths: as for `analyze`.

    Raises:
        DataError: as for `analyze`.
        UsageError: the query is not one SELECT statement, or DuckDB refuses it.
    """
    _, folders = _named(paths)
    from disttrain_cli.analysis.analyze import ask_for
    from disttrain_cli.analysis.sql import arrow

    return ask_for(arrow, folders, query, progress)


def write_perfetto(
    *paths: Path | str, file: Path | str, progress: Progress = silent
) -> ChromeTrace:
    """Write a run's traces as Chrome JSON for ui.perfetto.dev.

    Args:
        paths: run folders; if none is given, the run of ./disttrain.yaml.
        file: file to write; it is compressed where its name ends in .gz.

    Raises:
        DataError: as for `analyze`.
        UsageError: the paths hold other traces, or `file` is one of them.
    """
    _, folders = _named(paths)
    target = Path(file)
    not_over(target, *folders)
    from disttrain_cli.analysis.formats import find_format
    from disttrain_cli.analysis.job.chrome import write_chrome_trace
    from disttrain_cli.analysis.job.database import open_database

    if find_format(folders).format != "disttrain" or any(path.is_file() for path in folders):
        raise UsageError(
            "Only a run's traces can be exported as Chrome JSON",
            "given: traces outside of a run's folder",
            "Files of Chrome JSON are that already: open them in ui.perfetto.dev",
        )
    return write_chrome_trace(open_database(folders), target, progress)


def explain_hang(*paths: Path | str) -> Dumped:
    """Find the collective in which a job hangs and the ranks that are missing there.

    The sources are the dumps of PyTorch's flight recorder.

    Args:
        paths: the dumps or their folder, `logs/flight-recorder` of a run.

    Raises:
        DataError: they contain no dumps.
    """
    from msgspec.structs import replace as replaced

    from disttrain_cli.analysis.flight.verdict import analyze_dumps
    from disttrain_cli.analysis.formats import find_format

    _, folders = _named(paths)
    found = find_format(folders)
    if found.format != "flight recorder":
        raise DataError(
            "These are not dumps of PyTorch's flight recorder",
            f"given: {', '.join(map(str, paths)) or 'no path'}",
            f"Analyse traces with: {call('analyze')}",
        )
    dumped = analyze_dumps(found.files)
    return replaced(dumped, warnings=[*found.said, *dumped.warnings])


def holds(analysis: Analysis, condition: str) -> tuple[bool, str]:
    """Evaluate a condition on an analysis, such as "job.bubble_fraction > 30 %".

    Returns its value and a sentence that explains it.

    Raises:
        UsageError: it is not a condition, or it names a figure that was not measured.
    """
    from disttrain_cli.analysis.expressions import holds as evaluate

    return evaluate(analysis, condition)


def look(run: Path | str | None = None, *, steps: int | None = None) -> Look:
    """Judge the last steps of a run once; the run may be over.

    Args:
        run: its folder, or that of a rehearsal; if none is given, the run of ./disttrain.yaml.
        steps: number of steps to judge.

    Raises:
        DataError: there is no such folder, or its traces contain nothing that can be judged.
        SpecError: its traces are of another version.
    """
    from disttrain_cli.analysis.watching.looking import STEPS, look_once

    check_number("steps", steps, 4, 32)
    named, root = _watched(run)
    return _renamed(look_once(root, steps or STEPS), named)


def watch(
    run: Path | str | None = None, *, steps: int | None = None, every_s: float | None = None
) -> Iterator[Look]:
    """Judge the last steps of a run repeatedly, until the run is over.

    Args:
        run, steps: as for `look`.
        every_s: minimum seconds between two looks; None: as often as looks use at most 0.5 % of
            this host's cores.

    Raises:
        DataError: there is no such folder.
        SpecError: its traces are of another version.
    """
    from disttrain_cli.analysis.watching.looking import STEPS, looks

    check_number("steps", steps, 4, 32)
    check_number("every_s", every_s, 0, whole=False)
    named, root = _watched(run)
    return (_renamed(one, named) for one in looks(root, steps or STEPS, every_s))


def _watched(run: Path | str | None) -> tuple[list[Path], Path]:
    """Return the folder as named, if it is, and the run's folder; DataError where there is none."""
    from disttrain_cli.spec.rundir import run_folder

    named, (folder,) = _named([] if run is None else [run])
    root = run_folder(folder) or folder
    if not root.is_dir():
        raise DataError(
            f"There is no run's folder at {folder}",
            "verdicts are based on the traces in it",
            f"Name a run's folder (runs/NAME), or start the run: {call('train')}",
        )
    return named, root


def _renamed(look: Look, paths: list[Path]) -> Look:
    return replace(look, analysis=_with_named(look.analysis, paths))


def samples_in(root: RunDir) -> list[Path]:
    """Return the files of the samples after the newest step: their list and their images."""
    from disttrain_cli.spec.samples import FILE, read_samples

    folder = max(
        (path for path in root.images.glob("step-*") if path.is_dir()), default=root.images
    )
    samples = read_samples(folder)
    if samples is None:
        return sorted(folder.glob("*.png"))
    return [folder / name for name in (FILE, *(one.file for one in samples.drawn), *samples.read)]


def _with_named(analysis: Analysis, paths: Sequence[Path]) -> Analysis:
    """Return the analysis with next commands that read the traces named by the user."""
    from msgspec.structs import replace

    def named(command: str) -> str:
        return with_named(command, traces=paths)

    return replace(
        analysis,
        verdict=replace(analysis.verdict, next_command=named(analysis.verdict.next_command)),
        causes=[
            replace(cause, next_command=named(cause.next_command)) for cause in analysis.causes
        ],
        remedies=[replace(one, command=named(one.command)) for one in analysis.remedies],
    )
