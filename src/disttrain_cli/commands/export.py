"""`disttrain export`: a checkpoint as Hugging Face folders."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from disttrain_cli.api import export, open_run
from disttrain_cli.commands.common import (
    DEFAULT_RUN_FILE,
    JsonFlag,
    QuietFlag,
    RunFileArgument,
    SetOption,
)
from disttrain_cli.console import Console
from disttrain_cli.naming import short_path
from disttrain_cli.spec.extras import EXTRAS, install_command

EPILOG = """Examples:

$ disttrain export --to my-model
$ disttrain export demo/disttrain.yaml --to my-model --checkpoint 100
$ disttrain export --to my-model --ema
$ disttrain export --to my-model --merge

Each module becomes a folder that transformers or diffusers load with from_pretrained;
projectors.safetensors contains the projectors between them, and README.md describes their use. A
run of a complete published model (model.folder) becomes one folder like it, for
AutoModelForImageTextToText. For a module with lora the adapters are written, which peft's
PeftModel.from_pretrained loads. Existing files are not overwritten.
"""


def run(
    to: Annotated[Path, typer.Option("--to", "--out", metavar="DIR", help="New folder to write.")],
    run_file: RunFileArgument = DEFAULT_RUN_FILE,
    checkpoint: Annotated[
        int | None,
        typer.Option(min=0, metavar="STEP", help="Step of the checkpoint, instead of the newest."),
    ] = None,
    ema: Annotated[
        bool,
        typer.Option(
            "--ema", help="Moving averages instead of the last weights, for modules that have them."
        ),
    ] = False,
    merge: Annotated[
        bool,
        typer.Option(
            "--merge", help="Complete weights with the adapters merged, instead of the adapters."
        ),
    ] = False,
    settings: SetOption = None,
    json_mode: JsonFlag = False,
    quiet: QuietFlag = False,
) -> None:
    """Write a checkpoint as Hugging Face folders (safetensors)."""
    console = Console(json_mode=json_mode, quiet=quiet)
    opened = open_run(run_file, *settings or ())
    with console.progress() as progress:
        exported = export(
            opened, to=to, checkpoint=checkpoint, ema=ema, merge=merge, progress=progress
        )
    console.result(exported, exported.path)
    console.grid(
        f"Step {exported.step} in {short_path(to)}",
        exported.modules.values(),
        [
            ("folder", lambda module: module.folder),
            ("loads with", lambda module: module.loads_with + (", peft" if module.base else "")),
            ("parameters", lambda module: f"{module.parameters:,}"),
            ("averaged", lambda module: "yes" if module.averaged else "–"),
        ],
    )
    if exported.generates_with is not None:
        needed = {
            "generate": not {"llava", "llava_next"}
            & exported.modules.keys(),  # these do not read videos
            "adapters": any(module.base for module in exported.modules.values()),
        }
        missing = [
            name for name, is_needed in needed.items() if is_needed and not EXTRAS[name].installed
        ]
        console.hint(" && ".join([*map(install_command, missing), exported.generates_with]))
        return
    console.hint(shlex.join(["cat", short_path(to / "README.md")]))
