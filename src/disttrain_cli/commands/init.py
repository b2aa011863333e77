"""`disttrain init`: a run folder from a preset, with a small real dataset if asked for."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from importlib.resources import files
from pathlib import Path
from typing import Annotated

import typer

from disttrain_cli.commands.common import (
    DEFAULT_RUN_FILE,
    JsonFlag,
    QuietFlag,
)
from disttrain_cli.console import Console
from disttrain_cli.errors import SpecError, UsageError
from disttrain_cli.naming import short_path

EPILOG = """Examples:

$ disttrain init demo --preset tiny --sample-data
$ disttrain init demo --preset tiny-qwen3-vl --sample-data
$ disttrain init my-run

Writes DIR/disttrain.yaml, and with --sample-data the scanned digits of scikit-learn as WebDataset
tars in DIR/data. Small models of a published family (tiny-qwen3-vl …) are a folder as such models
are published, with random weights: DIR/model.
"""

MODEL = "model"  # beside the run file


def preset_names() -> list[str]:
    """Presets that ship with the package."""
    folder = files("disttrain_cli") / "templates" / "presets"
    return sorted(
        entry.name.removesuffix(".yaml")
        for entry in folder.iterdir()
        if entry.name.endswith(".yaml")
    )


def run(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="Folder to write; made if it does not exist.")
    ],
    preset: Annotated[
        str,
        typer.Option(
            metavar="NAME", help=f"Which run file to start from: {', '.join(preset_names())}."
        ),
    ] = "tiny",
    sample_data: Annotated[
        bool, typer.Option("--sample-data", help="Write a small real dataset too.")
    ] = False,
    json_mode: JsonFlag = False,
    quiet: QuietFlag = False,
) -> None:
    """Write a run file to start from."""
    from disttrain_cli.commands.preset_files import has_model, write_data, write_model
    from disttrain_cli.spec.whole import write_whole

    console = Console(json_mode=json_mode, quiet=quiet)
    path, content = folder / DEFAULT_RUN_FILE, fitted(preset_text(preset), cuda_devices())
    if path.exists() and not (path.is_file() and path.read_bytes() == content.encode()):
        raise SpecError(
            f"{path} exists and differs from the preset {preset}",
            "It is left as it is.",
            "Choose another folder, or move the file away first.",
        )
    model = folder / MODEL if has_model(preset) else None
    with console.progress() as progress:
        if model:
            progress("drawing the model's weights", 0, 0)
            write_model(preset, model)
        write_whole(path, content)
        if sample_data:
            progress("writing sample data", 0, 0)
        sources = write_data(content, folder / "data") if sample_data else []
    data = [str(folder / "data" / name) for name in sources]
    written = {"path": str(path), "preset": preset, "data": data}
    console.result(written | ({"model": str(model)} if model else {}), path)
    console.say(f"Wrote {short_path(path)} (preset {preset})")
    if model:
        console.say(f"Wrote {short_path(model)} (random weights)")
    for name in sources:
        console.say(f"Wrote {short_path(folder / 'data' / name)}")
    if missing := missing_data(folder, content):
        console.say(
            f"There is no data yet at {', '.join(missing)}: put yours there, or name it in"
            f" data.sources of {short_path(path)}; or write an example:"
        )
        console.hint(f"disttrain init {shlex.quote(str(folder))} --preset {preset} --sample-data")
    else:
        console.hint(f"cd {shlex.quote(str(folder))} && disttrain profile")


def missing_data(folder: Path, content: str) -> list[str]:
    """Paths of a run file's sources at which there is nothing."""
    from disttrain_cli.commands.preset_files import source_paths

    return [path for path in source_paths(content) if not (folder / path).exists()]


def preset_text(name: str) -> str:
    """The run file of a preset; raises UsageError with the names there are."""
    if name not in preset_names():
        from disttrain_cli.spec.suggestions import listed

        raise UsageError(
            f"There is no preset {name!r}",
            "presets: " + listed(name, preset_names()),
            "disttrain init DIR --preset tiny",
        )
    return (files("disttrain_cli") / "templates" / "presets" / f"{name}.yaml").read_text(
        encoding="utf-8"
    )


def fitted(text: str, gpus: int) -> str:
    """A preset for this machine: not more GPUs per node than it has; without GPUs it stays as it
    is."""
    if not gpus:
        return text
    return re.sub(
        r"(?m)^(  gpus_per_node: )(\d+)",
        lambda match: f"{match[1]}{min(int(match[2]), gpus)}",
        text,
    )


def cuda_devices() -> int:
    """GPUs that the driver shows, asked without loading torch; 0 where there is no driver."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    try:
        answer = subprocess.run(
            ["nvidia-smi", "-L"], capture_output=True, text=True, timeout=20, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return 0
    devices = sum(line.startswith("GPU ") for line in answer.splitlines())
    return (
        devices
        if visible is None
        else min(devices, len([name for name in visible.split(",") if name.strip()]))
    )
