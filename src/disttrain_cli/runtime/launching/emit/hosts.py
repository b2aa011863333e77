"""Assignment of ranks to hosts: hostfiles, and filling of hosts in rank order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from disttrain_cli.calls import call
from disttrain_cli.errors import SpecError
from disttrain_cli.spec.hostfile import Host, read_hostfile
from disttrain_cli.spec.runfile import Run
from disttrain_cli.spec.stage_graph import StageGraph, stage_graph

if TYPE_CHECKING:
    from disttrain_cli.spec.plan import Plan
    from disttrain_cli.spec.profile import Profile


class Node(NamedTuple):
    """A host and the ranks that run on it."""

    host: str
    ranks: range


def hosts_of(run: Run) -> list[Host]:
    """Return the hosts of the hostfile, else `cluster.nodes` hosts with generated names."""
    cluster = run.file.cluster
    if cluster.hostfile is not None:
        return read_hostfile(run.resolve(cluster.hostfile))
    if cluster.nodes == 1:
        return [Host("localhost", cluster.gpus_per_node)]
    return _numbered(run)


def _numbered(run: Run) -> list[Host]:
    cluster = run.file.cluster
    return [Host(f"node-{number}", cluster.gpus_per_node) for number in range(cluster.nodes)]


def numbered_nodes(run: Run, plan: Plan, profile: Profile) -> list[Node]:
    """Return the nodes that the ranks need where a scheduler names the hosts.

    Raises SpecError as `place_ranks` does.
    """
    return place_ranks(stage_graph(plan.plan, profile.inputs.llm), _numbered(run))


def place_ranks(graph: StageGraph, hosts: Sequence[Host]) -> list[Node]:
    """Fill hosts with ranks in order, without splitting a replica over hosts where it fits on one.

    A replica that would not fit on the current host starts on the next one. Of a replica larger
    than a host, only the TP groups are not split. Unneeded hosts are left out.

    Raises:
        SpecError: the hosts have too few slots, or a TP group is larger than a host.
    """
    largest = max((host.slots for host in hosts), default=0)
    groups = sorted(
        group
        for stage in graph.first_stages
        for group in (
            stage.replica_groups() if stage.unit.tp_cp_size <= largest else stage.tp_groups()
        )
    )
    counts = [0] * len(hosts)
    current = 0
    for group in groups:
        while current < len(hosts) and counts[current] + len(group) > hosts[current].slots:
            current += 1
        if current == len(hosts):
            raise _too_few(graph, hosts, max(len(each) for each in groups))
        counts[current] += len(group)
    first = 0
    nodes: list[Node] = []
    for host, count in zip(hosts, counts, strict=True):
        if count:
            nodes.append(Node(host.name, range(first, first + count)))
        first += count
    return nodes


def _too_few(graph: StageGraph, hosts: Sequence[Host], most: int) -> SpecError:
    slots = sum(host.slots for host in hosts)
    what = (
        f"The plan's {graph.world_size} ranks do not fit on {len(hosts)} host(s) with {slots}"
        " slot(s)"
    )
    why = (
        ""
        if graph.world_size > slots
        else f"the ranks of a TP group (up to {most}) stay on one host"
    )
    return SpecError(
        what,
        why,
        "Name more hosts in cluster.hostfile or cluster.nodes, or plan for fewer GPUs:"
        f" {call('plan', gpus='N')}",
    )
