"""Emulated cluster of a rehearsal: devices, faults and clock that persist over starts and plans."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from disttrain_cli.costs.layout import stages_of
from disttrain_cli.data.index.sample_index import Index
from disttrain_cli.data.ordering.loads import order_loads
from disttrain_cli.data.ordering.orders import Orders
from disttrain_cli.data.slots import Assignment
from disttrain_cli.runtime.rehearsal.joining import joined_layout, replicas_of
from disttrain_cli.runtime.rehearsal.setting import Setting, setting_of
from disttrain_cli.simulation.faults import begun, devices_of, inject, placed
from disttrain_cli.simulation.grouping import grouped
from disttrain_cli.simulation.pipeline import simulate_steps
from disttrain_cli.simulation.routing import with_routing
from disttrain_cli.simulation.step import fed, pipeline_of
from disttrain_cli.spec.plan import Layout, Plan
from disttrain_cli.spec.profile import Profile
from disttrain_cli.spec.runfile import Run
from disttrain_cli.spec.runfile.rehearse import FaultSpec
from disttrain_cli.spec.stage_graph import stage_graph
from disttrain_cli.spec.trace import Rehearsed


@dataclass(frozen=True)
class Emulation:
    """One start on the emulated cluster."""

    plan: Plan
    setting: Setting
    first: int  # first step
    faults: list[FaultSpec]  # with the plan's coordinates
    known: dict[int, Assignment]  # orders of its steps by the policy `best`
    devices: list[list[int]]  # by process; devices of lost nodes come first
    dies: dict[int, int]  # first step that it does not finish, by process on a lost node

    def rank_of(self, process: int) -> int:
        """Return the rank that a process stands for, or the first of several."""
        return self.plan.plan.devices.index(self.devices[process][0])


@dataclass
class EmulatedCluster:
    """Emulated cluster, and the starts so far.

    Args:
        first: plan of the rehearsal's first start.
        steps: total number of steps.
    """

    run: Run
    profile: Profile
    index: Index
    first: Plan
    steps: int
    began_ns: int = field(default_factory=time.monotonic_ns)
    starts: list[Emulation] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.time_scale = setting_of(self.run.file, self.first, self.profile).time_scale

    def start(self, plan: Plan, first: int, reached: int) -> Emulation:
        """Return a start of a plan from step `first`; `reached` is the first step not yet done."""
        file, llm = self.run.file, self.profile.inputs.llm
        setting = replace(setting_of(file, plan, self.profile), time_scale=self.time_scale)
        gone = {lost.node for lost in file.rehearse.lost}
        devices = [
            sorted(own, key=lambda device: device // file.cluster.gpus_per_node not in gone)
            for own in _devices_of(plan.plan, llm, setting)
        ]
        nodes = [{device // file.cluster.gpus_per_node for device in own} for own in devices]
        self.starts.append(
            Emulation(
                plan,
                setting,
                first,
                placed(
                    file.rehearse.faults,
                    self.first.plan,
                    plan.plan,
                    llm,
                    file.cluster.gpus_per_node,
                ),
                found_orders(
                    self.run, plan.plan, self.profile, self.index, range(first, self.steps + 1)
                ),
                devices,
                {
                    process: first if reached >= lost.step else lost.step
                    for lost in file.rehearse.lost
                    for process, own in enumerate(nodes)
                    if lost.node in own
                },
            )
        )
        return self.starts[-1]

    def payload(self, start: Emulation) -> dict[str, Any]:
        """Return the payload of a start's processes, apart from fields common to all starts."""
        return {
            "run": self.run.source,
            "plan": start.plan.model_dump(mode="json"),
            "profile": self.profile.model_dump(mode="json"),
            "shares": start.setting.shares,
            "assignments": {
                step: [one.positions.tolist(), one.carry] for step, one in start.known.items()
            },
            "gpus_per_node": self.run.file.cluster.gpus_per_node,
            "time_scale": self.time_scale,
            "began_ns": self.began_ns,
            "faults": [fault.model_dump(mode="json") for fault in start.faults],
            "dies": start.dies,
        }

    def rehearsed(self, start: Emulation) -> Rehearsed:
        """Return the description of a start for the analysis."""
        spec = self.run.file.rehearse
        return Rehearsed(
            processes=start.setting.processes,
            time_scale=self.time_scale,
            messages=spec.messages,
            noise=spec.noise,
            faults=start.faults,
            distribution=None if spec.distribution is None else spec.distribution.name,
        )

    def simulated(self, steps: Sequence[int]) -> list[dict[str, Any]]:
        """Return the simulator's time of consecutive steps, with the prediction for their plan."""
        ran = {step: start for start in self.starts for step in range(start.first, self.steps)}
        return [
            row | {"predicted_iteration_s": start.plan.predicted.iteration_s}
            for start in self.starts
            if (own := [step for step in steps if ran[step] is start])
            for row in simulated(
                self.run,
                start.plan.plan,
                self.profile,
                self.index,
                start.setting,
                own,
                start.known,
                start.faults,
            )
        ]


def _devices_of(layout: Layout, llm: str, setting: Setting) -> list[list[int]]:
    """Return the devices that each process stands for."""
    of_process: dict[int, list[int]] = {}
    processes = stage_graph(joined_layout(layout, setting.shares), llm).stages
    for joined, whole in zip(processes, stage_graph(layout, llm).stages, strict=True):
        of_replica = devices_of(layout, whole)
        for number, process in enumerate(joined.ranks):
            of_process[process] = [
                device
                for replica in replicas_of(setting.shares[whole.unit.name], number)
                for device in of_replica[replica]
            ]
    return [of_process[process] for process in sorted(of_process)]


def found_orders(
    run: Run, layout: Layout, profile: Profile, index: Index, steps: range
) -> dict[int, Assignment]:
    """Return the orders of the policy `best` for the steps, computed once for all processes.

    The processes share few cores. In a cluster, every process computes them during the previous
    step. Other policies take no time.
    """
    if run.file.train.ordering_on(profile.device.kind) != "best":
        return {}
    orders = Orders(run.file, layout, index, profile)
    return {step: orders.assignment(step) for step in steps}


def simulated(
    run: Run,
    layout: Layout,
    profile: Profile,
    index: Index,
    setting: Setting,
    steps: Sequence[int],
    known: Mapping[int, Assignment],
    faults: Sequence[FaultSpec],
) -> list[dict[str, Any]]:
    """Return the simulator's times for exactly these steps.

    With the same orders, processes, data, routing and faults, without noise.
    """
    stages, orders, pipelines = (
        stages_of(profile, layout),
        Orders(run.file, layout, index, profile, known),
        [],
    )
    spec = run.file.preprocess
    shares = [setting.shares[stage.unit.name] for stage in stages]
    for step in steps:
        loads = order_loads(orders.of(step)[0], layout)
        pipeline = pipeline_of(profile, layout, stages, loads, run.file.cluster.gpus_per_node)
        pipeline = with_routing(pipeline, profile, stages, loads, run.file.train.seed, step)
        pipeline = fed(pipeline, profile, stages, loads, spec.workers, spec.prefetch_slots)
        pipelines.append(grouped(inject(pipeline, stages, begun(faults, step)), shares))
    return [
        {"step": step, "iteration_s": timeline.iteration_s}
        for step, timeline in zip(steps, simulate_steps(pipelines), strict=True)
    ]
