"""`--emit skypilot`: a SkyPilot task whose nodes run the ranks.

Follows SkyPilot's task schema (0.11): a task has nodes of one kind, so that preprocessing nodes are
refused.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from disttrain_cli.errors import SpecError
from disttrain_cli.runtime.launching.emit.containers import (
    write_dockerfile,
    write_script,
)
from disttrain_cli.runtime.launching.emit.cores import cpus_per_rank
from disttrain_cli.runtime.launching.emit.hosts import numbered_nodes
from disttrain_cli.runtime.launching.emit.manifest import to_yaml, without_nothing
from disttrain_cli.runtime.launching.emit.scripts import Emitted, Start, write_job
from disttrain_cli.runtime.launching.emit.serving import check_no_nodes
from disttrain_cli.runtime.launching.emit.visible import check_mounted, protecting_files
from disttrain_cli.spec.runfile import Run
from disttrain_cli.spec.whole import write_whole

if TYPE_CHECKING:
    from disttrain_cli.spec.plan import Plan
    from disttrain_cli.spec.profile import Profile

#: Lines of shell that read the node's number and all addresses from SkyPilot's variables.
PLACE = 'node="$SKYPILOT_NODE_RANK"\nmapfile -t hosts <<< "$SKYPILOT_NODE_IPS"'
STOPPED = 143  # exit code of ranks that were stopped (`templates/launch/node.sh`)


def emit_skypilot(
    run: Run, plan: Plan, profile: Profile, folder: Path, start: Start, *, plan_file: Path
) -> Emitted:
    """Write the task, the script of its nodes, a job file and the image's Dockerfile.

    Raises:
        SpecError: as `check`, or the plan needs more nodes.
    """
    cluster, spec = run.file.cluster, run.file.cluster.skypilot
    serving = cluster.cpu_nodes > 0 and not start.preflight
    check(run, folder, serving, plan_file=plan_file)
    nodes = numbered_nodes(run, plan, profile)
    job = write_job(run, plan, profile, folder, nodes, start)
    script = write_script(
        run, job, start, nodes, kind="skypilot", place=PLACE, restarts=start.restarts(run)
    )
    cpus = cpus_per_rank(run, serving=False) * max(len(node.ranks) for node in nodes)
    gpus = None if cluster.device == "cpu" else {str(spec.accelerator): cluster.gpus_per_node}
    task = {
        "name": _name(run.file.name),
        "num_nodes": len(nodes),
        "resources": {
            "infra": spec.infra,
            "accelerators": gpus,
            "cpus": f"{cpus}+",
            "image_id": spec.image and f"docker:{spec.image}",
            "use_spot": True if spec.use_spot else None,
            "job_recovery": {"recover_on_exit_codes": [STOPPED]},
        },
        "volumes": {spec.mount: spec.volume} if spec.mount is not None else None,
        "run": shlex.join(["bash", str(script)]),
    }
    comment = f"The run {run.file.name}; written by: disttrain train --emit skypilot"
    written = [
        write_whole(_file(folder), to_yaml(comment, without_nothing(task))),
        script,
        write_dockerfile(folder),
    ]
    return Emitted(job=str(job), scripts=[str(path) for path in written], commands=commands(folder))


def commands(folder: Path) -> list[str]:
    """Return the commands for the user to run."""
    return [shlex.join(["sky", "jobs", "launch", str(_file(folder).resolve())])]


def _file(folder: Path) -> Path:
    return folder / "skypilot.yaml"


def _name(name: str) -> str:
    """Return the task's name in SkyPilot: no punctuation repeated or at an end."""
    return re.sub(r"([._-])[._-]+", r"\1", name).strip("._-")


def check(run: Run, folder: Path, serving: bool, *, plan_file: Path) -> None:
    """Refuse a job that could not start, before there is a plan.

    Raises:
        SpecError: preprocessing nodes; required fields of `cluster.skypilot` that are missing;
            files outside the volume.
    """
    cluster, spec = run.file.cluster, run.file.cluster.skypilot
    if serving:
        check_no_nodes(run, "A SkyPilot task has nodes of one kind")
    if cluster.device != "cpu" and spec.accelerator is None:
        raise SpecError(
            "SkyPilot must know the GPU by its name",
            "missing in the run file: cluster.skypilot.accelerator",
            "Set it as `sky show-gpus` lists it, such as H100.",
        )
    if (spec.volume is None) != (spec.mount is None):
        raise SpecError(
            "cluster.skypilot.volume and mount go together",
            f"volume: {spec.volume}, mount: {spec.mount}",
            "Give both, or none where all nodes see the run file's folder anyway.",
        )
    if cluster.device == "cpu" and spec.accelerator is not None:
        raise SpecError(
            "The task would have no GPUs, and the run file names some",
            f"cluster.skypilot.accelerator: {spec.accelerator}; cluster.device: cpu",
            "Take the accelerator out, or set cluster.device: auto, profile and plan again.",
        )
    cpus_per_rank(run, serving=False)
    if spec.mount is not None:
        files = [folder, plan_file, *protecting_files(run, serving=False).values()]
        check_mounted(run, spec.mount, files, "cluster.skypilot.mount")
