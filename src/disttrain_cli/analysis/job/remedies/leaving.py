"""Saving by leaving out a slow host, or on a single host a slow device: a plan for the others.

The planner uses the run's own times.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from disttrain_cli.analysis.causes import Finding
from disttrain_cli.analysis.graph import Graph
from disttrain_cli.analysis.job.database import Database
from disttrain_cli.analysis.job.hosts import blamed, host_of
from disttrain_cli.analysis.job.remedies.replanning import can_replan, replan
from disttrain_cli.analysis.job.remedies.replicas import record_of
from disttrain_cli.analysis.losses import Explained
from disttrain_cli.analysis.next_commands import plan_again
from disttrain_cli.analysis.result.verdicts import Place, Remedy


def left_out(
    database: Database,
    graph: Graph,
    why: Explained,
    findings: Sequence[Finding],
    where: Mapping[int, Place],
) -> Iterator[Remedy]:
    """Yield the job without the host of its slowest ranks, or on a single host their device.

    Its saving is that of fixing that rank, less what a plan for fewer devices loses of it, by the
    planner's predictions for both.

    Args:
        database: open traces.
        graph: recorded steps.
        why: `explain` of the graph's recorded passes.
        findings: causes that slow the steps.
        where: location by rank.
    """
    slow, ranks = next(
        (
            (one, found)
            for one in findings
            if (found := blamed(database.job, one.cause, one.places, where))
        ),
        (None, []),
    )
    record = record_of(database, graph)
    if slow is None or record is None:
        return
    hosts = {rank: host_of(database.job, rank, place.host) for rank, place in where.items()}
    devices = Counter[str | None]()
    for rank, place in where.items():
        devices[hosts[rank]] += round(graph.devices[str(place.unit)])
    slowest = {hosts[rank] for rank in ranks}
    everyone, rank = sum(devices.values()), min(ranks)
    if len(slowest) != 1 or (len(devices) < 2 and len(ranks) > 1) or everyone < 2:
        return
    (host,) = slowest
    if len(devices) > 1:
        left, without = everyone - devices[host], f"without host {host}"
    else:
        device = record.job.layout.devices[rank]
        left, without = everyone - 1, f"with left_out: [{device}], the device of rank {rank}"
    planned = replan(record, why, left) if can_replan(record) else None
    if planned is None:
        return
    measured_s = float(graph.window.mean())
    mended_s = measured_s - float(slow.alone_s.mean())
    step_s = mended_s * planned.then_s / planned.present_s
    yield Remedy(
        cause=slow.cause,
        change=f"a plan for {left} devices, {without}: {planned.layout.describe()}",
        command=f"{plan_again(database.paths)} --gpus {left}",
        basis="plan",
        gpus=left - everyone,
        at_most=False,
        step_s=step_s,
        gain_s=measured_s - step_s,
        gain_pct=100 * (measured_s - step_s) / measured_s,
    )
