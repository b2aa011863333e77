"""`disttrain init`: a run folder from a preset, with a small real dataset if asked for."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from importlib.resources import files
from itertools import takewhile
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
$ disttrain init my-run --folder Qwen/Qwen2.5-VL-7B-Instruct --data talks.jsonl

Writes DIR/disttrain.yaml, and with --sample-data the scanned digits of scikit-learn as WebDataset
tars in DIR/data. Small models of a published family (tiny-qwen3-vl …) are a folder as such models
are published, with random weights: DIR/model. With --folder and --data the sizes of all samples
are read, and sequence length, batch, steps and learning rate chosen for them: values to start from.
Beside each run file lies its JSON Schema, for editors.
"""

TINY = "tiny"  # the preset of none that is named
MODEL, SCHEMA = "model", ".disttrain.schema.json"  # beside the run file
#: Editors complete and check the run file by it.
MODELINE = f"# yaml-language-server: $schema={SCHEMA}\n"


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
        Path | None,
        typer.Argument(
            metavar="DIR",
            help="Folder to write, made if it does not exist; with --folder the working folder, if"
            " not given.",
        ),
    ] = None,
    preset: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help=f"Which run file to start from: {', '.join(preset_names())}. [default: {TINY}]",
            autocompletion=preset_names,
        ),
    ] = None,
    own_model: Annotated[
        str | None,
        typer.Option(
            "--folder",
            metavar="PATH|NAME",
            help="Your own model: folder of a published vision-language model or LLM, or its name"
            " on Hugging Face; needs --data.",
        ),
    ] = None,
    own_data: Annotated[
        str | None,
        typer.Option(
            "--data",
            metavar="PATH|URL",
            help="Your own data: JSON, JSONL, ShareGPT, WebDataset tars, Parquet, or a folder of"
            " them; needs --folder.",
        ),
    ] = None,
    sample_data: Annotated[
        bool, typer.Option("--sample-data", help="Write a small real dataset too.")
    ] = False,
    json_mode: JsonFlag = False,
    quiet: QuietFlag = False,
) -> None:
    """Write a run file to start from, or one for your own model and data."""
    console = Console(json_mode=json_mode, quiet=quiet)
    if own_model is not None and own_data is not None:
        if preset is not None or sample_data:
            raise UsageError(
                "--folder and --data go without --preset and --sample-data",
                "one run file is of your own model and data, the other of a preset",
                "disttrain init --help",
            )
        _write_own(console, folder or Path(), own_model, own_data)
        return
    if own_model is not None or own_data is not None:
        raise UsageError(
            "--folder and --data go together",
            "sizes and steps of the run file are those of both",
            "disttrain init DIR --folder PATH --data PATH",
        )
    if folder is None:
        raise UsageError(
            "Missing argument 'DIR', the folder to write", "", "disttrain init demo --preset tiny"
        )
    _write_preset(console, folder, preset or TINY, sample_data)


def _write_own(console: Console, folder: Path, model: str, data: str) -> None:
    from disttrain_cli.commands.own_run import own_run

    path = folder / DEFAULT_RUN_FILE
    if path.exists():
        raise SpecError(
            f"{path} exists",
            "It is left as it is.",
            "Choose another folder, or move the file away first.",
        )
    with console.progress() as progress:
        own = own_run(folder, model, data, cuda_devices(), progress)
    _write_run_file(path, MODELINE + own.text)
    written = {"path": str(path), "folder": model, "data": [data], "samples": own.samples}
    console.result(written | {"skipped": own.skipped}, path)
    console.say(f"Wrote {short_path(path)}: {own.samples:,} samples of {data} train {model}")
    for note in own.notes:
        console.note(note)
    _hint_profile(console, folder)


def _hint_profile(console: Console, folder: Path) -> None:
    here = folder.resolve() == Path.cwd()
    console.hint(("" if here else f"cd {shlex.quote(str(folder))} && ") + "disttrain profile")


def _write_run_file(path: Path, content: str) -> None:
    from disttrain_cli.spec.schemas import schema_text
    from disttrain_cli.spec.whole import write_whole

    write_whole(path, content)
    write_whole(path.with_name(SCHEMA), schema_text("runfile"))


def _write_preset(console: Console, folder: Path, preset: str, sample_data: bool) -> None:
    from disttrain_cli.commands.preset_files import has_model, write_data, write_model

    path = folder / DEFAULT_RUN_FILE
    content = MODELINE + fitted(preset_text(preset), cuda_devices())
    if path.exists() and not (path.is_file() and path.read_bytes() == content.encode()):
        raise SpecError(
            f"{path} exists and differs from the preset {preset}",
            "It is left as it is.",
            "Choose another folder, or move the file away first.",
        )
    if sample_data:
        from disttrain_cli.data.sample_data import load_scans

        load_scans()  # DataError where its package is missing, before anything is written
    model = folder / MODEL if has_model(preset) else None
    with console.progress() as progress:
        if model:
            progress("drawing the model's weights", 0, 0)
            write_model(preset, model)
        _write_run_file(path, content)
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
        _hint_profile(console, folder)


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
    """GPUs that the driver shows, asked without loading torch; 0 where there is no driver.

    As CUDA reads it, CUDA_VISIBLE_DEVICES ends at the first name that is of no device.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    try:
        answer = subprocess.run(
            ["nvidia-smi", "-L"], capture_output=True, text=True, timeout=20, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return 0
    devices = sum(line.startswith("GPU ") for line in answer.splitlines())
    if visible is None:
        return devices
    names = [name.strip() for name in visible.split(",")]
    there = [*map(str, range(devices))]
    known = takewhile(lambda name: name in there or name.startswith(("GPU-", "MIG-")), names)
    return len({*known})
