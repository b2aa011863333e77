"""Faults of a rehearsal in the simulator: a step with parts that are slower than in the profile."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence

from disttrain_cli.costs.layout import CostedStage
from disttrain_cli.costs.preparing import item_s
from disttrain_cli.errors import SpecError
from disttrain_cli.simulation.timeline import Pipeline
from disttrain_cli.spec.plan import Layout
from disttrain_cli.spec.profile import Profile
from disttrain_cli.spec.runfile.rehearse import FaultSpec
from disttrain_cli.spec.stage_graph import Stage, stage_graph

EDIT = "Correct it in the run file."


def check_faults(
    stages: Sequence[CostedStage], faults: Sequence[FaultSpec], profile: Profile
) -> None:
    """Reject faults that this layout cannot have.

    Raises:
        SpecError: a unit, stage or replica that the layout lacks, a link after the last stage, or a
            worker of a unit without data preparation; the message names the field and the allowed
            values.
    """
    prepared = list(dict.fromkeys(stage.unit.name for stage in stages if _loads(profile, stage)))
    for number, fault in enumerate(faults):
        if fault.slow == "node":
            continue
        _numbers(stages, number, fault)
        if fault.slow == "worker" and fault.unit not in prepared:
            raise _error(number, "unit", fault.unit, "no data are prepared for it", prepared)


def _loads(profile: Profile, stage: CostedStage) -> bool:
    """Return True if preparing the data that a stage loads takes time, by the profile."""
    return any(
        item_s(profile, module) * profile.modules[module].work_per_sequence.items > 0.0
        for module in stage.begins
    )


def placed(
    faults: Sequence[FaultSpec], first: Layout, now: Layout, llm: str, gpus_per_node: int
) -> list[FaultSpec]:
    """Return the faults in terms of a layout: a fault belongs to devices, not to their work.

    A slow node becomes slow ranks on it. Slow ranks, stages and hosts are named by their
    coordinates in the `first` layout, and move with their devices; faults of links and workers stay
    if their coordinates exist.
    """
    replicas = [
        (stage, replica, set(of_replica))
        for stage in stage_graph(now, llm).first_stages
        for replica, of_replica in enumerate(devices_of(now, stage))
    ]
    moved: list[FaultSpec] = []
    for fault in faults:
        if fault.slow != "node" and (now == first or fault.slow in ("link", "worker")):
            if any(
                (stage.unit.name, replica) == (fault.unit, fault.replica or 0)
                and (fault.slow == "worker" or stage.index == fault.stage)
                and (fault.slow != "link" or stage.after)
                for stage, replica, _ in replicas
            ):
                moved.append(fault)
            continue
        slow = _slow_devices(fault, first, llm, gpus_per_node)
        moved += [
            FaultSpec(
                slow="host" if fault.slow == "host" else "rank",
                unit=stage.unit.name,
                stage=stage.index,
                replica=replica,
                factor=fault.factor,
                from_step=fault.from_step,
            )
            for stage, replica, of_replica in replicas
            if of_replica & slow
        ]
    return moved


def devices_of(layout: Layout, stage: Stage) -> list[list[int]]:
    """Return the devices of each replica of a stage."""
    devices, width = layout.devices, stage.unit.tp_cp_size
    return [
        [devices[rank] for rank in stage.ranks[first : first + width]]
        for first in range(0, len(stage.ranks), width)
    ]


def _slow_devices(fault: FaultSpec, first: Layout, llm: str, gpus_per_node: int) -> set[int]:
    if fault.node is not None:
        return set(range(fault.node * gpus_per_node, (fault.node + 1) * gpus_per_node))
    stage = next(
        one
        for one in stage_graph(first, llm).stages
        if (one.unit.name, one.index) == (fault.unit, fault.stage)
    )
    return {
        device
        for replica, of_replica in enumerate(devices_of(first, stage))
        if fault.replica in (None, replica)
        for place, device in enumerate(of_replica)
        if fault.cp_rank in (None, place // stage.unit.tp)
    }


def begun(faults: Iterable[FaultSpec], step: int) -> list[FaultSpec]:
    """Return the faults that are active in a step."""
    return [fault for fault in faults if fault.from_step <= step]


def inject(
    pipeline: Pipeline, stages: Sequence[CostedStage], faults: Sequence[FaultSpec]
) -> Pipeline:
    """Multiply the pipeline's times by the factors of the faults; `stages` are those of its layout.

    Raises:
        SpecError: as `check_faults`; a slow worker if the pipeline's data are not simulated.
    """
    forward_s, backward_s = pipeline.forward_s.copy(), pipeline.backward_s.copy()
    transfer_s = pipeline.transfer_s.copy()
    load_s = None if pipeline.load_s is None else pipeline.load_s.copy()
    weight_s = None if pipeline.weight_s is None else pipeline.weight_s.copy()
    for number, fault in enumerate(faults):
        numbers = _numbers(stages, number, fault)
        replicas = slice(None) if fault.replica is None else fault.replica
        if fault.slow == "worker":
            if load_s is None:
                raise _error(
                    number,
                    "slow",
                    fault.slow,
                    "no data are prepared here",
                    ["rank", "stage", "link", "host"],
                )
            load_s[:, numbers, replicas] *= fault.factor
        elif fault.slow == "link":
            for cut, (sender, _) in enumerate(pipeline.cuts):
                transfer_s[cut] *= fault.factor if sender in numbers else 1.0
        else:
            for times_s in (forward_s, backward_s, *([] if weight_s is None else [weight_s])):
                times_s[:, numbers, replicas] *= fault.factor
    return dataclasses.replace(
        pipeline,
        forward_s=forward_s,
        backward_s=backward_s,
        weight_s=weight_s,
        transfer_s=transfer_s,
        load_s=load_s,
    )


def slowdown(
    faults: Sequence[FaultSpec], slow: str, unit: str, stage: int, replica: int | None = None
) -> float:
    """Return the factor of all faults of one kind at one location; `inject` applies all of them."""
    return math.prod(
        fault.factor
        for fault in faults
        if fault.slow == slow
        and fault.unit == unit
        and (slow == "worker" or fault.stage == stage)
        and fault.replica in (None, replica)
    )


def waited(faults: Sequence[FaultSpec], unit: str, stage: int, replica: int, cp_rank: int) -> float:
    """Return the share of its passes in which a rank waits for slow ones of its CP group."""
    others = [
        fault.factor
        for fault in faults
        if (fault.unit, fault.stage, fault.replica) == (unit, stage, replica)
        and fault.cp_rank not in (None, cp_rank)
    ]
    return max(0.0, 1 - 1 / math.prod(others))


def _numbers(stages: Sequence[CostedStage], number: int, fault: FaultSpec) -> list[int]:
    """Return the indices of the stages that a fault affects: all on the same ranks.

    SpecError if the layout lacks them.
    """
    of_unit = [index for index, stage in enumerate(stages) if stage.unit.name == fault.unit]
    if not of_unit:
        raise _error(
            number,
            "unit",
            fault.unit,
            "the plan has no such unit",
            list(dict.fromkeys(stage.unit.name for stage in stages)),
        )
    unit = stages[of_unit[0]].unit
    if fault.replica is not None and fault.replica >= unit.dp:
        raise _error(
            number,
            "replica",
            fault.replica,
            f"unit {unit.name} has no such replica",
            range(unit.dp),
        )
    if fault.cp_rank is not None and fault.cp_rank >= unit.cp:
        raise _error(
            number,
            "cp_rank",
            fault.cp_rank,
            f"CP groups of unit {unit.name} have no such rank",
            range(unit.cp),
        )
    if fault.slow == "worker":
        return of_unit
    if fault.stage >= unit.pp:
        raise _error(
            number, "stage", fault.stage, f"unit {unit.name} has no such stage", range(unit.pp)
        )
    if fault.slow == "link" and not stages[of_unit[fault.stage]].after:
        linked = [stage for stage in stages if stage.after]
        allowed = [stage.index for stage in linked if stage.unit.name == unit.name]
        raise _error(
            number,
            "stage",
            fault.stage,
            f"nothing comes after {stages[of_unit[fault.stage]].name}",
            allowed or list(dict.fromkeys(f"unit {stage.unit.name}" for stage in linked)),
        )
    return of_unit[fault.stage :: unit.pp]


def _error(
    number: int, field: str, given: object, why: str, allowed: Sequence[object]
) -> SpecError:
    where = f"rehearse.faults[{number}].{field}"
    if isinstance(allowed, range) and len(allowed) > 2:
        shown = f"{allowed[0]} to {allowed[-1]}"
    else:
        shown = ", ".join(map(str, allowed)) or "none"
    return SpecError(f"{where}: {why} (given: {given})", f"allowed: {shown}", EDIT)
