"""Which rank runs on which host: hostfiles, and hosts filled in the order of ranks without dividing a TP group."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from disttrain_cli.errors import SpecError
from disttrain_cli.runtime.units.topology import Topology
from disttrain_cli.spec.runfile import Run

LINE = re.compile(r"^(?P<name>[A-Za-z0-9](?:[A-Za-z0-9._:-]*[A-Za-z0-9])?)\s+slots\s*=\s*(?P<slots>[1-9]\d*)$")


class Host(NamedTuple):
    """A machine and the ranks it has room for."""

    name: str
    slots: int


class Node(NamedTuple):
    """A machine and the ranks that run there."""

    host: str
    ranks: range


def read_hostfile(path: Path) -> list[Host]:
    """Hosts of a DeepSpeed hostfile: lines such as `worker-1 slots=8`, comments from # on.

    Raises:
        SpecError: it cannot be read, a line is not of this form, a host is named twice, or none is.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError(f"cluster.hostfile: cannot read {path}", str(error), "Name a file of lines such as "
                        "'worker-1 slots=8'.") from None
    hosts: list[Host] = []
    for number, line in enumerate(lines, 1):
        text = line.partition("#")[0].strip()
        if not text:
            continue
        match = LINE.match(text)
        if match is None:
            raise SpecError(f"The hostfile {path} has a wrong line {number}", f"given: {line.strip()!r}; a line is a "
                            "host's name and its devices: worker-1 slots=8", "Correct the line.")
        if match["name"] in [host.name for host in hosts]:
            raise SpecError(f"The hostfile {path} names {match['name']} twice", f"again in line {number}",
                            "Give one line per host.")
        hosts.append(Host(match["name"], int(match["slots"])))
    if not hosts:
        raise SpecError(f"The hostfile {path} names no host", next_step="Add lines such as 'worker-1 slots=8'.")
    return hosts


def hosts_of(run: Run) -> list[Host]:
    """The hosts of the run file's hostfile; without one, `cluster.nodes` of them with names of ours."""
    cluster = run.file.cluster
    if cluster.hostfile is not None:
        return read_hostfile(run.resolve(cluster.hostfile))
    if cluster.nodes == 1:
        return [Host("localhost", cluster.gpus_per_node)]
    return [Host(f"node-{number}", cluster.gpus_per_node) for number in range(cluster.nodes)]


def place_ranks(topology: Topology, hosts: Sequence[Host]) -> list[Node]:
    """Fill hosts with ranks in order; a TP group that would not fit on a host whole begins on the next one.

    Hosts that are not needed are left out.

    Raises:
        SpecError: the hosts have too few slots, or a TP group is larger than a host.
    """
    groups = sorted(stage.tp_group(replica) for stage in topology.stages for replica in range(stage.unit.dp))
    counts = [0] * len(hosts)
    place = 0
    for group in groups:
        while place < len(hosts) and counts[place] + len(group) > hosts[place].slots:
            place += 1
        if place == len(hosts):
            raise _too_few(topology, hosts, max(len(each) for each in groups))
        counts[place] += len(group)
    first = 0
    nodes: list[Node] = []
    for host, count in zip(hosts, counts, strict=True):
        if count:
            nodes.append(Node(host.name, range(first, first + count)))
        first += count
    return nodes


def _too_few(topology: Topology, hosts: Sequence[Host], tp: int) -> SpecError:
    slots = sum(host.slots for host in hosts)
    what = f"The plan's {topology.world_size} ranks do not fit on {len(hosts)} host(s) with {slots} slot(s)"
    why = "" if topology.world_size > slots else f"the ranks of a TP group (up to {tp}) stay on one host"
    return SpecError(what, why, "Name more hosts in cluster.hostfile or cluster.nodes, or plan for fewer GPUs: "
                     "disttrain plan --gpus N")
