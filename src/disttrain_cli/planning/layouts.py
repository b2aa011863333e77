"""Construction of layouts from shapes, from a search's candidate, or from a baseline's layout."""

from __future__ import annotations

from collections.abc import Sequence

from disttrain_cli.planning.options import layers_per_stage
from disttrain_cli.planning.search import Candidate
from disttrain_cli.planning.units import Cluster, Unit, holder_of
from disttrain_cli.spec.plan import Layout, Strategy, UnitPlan
from disttrain_cli.spec.shape import ParallelShape
from disttrain_cli.spec.stage_graph import in_line


def layout_with(
    units: list[Unit],
    cluster: Cluster,
    shapes: Sequence[ParallelShape],
    slot_sequences: int,
    strategy: Strategy,
) -> Layout | None:
    """Return the layout of these shapes with the best partition of layers; None if none fits."""
    slots = cluster.batch // slot_sequences
    stages = in_line([shape.pp for shape in shapes], holder_of(units))
    plans: list[UnitPlan] = []
    for unit, shape, left in zip(units, shapes, stages, strict=True):
        layers = layers_per_stage(unit, shape, slot_sequences, slots, left - shape.pp)
        if layers is None:
            return None
        plans.append(
            UnitPlan(
                name=unit.name,
                modules=list(unit.modules),
                tp=shape.tp,
                cp=shape.cp,
                cp_comm_type=shape.cp_comm_type,
                ep=shape.ep,
                dp=shape.dp,
                pp=shape.pp,
                gpus=shape.gpus,
                layers_per_stage=layers,
                checkpointing=shape.recompute,
                tp_overlap=unit.overlaps(shape),
                ep_overlap=unit.overlaps_exchanges(shape),
                module_tp=dict.fromkeys(unit.replicated, 1),
            )
        )
    return Layout(
        strategy=strategy,
        global_batch_size=cluster.batch,
        microbatch_size=slot_sequences // shapes[holder_of(units)].dp,
        microbatches=slots,
        gpus_used=sum(shape.gpus for shape in shapes),
        zero_stage=cluster.zero_stage,
        trained=None if cluster.trained is None else list(cluster.trained),
        overlap=cluster.overlaps,
        units=plans,
    )


def layout_of(
    units: list[Unit], cluster: Cluster, candidate: Candidate, strategy: Strategy
) -> Layout:
    """Return the layout of a candidate, with the layers of every stage."""
    layout = layout_with(units, cluster, candidate.units, candidate.slot_sequences, strategy)
    assert layout is not None, "the search kept a shape that does not fit"
    return layout


def baseline_layout(layout: Layout, units: list[Unit], strategy: Strategy) -> Layout:
    """Return a baseline's layout of these units for another strategy and its cluster's features."""
    plans = [
        plan.model_copy(
            update={
                "tp_overlap": unit.overlaps(plan.shape),
                "ep_overlap": unit.overlaps_exchanges(plan.shape),
            }
        )
        for unit, plan in zip(units, layout.units, strict=True)
    ]
    overlap = units[0].cluster.overlaps
    return layout.model_copy(update={"strategy": strategy, "overlap": overlap, "units": plans})
