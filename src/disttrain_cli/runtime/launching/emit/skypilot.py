"""`--emit skypilot`: a SkyPilot task whose nodes run the ranks.

Written after SkyPilot's task schema (0.11): a task has nodes of one kind, so that preprocessing
nodes are refused.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from disttrain_cli.errors import SpecError
from disttrain_cli.runtime.launching.emit.containers import (
    write_dockerfile,
    write_script,
)
from disttrain_cli.runtime.launching.emit.cores import cpus_per_rank
from disttrain_cli.runtime.launching.emit.hosts import numbered_nodes
from disttrain_cli.runtime.launching.emit.manifest import check_mounted, to_yaml
from disttrain_cli.runtime.launching.emit.scripts import Emitted, Start, write_job
from disttrain_cli.spec.plan import Plan
from disttrain_cli.spec.profile import Profile
from disttrain_cli.spec.runfile import Run
from disttrain_cli.spec.whole import write_whole

#: Where SkyPilot says which node this is, and what the others are called.
PLACE = 'node="$SKYPILOT_NODE_RANK"\nmapfile -t hosts <<< "$SKYPILOT_NODE_IPS"'
STOPPED = 143  # exit code of ranks that were told to end (`templates/launch/node.sh`)


def emit_skypilot(
    run: Run, plan: Plan, profile: Profile, folder: Path, start: Start, *, plan_file: Path
) -> Emitted:
    """Write the task, the script of its nodes, a job file and the image's Dockerfile.

    Raises:
        SpecError: too few nodes; preprocessing nodes; what `cluster.skypilot` must say and does
            not; files outside the volume.
    """
    cluster, spec = run.file.cluster, run.file.cluster.skypilot
    nodes = numbered_nodes(run, plan, profile)
    _check_said(run, start)
    if spec.mount is not None:
        given = run.file.preprocess
        protected = [given.tls_ca, given.token_file] if given.addresses else []
        files = [folder, plan_file, *(run.resolve(path) for path in protected if path)]
        check_mounted(run, spec.mount, files, "cluster.skypilot.mount")
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
    written = [write_whole(_file(folder), to_yaml(comment, task)), script, write_dockerfile(folder)]
    return Emitted(job=str(job), scripts=[str(path) for path in written], commands=commands(folder))


def commands(folder: Path) -> list[str]:
    """What to type."""
    return [shlex.join(["sky", "jobs", "launch", str(_file(folder).resolve())])]


def _file(folder: Path) -> Path:
    return folder / "skypilot.yaml"


def _name(name: str) -> str:
    """What a task is called in SkyPilot's lists: no signs in a row, and none at an end."""
    return re.sub(r"([._-])[._-]+", r"\1", name).strip("._-")


def _check_said(run: Run, start: Start) -> None:
    """SpecError where the task cannot be written."""
    cluster, spec = run.file.cluster, run.file.cluster.skypilot
    if cluster.cpu_nodes > 0 and not start.preflight:
        raise SpecError(
            "A SkyPilot task has nodes of one kind, and no preprocessing nodes",
            f"cluster.cpu_nodes: {cluster.cpu_nodes}",
            "Set cluster.cpu_nodes: 0 and let ranks prepare their data, or name workers that run"
            " already in preprocess.addresses.",
        )
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
