"""`disttrain schema`: the JSON Schema of the run file, a profile or a plan."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from disttrain_cli.commands.common import JsonFlag, QuietFlag

EPILOG = """Examples:

$ disttrain schema > disttrain.schema.json
$ disttrain schema plan

Editors with YAML support complete and check a run file that names the schema in its first line:
# yaml-language-server: $schema=disttrain.schema.json
"""


def run(
    kind: Annotated[
        Literal["runfile", "profile", "plan"],
        typer.Argument(help="File that the schema describes."),
    ] = "runfile",
    json_mode: JsonFlag = False,
    quiet: QuietFlag = False,
) -> None:
    """Print a JSON Schema with every field, for editors and other tools."""
    from disttrain_cli.spec.schemas import schema_text

    typer.echo(schema_text(kind), nl=False)
