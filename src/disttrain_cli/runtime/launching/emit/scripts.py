"""Job file and start scripts of `disttrain train --emit`.

The scripts are templates under `templates/launch/`; a value is inserted only through `shlex.quote`,
as a number, or as an option that the run file's schema has checked.
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from disttrain_cli.errors import SpecError
from disttrain_cli.runtime.launching.emit.hosts import Node
from disttrain_cli.runtime.launching.payload import PREFLIGHT, TRAIN, payload_of
from disttrain_cli.runtime.launching.rank import JobFile
from disttrain_cli.spec.rundir import RunDir, stop_file, stopped_file
from disttrain_cli.spec.runfile import Run
from disttrain_cli.spec.whole import write_whole

if TYPE_CHECKING:
    from disttrain_cli.spec.plan import Plan
    from disttrain_cli.spec.profile import Profile


class Emitted(BaseModel):
    """Files that were written, and the commands that start the job."""

    job: str
    scripts: list[str]
    commands: list[str]  # one per host, or one in all


@dataclass(frozen=True)
class Start:
    """Options of the command line for a job's ranks."""

    steps: int
    resume: bool = False
    preflight: bool = False
    profile_steps: range | None = None
    restart: bool = False
    origin: Path | None = None

    def folder(self, run: Run) -> RunDir:
        """Return the folder of the ranks' logs."""
        return run.dir.preflight if self.preflight else run.dir

    def restarts(self, run: Run) -> int:
        """Return the number of automatic restarts after failures."""
        return 0 if self.preflight else run.file.train.restarts


class _Template(Template):
    """Template with @ as delimiter, as $ is the shell's."""

    delimiter = "@"


def write_job(
    run: Run, plan: Plan, profile: Profile, folder: Path, nodes: Sequence[Node], start: Start
) -> Path:
    """Write the job file from which every rank starts."""
    logs = str(start.folder(run).logs.resolve())
    payload = payload_of(run, plan, profile, start.profile_steps, start.origin) | {
        "steps": 0 if start.preflight else start.steps,
        "resume": start.resume or start.preflight,
        "restart": start.restart,
        "logs": logs,
        "start_file": str((folder / "start.json").resolve()),
        "ranks_of_hosts": [len(node.ranks) for node in nodes],
    }
    job = JobFile(
        target=PREFLIGHT if start.preflight else TRAIN,
        payload=payload,
        logs=logs,
        ranks=plan.plan.gpus_used,
    )
    return write_whole(folder / "job.json", job.model_dump_json(indent=1))


def filled(name: str, values: Mapping[str, Any]) -> str:
    """Return a template of `templates/launch/` with its values filled in.

    It may include other templates as `@{NAME.sh}`. A line with nothing but an empty value is
    removed.
    """
    room = files("disttrain_cli") / "templates" / "launch"
    text = (room / name).read_text()
    for part in ("agent", "follow", "stopped"):
        text = text.replace(f"@{{{part}.sh}}", (room / f"{part}.sh").read_text().strip())
    alone = re.compile(r"^ *@\{(\w+)\}\n", re.MULTILINE)
    text = alone.sub(lambda line: line[0] if values[line[1]] != "" else "", text)
    return _Template(text).substitute(
        {key: value if isinstance(value, str) else str(value) for key, value in values.items()}
    )


def common(
    run: Run, job: Path, start: Start, python: str = f"{shlex.quote(sys.executable)} -m"
) -> dict[str, str]:
    """Return the values that every script uses: paths, programs, and network settings."""
    logs = start.folder(run).logs.resolve()
    setup = run.file.cluster.slurm.setup
    interface = run.file.cluster.interface
    exports = [
        f"export {name}={shlex.quote(interface)}"
        for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
        if interface is not None
    ]
    return {
        "name": run.file.name,
        "job": shlex.quote(str(job.resolve())),
        "stop": shlex.quote(str(stop_file(logs))),
        "stopped": shlex.quote(str(stopped_file(logs))),
        "setup": ""
        if setup is None
        # set +u, as setup scripts of environments and modules read unset variables
        else "set +u\n# shellcheck source=/dev/null\n"
        f"source {shlex.quote(str(run.resolve(setup)))}\nset -u",
        "exports": "\n".join(exports),
        "python": python,
        "finish": ""
        if start.preflight
        else filled("finish.sh", {"python": python}).rstrip(),  # for the first host alone
        "restarts": str(start.restarts(run)),
        "port": str(run.file.cluster.port),
    }


def check_plain(path: Path, what: str) -> None:
    """Raise SpecError if a path cannot be named in an option of sbatch, which has no quoting."""
    text = str(path)
    if any(sign in text for sign in "\"'\\%\n ") or not text.isprintable():
        raise SpecError(
            f"{what} cannot be named in an option of sbatch",
            f"given: {text!r}",
            "Use a path without blanks, quotes and percent signs.",
        )
