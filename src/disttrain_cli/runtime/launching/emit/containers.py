"""Files of `--emit jobset` and `--emit skypilot` next to the manifest: node script and Dockerfile.

The same script runs on all nodes, in containers of the Dockerfile's image.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

from disttrain_cli.runtime.launching.emit.hosts import Node
from disttrain_cli.runtime.launching.emit.scripts import Start, common, filled
from disttrain_cli.spec.runfile import Run
from disttrain_cli.spec.whole import write_whole

PYTHON = "python3 -m"  # in the image


def write_script(
    run: Run,
    job: Path,
    start: Start,
    nodes: Sequence[Node],
    *,
    kind: str,
    place: str,
    restarts: int,
    workers: str = "",
) -> Path:
    """Write the script of every node, next to the job file.

    Args:
        place: lines of shell that set `node`, this node's number, and `hosts`, the names of all.
        restarts: number of times that the script itself restarts its ranks.
        workers: lines of shell that pass the addresses of preprocessing nodes to ranks.
    """
    folder = job.parent.resolve()
    begun = folder / "begun"
    begun.unlink(missing_ok=True)
    values = common(run, job, start, PYTHON)
    values |= {
        "run": run.file.name,
        "kind": kind,
        "place": place,
        "workers": workers,
        "counts": " ".join(str(len(node.ranks)) for node in nodes),
        "nodes": str(len(nodes)),
        "node": '"$node"',
        "ranks": '"${counts[node]}"',
        "master": '"${hosts[0]}"',
        "begin": 'if [[ "$node" -eq 0 ]]; then begin; fi',
        "finish": values["finish"] and f'if [[ "$node" -eq 0 ]]; then\n{values["finish"]}\nfi',
        "begun": shlex.quote(str(begun)),
        "restarts": str(restarts),
    }
    return write_whole(folder / f"{kind}.sh", filled("node.sh", values))


def write_dockerfile(folder: Path) -> Path:
    """Write the Dockerfile of the image."""
    text = (files("disttrain_cli") / "templates" / "launch" / "Dockerfile").read_text()
    return write_whole(folder / "Dockerfile", text)
