"""`disttrain profile`: measure what modules, links and samples cost on this machine."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from disttrain_cli.commands.common import (
    DEFAULT_RUN_FILE,
    JsonFlag,
    OutOption,
    QuietFlag,
    RunFileArgument,
    next_command,
    open_run,
    short_path,
)
from disttrain_cli.console import Console

if TYPE_CHECKING:
    from disttrain_cli.spec.profile import Profile

EPILOG = """Examples:

$ disttrain profile
$ disttrain profile demo/disttrain.yaml --device cpu
$ disttrain profile --json --quiet > profile.json

Builds the sample index, then measures forward and backward of every module over the data's own sizes.
"""


class Device(StrEnum):
    """Where to measure."""

    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


def run(
    run_file: RunFileArgument = DEFAULT_RUN_FILE,
    device: Annotated[Device, typer.Option(help="Where to measure; auto takes CUDA where there is one.")] = Device.auto,
    out: OutOption = None,
    json_mode: JsonFlag = False,
    quiet: QuietFlag = False,
) -> None:
    """Measure what every module, link and sample costs here."""
    console = Console(json_mode=json_mode, quiet=quiet)
    opened = open_run(run_file)
    from disttrain_cli.profiling.measure import measure
    from disttrain_cli.spec.files import write_whole

    with console.progress() as progress:
        profile = measure(opened, device.value, progress)
    path = write_whole(out or opened.dir.profile, profile.model_dump_json(indent=2) + "\n")
    console.result(profile.model_dump(mode="json") | {"path": str(path)}, path)
    _render(console, profile, path)
    console.hint(next_command("plan", run_file, profile=out))


def _render(console: Console, profile: Profile, path: Path) -> None:
    device, data, links = profile.device, profile.data, profile.links
    shared = f", shared by {device.shared_by} processes" if device.shared_by > 1 else ""
    console.say(f"Device   {device.count} × {device.name} ({device.kind}), {device.memory_gib:.1f} GiB each, "
                f"peak {device.peak_tflops:.3g} TFLOP/s{shared}")
    console.say(f"Data     {data.samples:,} samples in {data.sequences:,} sequences "
                f"({100 * data.fill_fraction:.0f} % full), {data.text_tokens:,} text and {data.image_tokens:,} "
                f"image tokens, {data.skipped} skipped")
    images = data.images_per_sequence
    console.say(f"Images   {data.images:,} to read ({images.mean:.1f} per sequence, p95 {images.p95:.0f}, "
                f"max {images.max:.0f}), {data.targets:,} to generate")
    console.say(f"Links    {links.p2p_gbps:.2f} Gbit/s and {links.p2p_us:.0f} µs between two processes; "
                f"all-reduce {links.all_reduce_gbps:.2f} Gbit/s, {links.all_reduce_us:.0f} µs")
    console.say(f"Decoding {profile.preprocess.images_per_s_per_core:,.0f} images/s and "
                f"{profile.preprocess.sequences_per_s_per_core:,.0f} sequences/s per core")
    console.table(
        "Modules, mean over the data's sequences",
        ["module", "kind", "parameters", "layers", "TP", "forward ms", "backward ms", "fit error"],
        [[name, module.kind, f"{module.parameters:,}", len(module.layers), tp, f"{time.forward_ms:.2f}",
          f"{time.backward_ms:.2f}", f"{time.fit_error_pct:.1f} %"]
         for name, module in profile.modules.items() for tp, time in module.tp.items()])
    console.note(f"\nWrote {short_path(path)}")
