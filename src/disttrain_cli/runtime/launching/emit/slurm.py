"""`--emit slurm`: one sbatch script; GPU nodes, and CPU nodes for preprocessing as another
component of the job."""

from __future__ import annotations

import shlex
from pathlib import Path

from disttrain_cli.errors import SpecError
from disttrain_cli.runtime.launching.emit.hosts import Node, place_ranks
from disttrain_cli.runtime.launching.emit.scripts import (
    Emitted,
    common,
    filled,
    plain_path,
    write_job,
)
from disttrain_cli.spec.hostfile import Host
from disttrain_cli.spec.plan import Plan
from disttrain_cli.spec.profile import Profile
from disttrain_cli.spec.runfile import Run
from disttrain_cli.spec.stage_graph import stage_graph
from disttrain_cli.spec.whole import write_whole

SERVE_PORT = 8815  # of the first worker of a preprocessing node, the others follow


def emit_slurm(
    run: Run,
    plan: Plan,
    profile: Profile,
    folder: Path,
    *,
    plan_file: Path,
    steps: int,
    resume: bool = False,
    preflight: bool = False,
    profile_steps: range | None = None,
    restart: bool = False,
    origin: Path | None = None,
) -> Emitted:
    """Write a job file and an sbatch script into `folder`, on a file system that all nodes share.

    Raises:
        SpecError: too few nodes, or preprocessing nodes without what protects their data (TLS and a
        token).
    """
    cluster = run.file.cluster
    hosts = [Host(f"node-{number}", cluster.gpus_per_node) for number in range(cluster.nodes)]
    nodes = place_ranks(stage_graph(plan.plan, profile.inputs.llm), hosts)
    serving = cluster.cpu_nodes > 0 and not preflight
    if serving:
        _check_protected(run)
    job = write_job(
        run, plan, profile, folder, nodes, steps, resume, preflight, profile_steps, restart, origin
    )
    logs = (run.dir.preflight if preflight else run.dir).logs.resolve()
    values = common(run, job, logs, 0 if preflight else run.file.train.restarts)
    counts = [len(node.ranks) for node in nodes]
    even = min(counts) == max(counts)
    values |= {
        "options": "\n".join(_options(run, nodes, folder, serving)),
        "tasks": str(sum(counts)),
        "distribution": f"block --ntasks-per-node={counts[0]}" if even else "arbitrary",
        "uneven": (
            ":"
            if even
            else filled("uneven.sh", values | {"counts": " ".join(map(str, counts))}).rstrip()
        ),
        "cpus": str(cpus_per_rank(run, serving)),
        "group": "--het-group=0 " if serving else "",
        "nodelist": "SLURM_JOB_NODELIST_HET_GROUP_0" if serving else "SLURM_JOB_NODELIST",
        "serve": _serve(run, plan_file) if serving else ":",
    }
    path = write_whole(_script(folder), filled("slurm.sh", values))
    return Emitted(job=str(job), scripts=[str(path)], commands=commands(folder))


def commands(folder: Path) -> list[str]:
    """What to type."""
    return [shlex.join(["sbatch", str(_script(folder).resolve())])]


def _script(folder: Path) -> Path:
    return folder / "job.sbatch"


def _options(run: Run, nodes: list[Node], folder: Path, serving: bool) -> list[str]:
    """The script's `#SBATCH` lines, those of the preprocessing nodes after those of the GPU
    nodes."""
    cluster, slurm = run.file.cluster, run.file.cluster.slurm
    options = [
        f"--job-name={run.file.name}",
        f"--output={plain_path(folder.resolve(), 'The folder of the scripts')}/slurm-%j.log",
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
        ]
        lines += ["#SBATCH hetjob", *(f"#SBATCH {option}" for option in other)]
    return lines


def cpus_per_rank(run: Run, serving: bool) -> int:
    """Cores of a rank: its device's share of the node's, where these are known, or what its threads
    keep busy.

    These are its steps, its checkpoints and every thread that decodes, or takes what other nodes
    have decoded; beside a GPU also the thread that runs the backward, and NCCL's.

    Raises:
        SpecError: the share is smaller than that.
    """
    cluster, spec = run.file.cluster, run.file.preprocess
    busy = (2 if cluster.device == "cpu" else 4) + (
        1 if serving or spec.addresses else spec.workers
    )
    if cluster.node_cores is None:
        return busy
    share = cluster.node_cores // cluster.gpus_per_node
    if share < busy:
        raise SpecError(
            f"A rank keeps {busy} cores busy, and its share of a node is {share}",
            f"cluster.node_cores: {cluster.node_cores}, cluster.gpus_per_node:"
            f" {cluster.gpus_per_node}, preprocess.workers: {spec.workers}",
            (
                f"Set preprocess.workers: {share - busy + spec.workers}."
                if share - busy + spec.workers > 0
                else (
                    "Let other nodes prepare the data (cluster.cpu_nodes), or leave"
                    " cluster.node_cores out."
                )
            ),
        )
    return share


def _paid(run: Run) -> list[str]:
    slurm = run.file.cluster.slurm
    return [
        *([f"--account={slurm.account}"] if slurm.account else []),
        *([f"--qos={slurm.qos}"] if slurm.qos else []),
    ]


def _serve(run: Run, plan_file: Path) -> str:
    """Start the preprocessing workers, and tell the ranks where they are."""
    spec, cluster = run.file.preprocess, run.file.cluster
    processes = max(1, cluster.cpu_node_cores // spec.workers)
    command = [
        "disttrain_cli",
        "data",
        "serve",
        str(run.path.resolve()),
        "--plan",
        str(plan_file.resolve()),
        "--host",
        "0.0.0.0",
        "--port",
        str(SERVE_PORT),
        "--processes",
        str(processes),
    ]
    assert spec.tls_cert is not None and spec.tls_key is not None
    values = common(run, plan_file, run.dir.logs) | {
        "command": shlex.join(command),
        "cert": shlex.quote(str(run.resolve(spec.tls_cert))),
        "key": shlex.quote(str(run.resolve(spec.tls_key))),
        "first": str(SERVE_PORT),
        "cores": str(cluster.cpu_node_cores),
        "processes": str(processes),
    }
    return filled("serve.sh", values).rstrip()


def _check_protected(run: Run) -> None:
    """Workers on other nodes need TLS and a token; SpecError names what is missing."""
    spec = run.file.preprocess
    missing = [
        name
        for name, value in (
            ("tls_ca", spec.tls_ca),
            ("tls_cert", spec.tls_cert),
            ("tls_key", spec.tls_key),
            ("token_file", spec.token_file),
        )
        if value is None
    ]
    if missing:
        raise SpecError(
            "Preprocessing nodes serve data on the network: that needs TLS and a token",
            f"missing in preprocess: {', '.join(missing)}",
            "Name the files there ({host} in tls_cert and tls_key stands for the node), or set "
            "cluster.cpu_nodes: 0.",
        )
    if spec.addresses:
        raise SpecError(
            "preprocess.addresses names workers already",
            f"cluster.cpu_nodes: {run.file.cluster.cpu_nodes}",
            "Remove one of the two.",
        )
