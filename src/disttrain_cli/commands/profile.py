"""`disttrain profile`: costs of modules, links and samples, measured or from the catalogue."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from disttrain_cli.api import calibrate as correct
from disttrain_cli.api import open_run, profile
from disttrain_cli.api.measuring import check_device_name
from disttrain_cli.commands.common import (
    DEFAULT_RUN_FILE,
    JsonFlag,
    OutOption,
    QuietFlag,
    RunFileArgument,
    SetOption,
    next_command,
)
from disttrain_cli.console import Console
from disttrain_cli.errors import UsageError
from disttrain_cli.naming import short_path

if TYPE_CHECKING:
    from disttrain_cli.spec.profile import LinkTimes, Measuring, Profile

EPILOG = """Examples:

$ disttrain profile
$ disttrain profile demo/disttrain.yaml --device cpu
$ disttrain profile --device analytic:A800
$ disttrain profile --json --quiet > profile.json
$ disttrain profile --reindex
$ disttrain profile --calibrate runs/demo
$ disttrain profile --calibrate runs/demo/rehearsal

Builds the sample index, or reads new shards into it, then measures forward and backward of every
module for the sizes in the data. Shards that changed or were removed after they were indexed are
refused; with --reindex all are read again. Measuring stops at a budget: on a CPU 30 s of CPU time
of all processes, or a tenth of the training time if that is less (5 s at least); on GPUs 3
minutes. Start-up counts (on a CPU some 20 s of all processes); reading the data does not. Sizes
that span those of the data come first, with the smallest and a larger one at TP 1, on GPUs the
largest too, whatever the budget; the rest is interpolated. TP sizes that did not fit into the
budget are named here and by disttrain plan; profiling again continues with them. With analytic:NAME
only preprocessing is measured: operators of the layers are counted and timed by the catalogue's
figures, for machines that are not available. With --calibrate nothing is measured: the profile of a
recorded run is corrected by its traces, and the replaced profile is kept as profile.json.before.
"""

#: Names of the hardware catalogue, for --help alone: reading it would slow every command's start.
CATALOGUE = "A100, A100-40GB, A800, H100, H800, H200, B200"
DEVICE_HELP = (
    "Device to measure: auto (that of the run file, else CUDA if available), cpu, cuda; or"
    f" analytic:NAME for a device of the catalogue ({CATALOGUE}), or any other for which the run"
    " file sets cluster.peak_tflops and cluster.memory_gib."
)

CALIBRATE_HELP = (
    "Folder of a recorded run, real or rehearsed (runs/NAME, runs/NAME/rehearsal): fit the cost"
    " models of its profile to its traces instead of measuring."
)
REINDEX_HELP = (
    "Read all shards again, even if some changed or were removed after they were indexed."
)
CalibrateOption = Annotated[Path | None, typer.Option(metavar="RUN", help=CALIBRATE_HELP)]


def run(
    run_file: RunFileArgument = DEFAULT_RUN_FILE,
    device: Annotated[
        str, typer.Option(metavar="auto|cpu|cuda|analytic:NAME", help=DEVICE_HELP)
    ] = "auto",
    calibrate: CalibrateOption = None,
    reindex: Annotated[bool, typer.Option("--reindex", help=REINDEX_HELP)] = False,
    out: OutOption = None,
    settings: SetOption = None,
    json_mode: JsonFlag = False,
    quiet: QuietFlag = False,
) -> None:
    """Measure the cost of every module, link and sample, or compute it for a catalogue device."""
    console = Console(json_mode=json_mode, quiet=quiet)
    if calibrate is not None:
        if device != "auto" or reindex:
            raise UsageError(
                f"--calibrate and {'--reindex' if reindex else '--device'} exclude each other",
                "--calibrate measures nothing: device and data of the run stay the same",
                "disttrain profile --help",
            )
        _calibrate(console, run_file, settings, calibrate, out)
        return
    check_device_name(device)  # before the run file is read: a usage error with or without one
    opened = open_run(run_file, *settings or ())
    with console.progress() as progress:
        result = profile(
            opened, device=device, reindex=reindex, out=out, progress=progress, note=console.note
        )
    console.result(result.profile.model_dump(mode="json") | {"path": str(result.path)}, result.path)
    _render(console, result.profile, result.path, result.passes)
    console.hint(next_command("plan", run_file, profile=out))


def _calibrate(
    console: Console, run_file: Path, settings: list[str] | None, recorded: Path, out: Path | None
) -> None:
    """Correct the profile of a recorded run by its traces."""
    calibrated = correct(recorded, open_run(run_file, *settings or ()), out=out)
    console.result(
        calibrated.profile.model_dump(mode="json")
        | {
            "path": str(calibrated.path),
            "calibration": [change.model_dump(mode="json") for change in calibrated.changes],
            "notes": calibrated.notes,
        },
        calibrated.path,
    )
    console.say(f"Calibrated {calibrated.profile.provenance['calibrated']}")
    console.grid(
        "Predicted by the profile and measured in the run",
        calibrated.changes,
        [
            ("", lambda change: change.where),
            ("", lambda change: change.what),
            ("before", lambda change: f"{change.before:.4g}"),
            ("after", lambda change: f"{change.after:.4g}"),
            ("", lambda change: change.measure),
            ("change", lambda change: _pct(change.change_pct, "+")),
            ("rows", lambda change: f"{change.rows:,}"),
            ("error before", lambda change: _pct(change.error_before_pct)),
            ("after", lambda change: _pct(change.error_after_pct)),
        ],
    )
    for note in calibrated.notes:
        console.note(f"Note: {note}")
    console.note(
        f"\nWrote {short_path(calibrated.path)}"
        + (f"; before it: {short_path(calibrated.before)}" if calibrated.before else "")
    )
    console.hint(next_command("plan", run_file, profile=out))


def _pct(value: float | None, sign: str = "") -> str:
    return "" if value is None else f"{value:{sign}.1f} %"


def _render(console: Console, profile: Profile, path: Path, passes: str) -> None:
    from disttrain_cli.data.unread_keys import described
    from disttrain_cli.spec.index import TARGET, UNREAD

    device, data = profile.device, profile.data
    shared = f", shared by {device.shared_by} processes" if device.shared_by > 1 else ""
    console.say(
        f"Device   {device.count} × {device.name} ({device.kind}), {device.memory_gib:.1f} GiB"
        f" each, peak {device.peak_tflops:.3g} TFLOP/s{shared}"
    )
    if device.kind == "analytic":
        curve = profile.provenance["kernels"].partition(":")[0]
        console.say(f"         {profile.provenance['device']}")
        console.say(
            f"         kernels by the {curve}, links by published rates: see provenance in the"
            " profile"
        )
    if (measuring := profile.measuring) is not None:
        console.say(_measuring_line(measuring))
        for name, tps in measuring.not_measured.items():
            console.say(
                f"         {name} without TP {', '.join(tps)}: not measured within the budget;"
                " profiling again continues with them"
            )
    console.say(
        f"Data     {data.samples:,} samples in {data.sequences:,} sequences "
        f"of {profile.inputs.sequence_length:,} tokens ({100 * data.fill_fraction:.1f} % full), "
        f"{data.skipped:,} skipped"
    )
    if passes:
        console.say(passes)
    for phase in data.phases if len(data.phases) > 1 else []:
        weights = " : ".join(f"{weight:g}" for weight in phase.weights)
        priced = "; these figures describe it" if phase.step == data.priced_step else ""
        console.say(f"         from step {phase.step:,} on sources × {weights}{priced}")
    if data.duplicates:
        console.say(f"         {data.duplicates:,} not used: duplicates of earlier ones")
    for named in data.skipped_first:
        console.say(f"         skipped {named}")
    if data.skipped_entries > len(data.skipped_first):
        console.say(
            f"         and {data.skipped_entries - len(data.skipped_first):,} more: disttrain data"
            " check lists all"
        )
    for line in data.unread_files:
        console.say(f"         {line}")
    if data.unread:
        left_out = " and ".join(f"{count:,} {what}" for what, count in data.unread.items())
        asked = (
            "; texts that ask for an image are not trained" if UNREAD[TARGET] in data.unread else ""
        )
        console.say(f"         without {left_out}: the model has no module for them{asked}")
    for line in described(data.unread_keys):
        console.say(f"         {line}")
    trained = (
        f", {data.label_tokens:,} trained including ends of samples" if data.label_tokens else ""
    )
    console.say(f"Tokens   {data.text_tokens:,} of text{trained}; {data.image_tokens:,} of images")
    images = data.images_per_sequence
    console.say(
        f"Images   {data.images:,} to read ({images.mean:.1f} per sequence, p95 {images.p95:.0f}, "
        f"max {images.max:.0f}), {data.targets:,} to generate"
    )
    video = profile.inputs.image and profile.inputs.image.video
    if video:
        console.say(
            f"Videos   {data.videos:,}, sampled at {video.fps:g} frames per second, at most"
            f" {video.max_frames:,} frames; every two frames count as one image"
        )
    processor = profile.inputs.image and profile.inputs.image.processor
    if processor and processor.fixed_px:
        height, width = processor.fixed_px
        tiles = "tiles " if processor.tiling else ""
        console.say(
            f"         all {tiles}of {width} × {height} pixels, resized by the model's processor"
        )
    elif profile.inputs.image and data.scaled_down is not None:
        console.say(
            f"         {data.scaled_down:,} scaled down to the budget of"
            f" {profile.inputs.image.max_pixels:,} pixels (data.max_image_pixels)"
        )
    if data.clips:
        console.say(
            f"Audio    {data.clips:,} clips ({data.clips / data.sequences:.1f} per sequence), "
            f"{profile.preprocess.clips_per_s_per_core:,.0f}/s per core converted to features"
        )
    console.say(
        f"Decoding {profile.preprocess.images_per_s_per_core:,.0f} images/s and "
        f"{profile.preprocess.sequences_per_s_per_core:,.0f} sequences/s per core"
    )
    links = [("inside a node", profile.links.of(True))]
    if profile.links.inter_node is not None:
        links.append(("between nodes", profile.links.inter_node))
    console.table(
        "Links, Gbit/s and µs",
        ["", "point to point", "all-reduce", "all-gather", "reduce-scatter"],
        [[where, *_link_cells(times)] for where, times in links],
    )
    console.table(
        "Modules, mean over the data's sequences",
        ["module", "kind", "parameters", "layers", "TP", "forward ms", "backward ms", "fit error"],
        [
            [
                name,
                module.kind,
                f"{module.parameters:,}",
                len(module.layers),
                tp,
                f"{time.forward_ms:.2f}",
                f"{time.backward_ms:.2f}",
                f"{time.fit_error_pct:.1f} %",
            ]
            for name, module in profile.modules.items()
            for tp, time in module.tp.items()
        ],
    )
    console.note(f"\nWrote {short_path(path)}")


def _measuring_line(measuring: Measuring) -> str:
    measured, drawn = measuring.counts
    clock = " of CPU" if measuring.clock == "cpu" else ""
    line = f"Layers   measured {measured:,} of {drawn:,} sizes in {measuring.spent_s:.0f} s{clock}"
    if measured < drawn:
        line += "; the rest is interpolated"
    over = (
        "; the first sizes at TP 1 are measured in any case"
        if measuring.spent_s > measuring.budget_s + 1.0
        else ""
    )
    spent = f"budget {measuring.budget_s:.0f} s, start-up took {measuring.started_s:.0f} s"
    return f"{line} ({spent}{over})"


def _link_cells(times: LinkTimes) -> list[str]:
    return [
        f"{getattr(times, f'{name}_gbps'):.2f}, {getattr(times, f'{name}_us'):.0f}"
        for name in ("p2p", "all_reduce", "all_gather", "reduce_scatter")
    ]
