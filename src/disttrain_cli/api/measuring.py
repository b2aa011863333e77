"""Costs: `profile`, and `calibrate`, which corrects a profile by a recorded run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from disttrain_cli.api.opening import Note, ignore, not_over, open_run, path_of
from disttrain_cli.calls import DEFAULT_RUN_FILE, call
from disttrain_cli.errors import UsageError
from disttrain_cli.spec.progress import Progress, silent

if TYPE_CHECKING:
    from disttrain_cli.profiling.calibrate import Change
    from disttrain_cli.spec.profile import Profile
    from disttrain_cli.spec.runfile import Run


@dataclass(frozen=True)
class ProfileResult:
    """The measured or computed costs, and the file that holds them."""

    profile: Profile
    path: Path
    passes: str = ""  # passes over the data in training, a sentence; empty if not one number


@dataclass(frozen=True)
class CalibrateResult:
    """A profile corrected by traces, its file, and the changes."""

    profile: Profile
    path: Path
    before: Path | None  # new path of the previous profile, if there was one
    changes: list[Change]
    notes: list[str]


def check_device_name(device: str) -> None:
    """Raise UsageError if no device has this name."""
    from disttrain_cli.spec.runfile.cluster import DEVICE

    if not DEVICE.allows(device):
        raise UsageError(
            f"There is no device {device!r}",
            f"allowed: {DEVICE.words}",
            call("profile", help=True),
        )


def profile(
    run: Run | Path | str = DEFAULT_RUN_FILE,
    *,
    device: str = "auto",
    reindex: bool = False,
    out: Path | str | None = None,
    progress: Progress = silent,
    note: Note = ignore,
) -> ProfileResult:
    """Measure the cost of every module, link and sample, and write `profile.json`.

    For a device of the hardware catalogue, all costs but preprocessing are computed instead.

    Args:
        device: "auto", "cpu", "cuda", or "analytic:NAME" for a device of the hardware catalogue.
        reindex: read all shards again, even if some changed since they were indexed.
        out: file to write instead of the one in the run's folder.

    Raises:
        UsageError: no such device, or `out` is one of the files that are read. Others as
            `profiling.measure`.
    """
    check_device_name(device)
    opened = open_run(run)
    target = path_of(out)
    not_over(target, opened.path, opened.dir.index)
    from disttrain_cli.profiling.budget import Meter

    meter = Meter()
    from disttrain_cli.data.tokenizer import doubtful_template
    from disttrain_cli.models.adapters import check_adapters
    from disttrain_cli.models.graph import layer_table
    from disttrain_cli.models.weights import starting_weights
    from disttrain_cli.profiling.measure import measure
    from disttrain_cli.spec.whole import write_whole

    stated = opened.file.cluster.device
    if device != "auto" and stated not in ("auto", device):
        note(f"cluster.device is {stated}; this profile, and plans from it, are of {device}.")
    layer_table(opened)  # errors in the model are raised before the data is read
    adapters = check_adapters(opened, opened.file.model.order)
    for sentence in starting_weights(opened) + adapters + doubtful_template(opened):
        note(sentence)
    if reindex:
        _reindex(opened, progress)
    costs = measure(opened, device, progress, meter)
    path = write_whole(target or opened.dir.profile, costs.model_dump_json(indent=2) + "\n")
    return ProfileResult(costs, path, passes_of(opened, costs))


def _reindex(run: Run, progress: Progress) -> None:
    """Rebuild the index; the old one stays until the new one is complete."""
    from disttrain_cli.data.indexing.building import build_index
    from disttrain_cli.data.indexing.shard_files import drop_files
    from disttrain_cli.models.graph import describe

    drop_files(run)
    build_index(run, describe(run), progress)


def calibrate(
    recorded: Path | str,
    run: Run | Path | str = DEFAULT_RUN_FILE,
    *,
    out: Path | str | None = None,
) -> CalibrateResult:
    """Correct the profile of a recorded run, real or rehearsed, by its traces, and write it.

    Args:
        recorded: the run's folder.
        out: file to write instead of the one in the folder of `run`.

    Raises:
        DataError, MismatchError: as `profiling.calibrate.calibrate`.
        UsageError: `out` is one of the files that are read.
    """
    opened, target = open_run(run), path_of(out)
    not_over(target, opened.path, opened.dir.index)
    from disttrain_cli.profiling.calibrate import calibrate as correct
    from disttrain_cli.spec.whole import keep_before, write_whole

    made = correct([Path(recorded)], opened)
    path = target or opened.dir.profile
    before = keep_before(path)
    write_whole(path, made.profile.model_dump_json(indent=2) + "\n")
    return CalibrateResult(made.profile, path, before, made.changes, made.notes)


def passes_of(run: Run, profile: Profile, steps: int | None = None) -> str:
    """Return the number of passes of training over the data, as a sentence.

    It is empty where phases of the data differ, or the data is a named distribution.
    """
    train, given, data = run.file.train, run.file.data, profile.data
    train.count_epochs(data.sequences)
    if given.distribution is not None or given.curriculum:
        return ""
    steps, batch = steps or train.total_steps, train.global_batch_size
    passes = f"{steps * batch / data.sequences:,.3g} passes over {data.sequences:,} sequences"
    weights = data.phase_at(0).weights
    if any(weight != 1 for weight in weights):
        drawn = ", ".join(
            f"{name} × {weight:g}" for name, weight in zip(given.names, weights, strict=False)
        )
        passes += f" (in one, sources are drawn by weight: {drawn})"
    return f"Training {steps:,} steps × {batch:,} = {passes}"
