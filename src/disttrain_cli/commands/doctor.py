"""`disttrain doctor`: state of this machine and environment, and missing requirements."""

from __future__ import annotations

import sys
from dataclasses import asdict

from disttrain_cli.api import doctor
from disttrain_cli.commands.common import JsonFlag, QuietFlag
from disttrain_cli.console import Console

EPILOG = """Examples:

$ disttrain doctor
$ disttrain doctor --json | jq .problems

Reads versions, devices, compilers and limits; writes nothing. Exit code 1 means that a requirement
of every run is missing or does not fit; requirements of some runs are only reported.
"""


def run(json_mode: JsonFlag = False, quiet: QuietFlag = False) -> None:
    """Report versions, devices, compilers and limits, and what is missing."""
    console = Console(json_mode=json_mode, quiet=quiet)
    with console.progress() as progress:
        progress("asking torch", 0, 0)
        found = doctor()
    console.result(
        asdict(found)
        | {
            "findings": [one._asdict() for one in found.findings],
            "problems": [one._asdict() for one in found.problems],
        }
    )
    console.say(f"disttrain {found.version} in {sys.prefix}")
    console.table(
        "Environment",
        ["", "found", ""],
        [[one.what, one.found, "" if one.state == "ok" else one.state] for one in found.findings],
    )
    console.table(
        "Extras",
        ["extra", "", "gives"],
        [
            [name, "installed" if extra["installed"] else "–", extra["gives"]]
            for name, extra in found.extras.items()
        ],
    )
    lines = [f"{one.what}: {one.advice}" for one in found.findings if one.state != "ok"]
    lines += [
        f"extra {name}: {extra['install']}"
        for name, extra in found.extras.items()
        if not extra["installed"]
    ]
    console.say("\n" + "\n".join(lines))
    if found.problems:
        raise SystemExit(1)
    console.hint("disttrain init demo --preset tiny --sample-data")
