"""Early checks of `--emit` for jobs that could not start, before anything expensive is imported."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from disttrain_cli.calls import argument, call
from disttrain_cli.errors import SpecError
from disttrain_cli.runtime.launching.emit import jobset, skypilot, slurm, torchrun
from disttrain_cli.runtime.launching.emit.hosts import hosts_of, numbered_nodes, place_ranks
from disttrain_cli.runtime.launching.emit.visible import (
    check_there,
    downloads,
    named_files,
    protecting_files,
    unshared,
)
from disttrain_cli.spec.runfile import Run
from disttrain_cli.spec.stage_graph import stage_graph

if TYPE_CHECKING:
    from disttrain_cli.spec.plan import Plan
    from disttrain_cli.spec.profile import Profile

LAST_PORT = 65535


def check_startable(
    run: Run, kind: str, folder: Path, plan_file: Path, *, preflight: bool
) -> list[str]:
    """Check the run file's settings for a job; return warnings about what may stop it.

    Args:
        kind: of `--emit`.
        folder: of the scripts.

    Raises:
        SpecError: the job could not start.
    """
    cluster = run.file.cluster
    if run.file.train.on_straggler == "replan":
        raise SpecError(
            "Ranks started by another launcher are not replanned",
            "train.on_straggler: replan; a scheduler gives and takes hosts, and starts as many"
            " ranks as the plan has",
            "Set train.on_straggler: tell, and end the job by its verdict"
            f" ({call('watch')}, {argument('condition', 'verdict.cause == worker')}); then leave"
            " the host out, plan, and write the scripts again.",
        )
    serving = cluster.cpu_nodes > 0 and not preflight
    files = named_files(run)
    if kind in ("torchrun", "slurm"):
        if cluster.slurm.setup is not None:
            files["cluster.slurm.setup"] = _setup(run, cluster.slurm.setup)
        files |= protecting_files(run, serving)
    check_there(files)
    restarts = 0 if preflight else run.file.train.restarts
    # schedulers restart the other kinds, at the same port
    if kind in ("torchrun", "skypilot") and cluster.port + restarts > LAST_PORT:
        raise SpecError(
            "There are too few ports for all restarts",
            f"cluster.port: {cluster.port}, train.restarts: {restarts}, each at the next port;"
            f" the last is {LAST_PORT}",
            "Set a lower cluster.port.",
        )
    if kind == "jobset":
        jobset.check(run, folder, serving, plan_file=plan_file)
        return downloads(run, str(cluster.kubernetes.pod_patch.spec))
    if kind == "skypilot":
        skypilot.check(run, folder, serving, plan_file=plan_file)
        return downloads(run)
    if kind == "slurm":
        slurm.check(run, folder, serving)
    else:
        torchrun.check(run, serving)
        if len(hosts_of(run)) == 1:
            return []
    return unshared({"the run file": run.path.resolve(), "--out": folder.resolve()} | files)


def _setup(run: Run, given: str) -> Path:
    """Return the script that is sourced first; raises SpecError if it is a folder."""
    path = run.resolve(given)
    if path.is_dir():
        raise SpecError(
            f"cluster.slurm.setup: {path} is a folder",
            "the job sources it with bash",
            "Name the script in it, such as bin/activate of a virtual environment.",
        )
    return path


def check_planned(run: Run, plan: Plan, profile: Profile, kind: str) -> list[str]:
    """Check a plan's devices, and that its ranks fit on the hosts; return warnings.

    Raises:
        SpecError: ranks share GPUs, the plan leaves devices out, or its ranks do not fit on the
            hosts.
    """
    if run.file.cluster.ranks_per_gpu > 1:
        raise SpecError(
            "Ranks that share GPUs are started on this machine alone",
            f"cluster.ranks_per_gpu: {run.file.cluster.ranks_per_gpu}; schedulers give each rank a"
            " GPU",
            f"Remove it, then: {call('profile')} && {call('plan')}",
        )
    if plan.plan.left_out:
        raise SpecError(
            "The plan leaves devices out",
            f"plan.left_out: {', '.join(map(str, plan.plan.left_out))}; scripts start ranks on"
            " all devices of the hosts that they are given",
            "Give the job other hosts (cluster.hostfile, sbatch --exclude), and plan again:"
            f" {call('plan', gpus='N')}",
        )
    if kind == "torchrun":
        place_ranks(stage_graph(plan.plan, profile.inputs.llm), hosts_of(run))
        return []
    numbered_nodes(run, plan, profile)
    cluster = run.file.cluster
    if profile.device.kind != "cpu" or cluster.device == "cpu":
        return []
    return [
        f"Note: the plan is for CPUs ({profile.device.name}), and the job asks for"
        f" {cluster.gpus_per_node} GPUs per node, which its ranks would leave idle. Profile and"
        " plan on a GPU node, or set cluster.device: cpu."
    ]
