"""What leaving a slow host out would gain: a plan for the other hosts' devices, by the run's own
times."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from disttrain_cli.analysis.causes import Finding
from disttrain_cli.analysis.graph import Graph
from disttrain_cli.analysis.job.database import Database
from disttrain_cli.analysis.job.remedies.replanning import can_replan, replan
from disttrain_cli.analysis.job.remedies.replicas import record_of
from disttrain_cli.analysis.losses import Explained
from disttrain_cli.analysis.next_commands import plan_again
from disttrain_cli.analysis.result.verdicts import Place, Remedy
from disttrain_cli.analysis.verdict import OF_HOSTS


def without_hosts(
    database: Database,
    graph: Graph,
    why: Explained,
    findings: Sequence[Finding],
    where: Mapping[int, Place],
) -> Iterator[Remedy]:
    """The job without the host of its slowest rank, where that is known and there are others.

    What it gains is what mending that rank gains, and what a plan for fewer devices loses of it, by
    the planner's predictions for both.

    Args:
        where: by rank.
    """
    devices = Counter[str | None]()
    for place in where.values():
        devices[place.host] += round(graph.devices[str(place.unit)])
    slow = next((one for one in findings if one.cause in OF_HOSTS), None)
    hosts = {where[one.rank].host for one in (slow.places if slow else []) if one.rank is not None}
    record = record_of(database, graph)
    if slow is None or len(hosts) != 1 or len(devices) < 2 or record is None:
        return
    (host,) = hosts
    left = sum(devices.values()) - devices[host]
    planned = replan(record, why, left) if can_replan(record) else None
    if planned is None:
        return
    measured_s = float(graph.window.mean())
    mended_s = measured_s - float(slow.alone_s.mean())
    step_s = mended_s * planned.then_s / planned.present_s
    yield Remedy(
        cause=slow.cause,
        change=f"a plan for {left} devices, without host {host}: {planned.layout.describe()}",
        command=f"{plan_again(database.paths)} --gpus {left}",
        basis="plan",
        gpus=left - sum(devices.values()),
        at_most=False,
        step_s=step_s,
        gain_s=measured_s - step_s,
        gain_pct=100 * (measured_s - step_s) / measured_s,
    )
