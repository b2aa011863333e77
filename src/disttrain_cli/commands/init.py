"""`disttrain init`: a run folder from a preset, or for the user's own model and data."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated, Any

import typer

from disttrain_cli.api import init
from disttrain_cli.api.presets import preset_names
from disttrain_cli.api.starting import TINY, InitResult
from disttrain_cli.commands.common import JsonFlag, QuietFlag
from disttrain_cli.console import Console
from disttrain_cli.errors import UsageError
from disttrain_cli.naming import short_path

EPILOG = """Examples:

$ disttrain init demo --preset tiny --sample-data
$ disttrain init demo --preset tiny-qwen3-vl --sample-data
$ disttrain init my-run
$ disttrain init my-run --folder Qwen/Qwen2.5-VL-7B-Instruct --data talks.jsonl

Writes DIR/disttrain.yaml, and with --sample-data the scanned digits of scikit-learn as WebDataset
tars in DIR/data. Small models of a published family (tiny-qwen3-vl …) are a folder in the published
format, with random weights: DIR/model. With --folder and --data the sizes of all samples are read,
and sequence length, batch, steps and learning rate are chosen for them as starting values. The JSON
Schema of each run file is written next to it, for editors.
"""


def run(
    folder: Annotated[
        Path | None,
        typer.Argument(
            metavar="DIR",
            help="Folder to write, created if it does not exist; with --folder the working folder"
            " by default.",
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
            help="Your model: folder of a published vision-language model or LLM, or its name on"
            " Hugging Face; needs --data.",
        ),
    ] = None,
    own_data: Annotated[
        str | None,
        typer.Option(
            "--data",
            metavar="PATH|URL",
            help="Your data: JSON, JSONL, ShareGPT, WebDataset tars, Parquet, or a folder of them;"
            " needs --folder.",
        ),
    ] = None,
    sample_data: Annotated[
        bool, typer.Option("--sample-data", help="Also write a small real dataset.")
    ] = False,
    json_mode: JsonFlag = False,
    quiet: QuietFlag = False,
) -> None:
    """Write a run file from a preset, or for your own model and data."""
    console = Console(json_mode=json_mode, quiet=quiet)
    if folder is None and own_model is None and own_data is None:
        raise UsageError(
            "Missing argument 'DIR', the folder to write", "", "disttrain init demo --preset tiny"
        )
    with console.progress() as progress:
        created = init(
            folder or Path(),
            preset=preset,
            model=own_model,
            data=own_data,
            sample_data=sample_data,
            progress=progress,
        )
    written: dict[str, Any] = {"path": str(created.path), "data": created.data}
    if created.preset is None:
        written |= {"folder": created.model, "samples": created.samples, "skipped": created.skipped}
    else:
        written |= {"preset": created.preset} | ({"model": created.model} if created.model else {})
    console.result(written, created.path)
    _render(console, created)


def _render(console: Console, created: InitResult) -> None:
    path, folder = short_path(created.path), created.path.parent
    if created.preset is None:
        console.say(
            f"Wrote {path}: {created.samples:,} samples of {created.data[0]} train {created.model}"
        )
    else:
        console.say(f"Wrote {path} (preset {created.preset})")
        if created.model:
            console.say(f"Wrote {short_path(Path(created.model))} (random weights)")
        for name in created.data:
            console.say(f"Wrote {short_path(Path(name))}")
    for note in created.notes:
        console.note(note)
    if created.missing:
        console.say(
            f"There is no data yet at {', '.join(created.missing)}: copy yours there, or name it in"
            f" data.sources of {path}; or write an example:"
        )
        options = ["--preset", str(created.preset), "--sample-data"]
        console.hint(shlex.join(["disttrain", "init", str(folder), *options]))
        return
    here = folder.resolve() == Path.cwd()
    console.hint(("" if here else f"cd {shlex.quote(str(folder))} && ") + "disttrain profile")
