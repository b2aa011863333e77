"""`disttrain models`: model families of the installed transformers, and which of them run."""

from __future__ import annotations

from collections import defaultdict
from typing import Annotated

import typer

from disttrain_cli.api import models
from disttrain_cli.commands.common import JsonFlag, QuietFlag
from disttrain_cli.console import Console

EPILOG = """Examples:

$ disttrain models
$ disttrain models qwen gemma
$ disttrain models --json | jq '.image_text[] | select(.compared) | .model_type'

Each family is tried by its class's default configuration, without memory for weights. Towers are
taken apart into pipeline layers, or run whole as one layer on ranks of their own. Of the listed
models that read files, tiny folders were trained, too, and have the library's own loss.
"""
#: Reason of a family that may run.
UNPROVEN = "its layers run; its processor and forward were not compared with the library's"


def run(
    names: Annotated[
        list[str] | None, typer.Argument(help="Parts of names; without any, all families.")
    ] = None,
    json_mode: JsonFlag = False,
    quiet: QuietFlag = False,
) -> None:
    """List the model families of the installed transformers that run, and why others do not."""
    console = Console(json_mode=json_mode, quiet=quiet)
    with console.progress() as progress:
        found = models(names or (), progress)
    console.result(
        {
            "transformers": found.transformers,
            "decoders": [one._asdict() for one in found.decoders],
            "image_text": [one._asdict() for one in found.image_text],
        }
    )
    console.say(f"transformers {found.transformers}")
    console.table(
        "Decoders",
        ["", "TP", "CP", "experts", "recurrent layers"],
        [
            [one.model_type, *map(_mark, (one.tp, one.cp, one.experts, one.recurrent))]
            for one in found.decoders
            if one.refused is None
        ],
    )
    console.table(
        "Models that read images, videos or clips",
        ["", "reads", "towers", "LLM"],
        [
            [one.model_type, ", ".join(one.reads), one.tower, one.llm]
            for one in found.image_text
            if one.refused is None and one.compared
        ],
    )
    reasons = defaultdict[str, list[str]](list)
    refused = [(one.model_type, one.refused) for one in found.decoders]
    refused += [
        (one.model_type, one.refused or (None if one.compared else UNPROVEN))
        for one in found.image_text
    ]
    for model_type, reason in refused:
        if reason is not None:
            reasons[reason.replace(model_type, "this family")].append(model_type)
    console.table(
        "Not supported, or not proven",
        ["families", "reason"],
        [[", ".join(families), reason] for reason, families in reasons.items()],
    )


def _mark(supported: bool) -> str:
    return "yes" if supported else "–"
