"""Explanation of a plan: parts of its time and memory, its bottleneck, and why others are slower.

Everything comes from the plan's own numbers, the formula (`objective`) and the simulator; the
sentences are for rendering.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from disttrain_cli.calls import call, spelled
from disttrain_cli.costs.layout import stages_of
from disttrain_cli.planning.objective import planned_stages_ms
from disttrain_cli.planning.predict import Step
from disttrain_cli.planning.ranges import grounds
from disttrain_cli.planning.units import Cluster, Unit, units_of
from disttrain_cli.simulation.pipeline import simulate
from disttrain_cli.simulation.shared_cores import simulate_shared
from disttrain_cli.simulation.step import pipeline_of
from disttrain_cli.simulation.timeline import Pipeline, Timeline
from disttrain_cli.spec.plan import Alternative, Baseline, Layout, Plan, UnitPlan
from disttrain_cli.spec.prediction import Prediction
from disttrain_cli.spec.profile import Profile

Floats = NDArray[np.float64]
SMALL = 5e-4  # share of the step below which a part is not mentioned
#: Share of a device's memory below which the headroom is reported: on an H100 measured peaks were
#: 2.6 % below the planned ones.
TIGHT = 0.03


def two_digits(value: float) -> str:
    """Format a number to two significant digits: 0.042, 4.2, 42, 420."""
    return f"{float(f'{value:.2g}'):,g}"


@dataclass(frozen=True)
class UnitShare:
    """Time and memory of one unit compared with the slowest one."""

    unit: str
    gpus: int
    slowest_stage: int
    stage_ms: float  # its slowest stage for one slot, by the formula
    of_slowest_fraction: float  # ratio to the pipeline's slowest stage
    fullest_stage: int
    peak_gib: float
    limit_gib: float

    @property
    def headroom_gib(self) -> float:
        return self.limit_gib - self.peak_gib


@dataclass(frozen=True)
class TimePart:
    """Part of the step's time; the parts sum to the step."""

    what: str
    seconds: float
    fraction: float  # share of the step


@dataclass(frozen=True)
class Comparison:
    """Another layout compared with the plan."""

    name: str
    differs: str  # differences, as "llm DP 5 → 6"
    slower_pct: float  # as simulated; on a CPU with its shared cores
    more_s: dict[str, float]  # additional time by part, compared with the plan
    gpus: int  # difference to the plan's
    binding_unit: str  # unit of its slowest stage
    why: str


@dataclass(frozen=True)
class Ratio:
    """The plan's throughput over a baseline's; None if no such layout fits."""

    name: str
    per_gpu_given: float | None
    per_gpu_used: float | None


@dataclass(frozen=True)
class Explanation:
    """Explanation of a plan: its time, its bottleneck, and the other layouts."""

    units: list[UnitShare]
    binding_unit: str
    memory_unit: str
    time: list[TimePart]
    runners_up: list[Comparison]
    baselines: list[Ratio]
    grounds: str  # origin of the costs that the prediction uses, measured or not
    sentences: list[str]


def explain(plan: Plan, units: list[Unit], step: Step, more: Sequence[str] = ()) -> Explanation:
    """Explain a plan.

    Args:
        units: the layout's units, for the formula's times of its stages.
        step: a simulated step of it.
        more: sentences of other modules (`sharing`, `ranges`).
    """
    profile, cluster, predicted = units[0].profile, units[0].cluster, plan.predicted
    work = {module: loads.sum(axis=(0, 1)) for module, loads in step.loads.items()}
    shares = _shares(plan.plan, predicted, _stages_ms(units, plan.plan))
    slowest = max(shares, key=lambda share: share.stage_ms)
    fullest = max(shares, key=lambda share: share.peak_gib / share.limit_gib)
    parts = time_parts(profile, plan.plan, cluster, work, predicted.iteration_s)
    runners_up = [
        _compare(
            f"#{index + 2}",
            plan,
            units,
            parts,
            other,
            time_parts(profile, other.plan, cluster, work, other.iteration_s),
        )
        for index, other in enumerate(plan.alternatives)
        if other.plan is not None
    ]
    ratios = [_ratio(name, plan, other) for name, other in plan.baselines.items()]
    sentences = [
        _time_sentence(predicted, parts),
        _binding_sentence(shares, slowest),
        _memory_sentence(predicted, fullest, plan.plan),
        _waiting_sentence(predicted),
        *_routing_sentences(profile, plan.plan, predicted),
        *([idle] if (idle := idle_sentence(plan.plan, profile.inputs.llm, cluster.gpus)) else []),
        *([left] if (left := not_measured_sentence(profile, cluster.gpus)) else []),
        *more,
    ]
    if profile.device.kind == "cpu" and any(unit.sharing != 1.0 for unit in predicted.units):
        sentences.append(
            "Cores     Ranks share cores here, which levels the simulated times: layouts are ranked"
            " as for a cluster, and the best of them compared with other strategies' as they run"
            " here."
        )
    return Explanation(
        shares,
        slowest.unit,
        fullest.unit,
        parts,
        runners_up,
        ratios,
        grounds(profile, cluster.gpus),
        sentences,
    )


def time_parts(
    profile: Profile, layout: Layout, cluster: Cluster, work: dict[str, Floats], iteration_s: float
) -> list[TimePart]:
    """Decompose the step by simulating it with even data, and without transfers; parts sum to it.

    Steady is the slowest rank of the even step times all slots but one; warm-up and cool-down are
    the schedule's time beyond that; uneven data is the additional time of the sampled batches
    compared with an even one.

    Args:
        work: by module [3], of an entire global batch.
        iteration_s: predicted time of the step.
    """
    dps = {
        module: unit.dp * unit.dealt_over(module)
        for unit in layout.units
        for module in unit.modules
    }
    loads = {
        module: np.broadcast_to(
            total / (layout.microbatches * dps[module]),
            (layout.microbatches, dps[module], len(total)),
        )
        for module, total in work.items()
    }
    even = pipeline_of(profile, layout, stages_of(profile, layout), loads, cluster.gpus_per_node)

    def run(pipeline: Pipeline) -> Timeline:
        device = profile.device
        return (
            simulate_shared(pipeline, device.cores, device.shared_by)
            if device.kind == "cpu"
            else simulate(pipeline)
        )

    even_s = run(even).iteration_s
    instant = replace(even, transfer_s=np.zeros_like(even.transfer_s))
    updated_s = run(instant).iteration_s
    reduced = replace(instant, step_s=0.0, gathering=None)
    reduced_s = run(reduced).iteration_s
    computed_s = run(
        replace(reduced, reduce_s=np.zeros_like(even.reduce_s), reducing=None)
    ).iteration_s
    each_s = even.computing_s[0]  # [S, R]
    of_ranks_s = each_s.reshape(-1, even.devices or len(each_s), each_s.shape[1]).sum(axis=0)
    steady_s = float(of_ranks_s.max()) * (layout.microbatches - 1)
    parts = [
        ("steady", steady_s),
        ("warm-up and cool-down", computed_s - steady_s),
        ("transfers", even_s - updated_s),
        ("gradient reduction", reduced_s - computed_s),
        ("optimizer", updated_s - reduced_s),
        ("uneven data", iteration_s - even_s),
    ]
    return [TimePart(what, seconds, seconds / iteration_s) for what, seconds in parts]


def _stages_ms(units: list[Unit], layout: Layout) -> list[list[float]]:
    """Return the time of every stage of every unit for one slot, by the formula."""
    size = layout.global_batch_size // layout.microbatches
    return [
        planned_stages_ms(unit, plan, size) for unit, plan in zip(units, layout.units, strict=True)
    ]


def _shares(layout: Layout, predicted: Prediction, stages_ms: list[list[float]]) -> list[UnitShare]:
    slowest = max(max(times) for times in stages_ms)
    shares = []
    for unit, times in zip(layout.units, stages_ms, strict=True):
        fullest = max(
            (m for m in predicted.memory if m.unit == unit.name), key=lambda stage: stage.peak_gib
        )
        worst = max(range(unit.pp), key=lambda stage: times[stage])
        shares.append(
            UnitShare(
                unit.name,
                unit.gpus,
                worst,
                times[worst],
                times[worst] / slowest if slowest else 0.0,
                fullest.stage,
                fullest.peak_gib,
                fullest.limit_gib,
            )
        )
    return shares


def _time_sentence(predicted: Prediction, parts: list[TimePart]) -> str:
    words: list[str] = []
    for part in parts:
        if abs(part.fraction) >= SMALL:
            sign = "" if not words else "− " if part.seconds < 0 else "+ "
            words.append(
                f"{sign}{part.what} {_s(abs(part.seconds))} ({100 * abs(part.fraction):.1f} %)"
            )
    costs = "" if predicted.expected_s is None else " at the profile's costs"
    return f"Time      {_s(predicted.iteration_s)} per step{costs} = {' '.join(words)}."


def _routing_sentences(profile: Profile, layout: Layout, predicted: Prediction) -> list[str]:
    """Return a sentence about the skew of routing, if a unit has expert parallelism."""
    if predicted.balanced_s is None or predicted.routing_quantile is None:
        return []
    measured = all(
        cost.experts.routed
        for unit in layout.units
        if unit.ep > 1
        for name in unit.modules
        for cost in profile.modules[name].costs.values()
        if cost.experts is not None
    )
    skew = "measured" if measured else "assumed"
    slower_pct = 100 * (predicted.iteration_s / predicted.balanced_s - 1)
    return [
        f"Experts   {_s(predicted.iteration_s)} per step with the {skew} skew of routing,"
        f" {_s(predicted.balanced_s)} with equally many rows at all experts ({slower_pct:+.1f} %);"
        f" memory is enough for the fullest rank of {100 * predicted.routing_quantile:.4g} % of"
        " routings."
    ]


def _binding_sentence(shares: list[UnitShare], slowest: UnitShare) -> str:
    others = [
        f"{share.unit} {100 * (1 - share.of_slowest_fraction):.1f} %"
        for share in shares
        if share is not slowest
    ]
    below = f"; the slowest stages of the others are shorter: {', '.join(others)}" if others else ""
    return (
        f"Slowest   stage {slowest.slowest_stage} of {slowest.unit}, {slowest.stage_ms:.4g} ms per"
        f" slot{below}."
    )


def _memory_sentence(predicted: Prediction, fullest: UnitShare, layout: Layout) -> str:
    stage = next(
        m for m in predicted.memory if (m.unit, m.stage) == (fullest.unit, fullest.fullest_stage)
    )
    made_of = " + ".join(f"{name} {_gib(size)}" for name, size in stage.parts.items() if size)
    recomputed = [unit.name for unit in layout.units if unit.checkpointing]
    left = fullest.headroom_gib
    tight = (
        f" Nearly full: less than {100 * TIGHT:g} % is left, and reserve and fragmentation are"
        " stated, not measured; cluster.memory_margin_gib leaves more."
        if stage.reserve_gib and 0 <= left < TIGHT * fullest.limit_gib
        else ""
    )
    return (
        f"Memory    stage {fullest.fullest_stage} of {fullest.unit} is fullest:"
        f" {_gib(fullest.peak_gib)} of {_gib(fullest.limit_gib)}"
        f" GiB{f' ({made_of})' if made_of else ''}, {_gib(left)} GiB"
        f" left{'; recomputed activations in ' + ', '.join(recomputed) if recomputed else ''}."
        + tight
    )


def _waiting_sentence(predicted: Prediction) -> str:
    waits = f"Waiting   {100 * predicted.bubble_fraction:.1f} % of the devices' time"
    if not predicted.orchestration_efficiency:
        return f"{waits}."
    used = predicted.mfu_used or predicted.mfu
    alone = used / predicted.orchestration_efficiency
    return (
        f"{waits}; orchestration efficiency {100 * predicted.orchestration_efficiency:.1f} %: MFU "
        f"{100 * used:.1f} % of the {100 * alone:.1f} % that kernels alone would reach."
    )


def idle_sentence(layout: Layout, llm: str, gpus: int) -> str | None:
    """Return a sentence about idle devices of a plan; None if it uses all `gpus`.

    If they are too few for it, the sentence names the devices of more replicas of the LLM's unit.
    """
    left, unit, batch = gpus - layout.gpus_used, layout.unit_of(llm), layout.global_batch_size
    if not left:
        return None
    sentence = f"Idle      {left:,} of {gpus:,} devices: no faster layout that uses more was found."
    wider = next((dp for dp in range(unit.dp + 1, batch + 1) if batch % dp == 0), None)
    more = 0 if wider is None else (wider - unit.dp) * unit.gpus // unit.dp
    if wider is not None and more <= left:
        return sentence
    return (
        f"{sentence} {unit.name} has DP {unit.dp:,}, which must divide the batch of {batch:,}:"
        f" {'none is larger' if wider is None else f'DP {wider:,} takes {more:,} more'}; one more"
        f" stage takes {unit.gpus // unit.pp:,}."
    )


def not_measured_sentence(profile: Profile, gpus: int) -> str | None:
    """Return a sentence on the TP sizes, of at most `gpus`, that the profile's budget left out."""
    sizes = {} if profile.measuring is None else profile.measuring.not_measured
    within = {name: [tp for tp in tps if int(tp) <= gpus] for name, tps in sizes.items()}
    names = " and ".join(f"{name} at {', '.join(tps)}" for name, tps in within.items() if tps)
    if not names:
        return None
    return (
        f"TP        {names} not searched: the profile's budget ended before measuring them; profile"
        f" again to measure them: {spelled(call('profile'))}"
    )


def _compare(
    name: str,
    plan: Plan,
    units: list[Unit],
    parts: list[TimePart],
    other: Alternative,
    theirs: list[TimePart],
) -> Comparison:
    assert other.plan is not None
    layout = other.plan
    if [unit.modules for unit in plan.plan.units] != [unit.modules for unit in layout.units]:
        units = units_of(units[0].profile, units[0].cluster, layout)
    stages_ms = _stages_ms(units, layout)
    worst = max(range(len(stages_ms)), key=lambda unit: max(stages_ms[unit]))
    more_s = {
        mine.what: part.seconds - mine.seconds for mine, part in zip(parts, theirs, strict=True)
    }
    slower_pct = 100 * (other.iteration_s / plan.predicted.iteration_s - 1)
    why = _why(plan, layout, more_s, layout.units[worst].name, max(stages_ms[worst]))
    if slower_pct < 0 < other.slower_pct:
        why = f"{two_digits(other.slower_pct)} % slower where ranks share no cores; {why}"
    return Comparison(
        name,
        differences(plan.plan, layout),
        slower_pct,
        more_s,
        layout.gpus_used - plan.plan.gpus_used,
        layout.units[worst].name,
        why,
    )


def _why(plan: Plan, other: Layout, more_s: dict[str, float], binding: str, slot_ms: float) -> str:
    """Return the parts of the time that differ most, the largest first, in words."""
    layout, whole_s = plan.plan, plan.predicted.iteration_s
    said = []
    for what, seconds in sorted(more_s.items(), key=lambda item: -abs(item[1])):
        if abs(seconds) < max(SMALL * whole_s, 0.25 * max(map(abs, more_s.values()))):
            continue
        words = f"{what} {_signed(seconds)}"
        if what == "steady" and other.microbatches == layout.microbatches:
            words += f" ({binding})"
        elif what == "steady":
            words += f" ({other.microbatches} slots of {slot_ms:.3g} ms, {binding})"
        said.append(words)
    return ", ".join(said) or f"no part of its time differs by {100 * SMALL:g} % of a step"


def differences(layout: Layout, other: Layout) -> str:
    """Return the differences of another layout, in words."""
    if [unit.modules for unit in layout.units] != [unit.modules for unit in other.units]:
        return other.describe()
    words = []
    for mine, theirs in zip(layout.units, other.units, strict=True):
        changed = [
            f"{name} {old} → {new}"
            for name, old, new in (
                ("TP", mine.tp_degree, theirs.tp_degree),
                ("CP", mine.cp_degree, theirs.cp_degree),
                ("DP", mine.dp, theirs.dp),
                ("PP", mine.pp_degree, theirs.pp_degree),
            )
            if old != new
        ]
        if mine.checkpointing != theirs.checkpointing:
            changed.append("recomputes" if theirs.checkpointing else "does not recompute")
        if not changed and mine.layers_per_stage != theirs.layers_per_stage:
            changed.append(f"layers {layers(theirs)}")
        if not changed and mine.tp_overlap != theirs.tp_overlap:
            changed.append("overlaps TP messages" if theirs.tp_overlap else "TP messages exposed")
        if not changed and mine.ep_overlap != theirs.ep_overlap:
            changed.append("overlaps EP messages" if theirs.ep_overlap else "EP messages exposed")
        if not changed and mine.weight_delay != theirs.weight_delay:
            changed.append(f"weight gradients deferred {delays(theirs)}")
        if changed:
            words.append(f"{mine.name} {' '.join(changed)}")
    if layout.microbatch_size != other.microbatch_size:
        words.append(f"M {layout.microbatch_size} → {other.microbatch_size}")
    if layout.zero_stage != other.zero_stage:
        words.append(f"ZeRO-{other.zero_stage}")
    if layout.overlap != other.overlap:
        words.append(f"reductions {'overlapped' if other.overlap else 'after the backward'}")
    return ", ".join(words) or "same layout"


def layers(unit: UnitPlan) -> str:
    """Format the layers of a unit's stages with runs together: [8, 8, 8, 6] as "8×3, 6"."""
    return runs(unit.layers_per_stage)


def delays(unit: UnitPlan) -> str:
    """Format the slots by which a unit's stages defer weight gradients; "-": none are deferred."""
    return runs(unit.weight_delay or [None])


def runs(counts: Sequence[int | None]) -> str:
    """Format numbers with equal neighbours together: [8, 8, 8, 6] as "8×3, 6"."""
    lengths = [(count, len(list(same))) for count, same in itertools.groupby(counts)]
    words = [("-" if count is None else str(count), times) for count, times in lengths]
    return ", ".join(f"{word}×{times}" if times > 1 else word for word, times in words)


def _ratio(name: str, plan: Plan, other: Baseline | None) -> Ratio:
    if other is None:
        return Ratio(name, None, None)
    given = plan.predicted.sequences_per_s / other.sequences_per_s
    return Ratio(name, given, given * other.gpus_used / plan.plan.gpus_used)


def _s(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"


def _signed(seconds: float) -> str:
    return f"{'+' if seconds >= 0 else '−'}{_s(abs(seconds))}"


def _gib(size: float) -> str:
    return f"{size:.1f}" if size >= 10 else f"{size:.2f}" if size >= 0.1 else f"{size:.2g}"
