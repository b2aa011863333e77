"""Traffic over the links in one step of a layout, and the throughput required of CPU nodes."""

from __future__ import annotations

import math

from disttrain_cli.costs import experts
from disttrain_cli.costs.context import exchanged_bytes, messages_s, ranks_per_node, rows
from disttrain_cli.costs.freezing import Backward
from disttrain_cli.costs.layout import (
    GRADIENT_BYTES,
    CostedStage,
    crossings,
    ends_of,
    in_one_node,
    partial_bytes,
    reduction_of,
    weight_rings,
)
from disttrain_cli.costs.links import GIGABIT_BYTES, ring_bytes
from disttrain_cli.costs.memory import GIB, WEIGHT_BYTES
from disttrain_cli.costs.preparing import item_s
from disttrain_cli.costs.replicated import dealt_bytes
from disttrain_cli.spec.index import KINDS
from disttrain_cli.spec.layer_costs import Pass
from disttrain_cli.spec.plan import Layout, UnitPlan
from disttrain_cli.spec.prediction import PreprocessNeed, Traffic
from disttrain_cli.spec.profile import Profile
from disttrain_cli.spec.work import Work


def traffic_of(
    profile: Profile, layout: Layout, stages: list[CostedStage], gpus_per_node: int
) -> list[Traffic]:
    """Return the messages of one step by kind and unit; kinds that send nothing are omitted."""
    rows = _crossings(profile, layout, stages, gpus_per_node)
    for unit in layout.units:
        of_unit = [stage for stage in stages if stage.unit is unit]
        rows += [
            *_over_replicas(profile, layout, of_unit, gpus_per_node),
            *_tensor_parallel(profile, layout, of_unit),
            *_context_parallel(profile, layout, of_unit),
            *_expert_parallel(profile, layout, of_unit, gpus_per_node),
        ]
    return [row for row in rows if row.job_gib > 0]


def _crossings(
    profile: Profile, layout: Layout, stages: list[CostedStage], gpus_per_node: int
) -> list[Traffic]:
    """Return activations and gradients over the cuts between stages; those inside a unit summed."""
    rows: dict[tuple[str, str | None, bool], Traffic] = {}
    for before, after in crossings(stages):
        inside = in_one_node(ends_of(before, after), gpus_per_node)
        sent = before.cut_bytes * layout.global_batch_size * (2 if before.gradients_back else 1)
        rank_bytes = sent / min(len(before.ranks), len(after.ranks))
        row = Traffic(
            kind="between_units" if after.index == 0 else "between_stages",
            unit=before.unit.name,
            to=after.unit.name if after.index == 0 else None,
            inside_a_node=inside,
            job_gib=sent / GIB,
            rank_gib=rank_bytes / GIB,
            rank_s=rank_bytes / (profile.links.of(inside).p2p_gbps * GIGABIT_BYTES),
        )
        key = (row.unit, row.to, inside)
        if key in rows:  # for cuts inside a unit the busiest rank counts
            other = rows[key]
            row = (row if row.rank_gib > other.rank_gib else other).model_copy(
                update={"job_gib": row.job_gib + other.job_gib}
            )
        rows[key] = row
    return list(rows.values())


def _over_replicas(
    profile: Profile, layout: Layout, of_unit: list[CostedStage], gpus_per_node: int
) -> list[Traffic]:
    """Return the reduction of gradients and, under ZeRO-1, gathering of weights for a unit.

    They run over the ranks of each stage that hold the same parameters, or the same experts.
    """
    fullest = max(of_unit, key=lambda stage: stage.trained)
    rings = weight_rings(profile, fullest, gpus_per_node)
    kinds = [("gradients", reduction_of(layout), GRADIENT_BYTES)]
    if layout.zero_stage == 1:
        kinds.append(("weights", "all_gather", WEIGHT_BYTES[profile.precision]))
    rows: list[Traffic] = []
    for kind, operation, number_bytes in kinds:
        sent = [  # bytes per number, gigabits per second, [stages] numbers
            (
                ring_bytes(operation, number_bytes, size),
                getattr(link, f"{operation}_gbps"),
                [count(stage) for stage in (fullest, *of_unit)],
            )
            for link, size, count in (
                (rings.link, rings.size, lambda stage: stage.trained - stage.trained_experts),
                (rings.experts_link, rings.experts_size, lambda stage: stage.trained_experts),
            )
        ]
        row = {
            "kind": kind,
            "unit": fullest.unit.name,
            "inside_a_node": in_one_node(ends_of(fullest), gpus_per_node),
            "job_gib": sum(size * sum(each[1:]) for size, _, each in sent)
            * len(fullest.ranks)
            / GIB,
            "rank_gib": sum(size * each[0] for size, _, each in sent) / GIB,
            "rank_s": sum(size * each[0] / (gbps * GIGABIT_BYTES) for size, gbps, each in sent),
        }
        rows.append(Traffic.model_validate(row))
    return rows


def _tensor_parallel(profile: Profile, layout: Layout, of_unit: list[CostedStage]) -> list[Traffic]:
    """Return messages inside a unit's TP groups; their time is part of layers and reduction."""
    unit = of_unit[0].unit
    if unit.tp == 1:
        return []
    stages = [
        sum(_sent_bytes(profile, layout, unit, *layer) for layer in stage.held)
        + sum(
            layout.global_batch_size
            * dealt_bytes(profile, cost.module, unit, bool(cost.backward_ms.any()))
            for cost in stage.costs
            if cost.module in unit.module_tp
        )
        + unit.dp_cp_size * ring_bytes("all_reduce", partial_bytes(layout, stage), unit.tp)
        for stage in of_unit
    ]
    rank_bytes = max(stages) / unit.dp_cp_size
    return [
        Traffic(
            kind="tensor_parallel",
            unit=unit.name,
            inside_a_node=True,
            job_gib=unit.tp * sum(stages) / GIB,
            rank_gib=rank_bytes / GIB,
            rank_s=rank_bytes / (profile.links.all_reduce_gbps * GIGABIT_BYTES),
        )
    ]


def _expert_parallel(
    profile: Profile, layout: Layout, of_unit: list[CostedStage], gpus_per_node: int
) -> list[Traffic]:
    """Return the rows that a unit's EP groups exchange; their time is part of the layers' own."""
    unit = of_unit[0].unit
    if unit.ep == 1:
        return []
    sequences = layout.global_batch_size / unit.dp / unit.tp_cp_size
    stages = []  # bytes and seconds of a rank
    for stage in of_unit:
        shape = experts.placed(profile, stage)
        messages = [
            (
                sequences * size * rows(profile, name, profile.modules[name].work_per_sequence),
                link.all_gather_gbps * GIGABIT_BYTES,
            )
            for name, kind, does in stage.held
            for link, size in experts.exchanged_bytes(
                profile, name, profile.modules[name].costs[kind], shape, does
            )
        ]
        stages.append((sum(size for size, _ in messages), sum(size / s for size, s in messages)))
    rank_bytes, rank_s = max(stages)
    fullest = of_unit[stages.index((rank_bytes, rank_s))]
    return [
        Traffic(
            kind="expert_parallel",
            unit=unit.name,
            inside_a_node=in_one_node(fullest.ep_groups()[0], gpus_per_node),
            job_gib=len(fullest.ranks) * sum(size for size, _ in stages) / GIB,
            rank_gib=rank_bytes / GIB,
            rank_s=rank_s,
        )
    ]


def _context_parallel(
    profile: Profile, layout: Layout, of_unit: list[CostedStage]
) -> list[Traffic]:
    """Return messages inside the CP groups of a unit; their time is part of the layers' own."""
    unit = of_unit[0].unit
    own = {
        name: rows(profile, name, profile.modules[name].work_per_sequence)
        * layout.global_batch_size
        / unit.dp_cp_size
        for name in unit.modules
    }
    stages = [
        sum(
            own[name]
            * exchanged_bytes(profile, name, profile.modules[name].costs[kind], unit.shape, does)
            for name, kind, does in stage.held
        )
        for stage in of_unit
    ]
    rank_bytes = max(stages)
    exchanged = rank_bytes * unit.cp / max(1, unit.cp - 1)  # including a rank's own share
    latency_s, all_s = (messages_s(profile, unit.shape, size) for size in (0.0, exchanged))
    return [
        Traffic(
            kind="context_parallel",
            unit=unit.name,
            inside_a_node=ranks_per_node(profile, unit.shape) == unit.cp,
            job_gib=unit.tp * unit.dp_cp_size * sum(stages) / GIB,
            rank_gib=rank_bytes / GIB,
            rank_s=all_s - latency_s,
        )
    ]


def _sent_bytes(
    profile: Profile, layout: Layout, unit: UnitPlan, name: str, kind: str, does: Backward
) -> float:
    """Return the bytes over one rank's link in a layer's TP groups for a global batch.

    Summed over all replicas.
    """
    module = profile.modules[name]
    if module.work_per_sequence == Work():
        return 0.0
    sent = module.costs[kind].tp[str(unit.tp_of(name))].sent_bytes
    back: Pass = "backward" if does == "trained" else "backward_input"
    if unit.checkpointing:  # only weight gradients need rows that are gathered again
        again = unit.tp_overlap and does == "trained" and "recomputing_overlapped" in sent
        back = "recomputing_overlapped" if again else "recomputing"
    passes: list[Pass] = ["forward"] if does == "still" else ["forward", back]
    return layout.global_batch_size * sum(
        sent[one](module.work_per_sequence) for one in passes if one in sent
    )


def preprocess_need(
    profile: Profile, sequences_per_s: float, cores_per_host: int
) -> PreprocessNeed | None:
    """Return cores and hosts that prepare so many sequences per second; None without a rate.

    The measured time of a sequence includes its images.
    """
    rate = profile.preprocess.sequences_per_s_per_core
    if rate <= 0:
        return None
    sample = profile.data.sample
    images = sum(len(images) for images in sample.images)
    images += sum(sample.targets) if profile.inputs.decoding("target") else 0
    # Further generators and encoders have their images decoded once more.
    again_s = sum(
        item_s(profile, name) * profile.modules[name].work_per_sequence.items
        for item in KINDS
        for name in (head.module for head in profile.inputs.decoding(item)[1:])
    )
    cores = math.ceil(sequences_per_s * (1.0 / rate + again_s))
    return PreprocessNeed(
        sequences_per_s=sequences_per_s,
        images_per_s=sequences_per_s * images / len(sample.tokens),
        cores=cores,
        hosts=math.ceil(cores / cores_per_host),
    )
