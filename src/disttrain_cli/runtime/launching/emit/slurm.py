"""`--emit slurm`: one sbatch script for GPU nodes, and CPU nodes as a heterogeneous component.

The CPU nodes run preprocessing.
"""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from disttrain_cli.runtime.launching.emit.cores import cpus_per_rank
from disttrain_cli.runtime.launching.emit.hosts import Node, numbered_nodes
from disttrain_cli.runtime.launching.emit.scripts import (
    Emitted,
    Start,
    check_plain,
    common,
    filled,
    write_job,
)
from disttrain_cli.runtime.launching.emit.serving import (
    SERVE_PORT,
    check_protected,
    serve_command,
    workers_per_node,
)
from disttrain_cli.spec.runfile import Run
from disttrain_cli.spec.whole import write_whole

if TYPE_CHECKING:
    from disttrain_cli.spec.plan import Plan
    from disttrain_cli.spec.profile import Profile


def emit_slurm(
    run: Run, plan: Plan, profile: Profile, folder: Path, start: Start, *, plan_file: Path
) -> Emitted:
    """Write a job file and an sbatch script into `folder`, on a file system that all nodes share.

    Raises:
        SpecError: as `check`, or the plan needs more nodes.
    """
    serving = run.file.cluster.cpu_nodes > 0 and not start.preflight
    check(run, folder, serving)
    nodes = numbered_nodes(run, plan, profile)
    job = write_job(run, plan, profile, folder, nodes, start)
    values = common(run, job, start)
    counts = [len(node.ranks) for node in nodes]
    even = min(counts) == max(counts)
    values |= {
        "options": "\n".join(_options(run, nodes, folder, serving)),
        "tasks": str(sum(counts)),
        # Slurm's own spreads neighbouring ranks over sockets, away from their GPUs.
        "distribution": (
            f"block:block --ntasks-per-node={counts[0]}" if even else "arbitrary:block"
        ),
        "uneven": (
            ""
            if even
            else filled("uneven.sh", values | {"counts": " ".join(map(str, counts))}).rstrip()
        ),
        "cpus": str(cpus_per_rank(run, serving)),
        "group": "--het-group=0 " if serving else "",
        "nodelist": "SLURM_JOB_NODELIST_HET_GROUP_0" if serving else "SLURM_JOB_NODELIST",
        "serve": _serve(run, plan_file, values) if serving else "",
    }
    path = write_whole(_script(folder), filled("slurm.sh", values))
    return Emitted(job=str(job), scripts=[str(path)], commands=commands(folder))


def check(run: Run, folder: Path, serving: bool) -> None:
    """Refuse a job that could not start, before there is a plan.

    Raises:
        SpecError: a folder that no option of sbatch can name; a rank's share of a node's cores is
            too small; preprocessing nodes without TLS and a token.
    """
    check_plain(folder.resolve(), "The folder of the scripts")
    cpus_per_rank(run, serving)
    if serving:
        check_protected(run)


def commands(folder: Path) -> list[str]:
    """Return the commands for the user to run."""
    return [shlex.join(["sbatch", str(_script(folder).resolve())])]


def _script(folder: Path) -> Path:
    return folder / "job.sbatch"


def _options(run: Run, nodes: list[Node], folder: Path, serving: bool) -> list[str]:
    """Return the script's `#SBATCH` lines: of the GPU nodes, then of the preprocessing nodes."""
    cluster, slurm = run.file.cluster, run.file.cluster.slurm
    options = [
        f"--job-name={run.file.name}",
        f"--output={folder.resolve()}/slurm-%j.log",
        "--open-mode=append",
        "--requeue",
        f"--signal=B:USR1@{slurm.signal_s}",
        *([f"--time={slurm.time}"] if slurm.time else []),
        *([f"--partition={slurm.partition}"] if slurm.partition else []),
        *_paid(run),
        f"--nodes={len(nodes)}",
        f"--ntasks-per-node={max(len(node.ranks) for node in nodes)}",
        f"--cpus-per-task={cpus_per_rank(run, serving)}",
        *([] if cluster.device == "cpu" else [f"--gpus-per-node={cluster.gpus_per_node}"]),
        *([] if slurm.mem is None else [f"--mem={slurm.mem}"]),
        *slurm.options,
    ]
    lines = [f"#SBATCH {option}" for option in options]
    if serving:
        partition = slurm.cpu_partition or slurm.partition
        other = [
            *([f"--partition={partition}"] if partition else []),
            *_paid(run),
            f"--nodes={cluster.cpu_nodes}",
            "--ntasks-per-node=1",
            f"--cpus-per-task={cluster.cpu_node_cores}",
            *([] if slurm.mem is None else ["--mem=0"]),
        ]
        lines += ["#SBATCH hetjob", *(f"#SBATCH {option}" for option in other)]
    return lines


def _paid(run: Run) -> list[str]:
    slurm = run.file.cluster.slurm
    return [
        *([f"--account={slurm.account}"] if slurm.account else []),
        *([f"--qos={slurm.qos}"] if slurm.qos else []),
    ]


def _serve(run: Run, plan_file: Path, values: dict[str, str]) -> str:
    """Return lines of shell that start the preprocessing workers and export their addresses."""
    spec = run.file.preprocess
    assert spec.tls_cert is not None and spec.tls_key is not None
    served = {
        "command": serve_command(run, plan_file),
        "cert": shlex.quote(str(run.resolve(spec.tls_cert))),
        "key": shlex.quote(str(run.resolve(spec.tls_key))),
        "first": str(SERVE_PORT),
        "cores": str(run.file.cluster.cpu_node_cores),
        "processes": str(workers_per_node(run)),
    }
    return filled("serve.sh", values | served).rstrip()
