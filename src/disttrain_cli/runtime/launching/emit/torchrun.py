"""`--emit torchrun`: one script per host, and the ssh commands that start them."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from disttrain_cli.errors import SpecError
from disttrain_cli.runtime.launching.emit.hosts import Node, hosts_of, place_ranks
from disttrain_cli.runtime.launching.emit.scripts import Emitted, Start, common, filled, write_job
from disttrain_cli.runtime.launching.emit.serving import check_no_nodes
from disttrain_cli.spec.runfile import Run
from disttrain_cli.spec.stage_graph import stage_graph
from disttrain_cli.spec.whole import write_whole

if TYPE_CHECKING:
    from disttrain_cli.spec.plan import Plan
    from disttrain_cli.spec.profile import Profile


def emit_torchrun(run: Run, plan: Plan, profile: Profile, folder: Path, start: Start) -> Emitted:
    """Write a job file and one script per host into `folder`, a path that all hosts must share.

    Raises:
        SpecError: as `check`, or the hosts have too few slots.
    """
    check(run, run.file.cluster.cpu_nodes > 0 and not start.preflight)
    nodes = place_ranks(stage_graph(plan.plan, profile.inputs.llm), hosts_of(run))
    job = write_job(run, plan, profile, folder, nodes, start)
    paths = [
        write_whole(_script(folder, number), text)
        for number, text in enumerate(_scripts(run, nodes, job, start))
    ]
    return Emitted(
        job=str(job), scripts=[str(path) for path in paths], commands=commands(nodes, folder)
    )


def check(run: Run, serving: bool) -> None:
    """Refuse a job that could not start, before there is a plan.

    Raises:
        SpecError: the hosts are not known, or one of several is this host's loopback;
            preprocessing nodes.
    """
    cluster = run.file.cluster
    if serving:
        check_no_nodes(run, "torchrun's scripts start ranks")
    if cluster.nodes > 1 and cluster.hostfile is None:
        raise SpecError(
            "torchrun must know the hosts by name",
            f"cluster.nodes: {cluster.nodes}, cluster.hostfile: none",
            "Write a hostfile with lines such as 'worker-1 slots=8', and name it "
            "in cluster.hostfile.",
        )
    names = [host.name for host in hosts_of(run)]
    loopback = [name for name in names if name == "localhost" or name.startswith("127.")]
    if 0 < len(loopback) < len(names):
        raise SpecError(
            f"Other hosts cannot reach {loopback[0]}",
            f"cluster.hostfile names it besides {next(n for n in names if n not in loopback)}; on"
            " every host it is that host itself",
            "Name the host as the others know it.",
        )


def _scripts(run: Run, nodes: list[Node], job: Path, start: Start) -> list[str]:
    values = common(run, job, start) | {
        "nodes": str(len(nodes)),
        "master": master(nodes),
        "hosts": shlex.quote(" ".join(node.host for node in nodes)),
    }
    if len(nodes) == 1 and run.file.cluster.interface is None:
        values["exports"] = "export GLOO_SOCKET_IFNAME=lo"
    begin = (
        f'{values["python"]} disttrain_cli.runtime.launching.begin "$job" --again "$attempt" --port'
        ' "$port"'
    )
    return [
        filled(
            "torchrun.sh",
            values
            | {
                "node": number,
                "host": shlex.quote(node.host),
                "ranks": len(node.ranks),
                "span": f"{node.ranks[0]} to {node.ranks[-1]}",
                "begin": begin if number == 0 else "",
                "finish": values["finish"] if number == 0 else "",
            },
        )
        for number, node in enumerate(nodes)
    ]


def master(nodes: list[Node]) -> str:
    """Return the rendezvous' address: the first host, or loopback if it is the only one."""
    return "127.0.0.1" if len(nodes) == 1 else shlex.quote(nodes[0].host)


def commands(nodes: Sequence[Node], folder: Path) -> list[str]:
    """Return the command for each host, which needs nothing but a shell."""
    commands_of = [
        f"bash {shlex.quote(str(_script(folder, number).resolve()))}"
        for number in range(len(nodes))
    ]
    if len(nodes) == 1:
        return commands_of
    return [
        shlex.join(["ssh", node.host, command])
        for node, command in zip(nodes, commands_of, strict=True)
    ]


def _script(folder: Path, node: int) -> Path:
    return folder / f"node-{node}.sh"
