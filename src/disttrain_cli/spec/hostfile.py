"""DeepSpeed's hostfile: the machines, with the number of devices of each."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from disttrain_cli.errors import SpecError

LINE = re.compile(
    r"^(?P<name>[A-Za-z0-9](?:[A-Za-z0-9._:-]*[A-Za-z0-9])?)\s+slots\s*=\s*(?P<slots>[1-9]\d{0,5})$"
)


class Host(NamedTuple):
    """Machine with the number of ranks it has room for."""

    name: str
    slots: int


def read_hostfile(path: Path) -> list[Host]:
    """Return the hosts of a DeepSpeed hostfile: lines such as `worker-1 slots=8`, comments from #.

    Raises:
        SpecError: it cannot be read, a line is malformed, a host is named twice, or none is named.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError(
            f"cluster.hostfile: cannot read {path}",
            str(error),
            "Name a file of lines such as 'worker-1 slots=8'.",
        ) from None
    hosts: list[Host] = []
    for number, line in enumerate(lines, 1):
        text = line.partition("#")[0].strip()
        if not text:
            continue
        match = LINE.match(text)
        if match is None:
            raise SpecError(
                f"The hostfile {path} has a wrong line {number}",
                f"given: {line.strip()!r}; a line is a "
                "host's name and its devices: worker-1 slots=8",
                "Correct the line.",
            )
        if match["name"] in [host.name for host in hosts]:
            raise SpecError(
                f"The hostfile {path} names {match['name']} twice",
                f"again in line {number}",
                "Give one line per host.",
            )
        hosts.append(Host(match["name"], int(match["slots"])))
    if not hosts:
        raise SpecError(
            f"The hostfile {path} names no host", next_step="Add lines such as 'worker-1 slots=8'."
        )
    return hosts
