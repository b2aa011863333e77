"""`disttrain sample`: images and text that a checkpoint generates for prompts and images."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from disttrain_cli.api import sample
from disttrain_cli.commands.common import JsonFlag, QuietFlag, SetOption
from disttrain_cli.console import Console
from disttrain_cli.naming import short_path

EPILOG = """Examples:

$ disttrain sample --prompt "Draw a seven."
$ disttrain sample runs/tiny/checkpoints/step-000180 --prompt "Draw a two." --count 4
$ disttrain sample demo --prompt "Draw a two." --prompt "Draw a six." --out drawn
$ disttrain sample --image scan.jpg
$ disttrain sample --image scan.jpg --prompt "7, a" --temperature 0.8 --seed 1

A model with a generator generates images for every prompt; text is generated for every prompt and
image. PNG files and samples.json are written to a new folder runs/NAME/samples/STEP.
"""


def run(
    checkpoint: Annotated[
        Path | None,
        typer.Argument(
            metavar="CHECKPOINT",
            show_default=False,
            help="Folder of a checkpoint, or a run file or run folder, of which the newest"
            " checkpoint is used; ./disttrain.yaml by default.",
        ),
    ] = None,
    prompts: Annotated[
        list[str] | None,
        typer.Option("--prompt", metavar="TEXT", help="Text to continue; may be repeated."),
    ] = None,
    images: Annotated[
        list[Path] | None,
        typer.Option(
            "--image",
            metavar="FILE",
            help="Image, video or sound read before the text; may be repeated.",
        ),
    ] = None,
    count: Annotated[
        int | None,
        typer.Option(min=0, max=10_000, help="Number of images per prompt; 1 by default."),
    ] = None,
    tokens: Annotated[int, typer.Option(min=0, help="Maximum number of generated tokens.")] = 64,
    temperature: Annotated[
        float, typer.Option(min=0.0, max=100.0, help="Temperature of text sampling; 0 is greedy.")
    ] = 0.0,
    seed: Annotated[
        int, typer.Option(min=0, max=2**31 - 1, help="Seed of noise and sampled tokens.")
    ] = 0,
    run_file: Annotated[
        Path | None,
        typer.Option(
            "--run",
            metavar="RUN.yaml",
            help="Run file of a checkpoint outside of its run's folder.",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="New folder to write, instead of one in the run's folder."
        ),
    ] = None,
    settings: SetOption = None,
    json_mode: JsonFlag = False,
    quiet: QuietFlag = False,
) -> None:
    """Generate images and text with a checkpoint."""
    console = Console(json_mode=json_mode, quiet=quiet)
    from disttrain_cli.data.sources.samples import printable

    with console.progress() as progress:
        sampled = sample(
            checkpoint,
            prompts=prompts or (),
            images=images or (),
            count=count,
            tokens=tokens,
            temperature=temperature,
            seed=seed,
            run_file=run_file,
            settings=settings or (),
            out=out,
            progress=progress,
        )
    to, drawn = sampled.path, sampled.samples
    console.result(drawn.model_dump(mode="json") | {"path": str(to)}, to)
    console.say(f"Step {drawn.step} of {sampled.run.file.name}")
    console.table(
        "Drawn",
        ["prompt", "image", *(["recognised"] if drawn.judge else [])],
        [
            [
                printable(one.prompt),
                short_path(to / one.file),
                *([one.recognised] if drawn.judge else []),
            ]
            for one in drawn.drawn
        ],
    )
    console.table(
        "Written",
        ["file", "prompt", "text"],
        [
            [one.image, printable(one.prompt), printable(one.text.strip(), 200)]
            for one in drawn.written
        ],
    )
    console.hint(shlex.join(["cat", short_path(to / "samples.json")]))
