"""Tables and sentences of `disttrain plan`, from a plan, its explanation and its sensitivity."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from disttrain_cli.commands.common import percent
from disttrain_cli.naming import with_named

#: Speed-up from one more device, in multiples of its share of the throughput, that is explained.
JUMP = 2.0

if TYPE_CHECKING:
    from disttrain_cli.console import Console
    from disttrain_cli.planning.changes import Changes, Moved, Value
    from disttrain_cli.planning.explain import Explanation
    from disttrain_cli.planning.purchase import Offer
    from disttrain_cli.planning.ranges import Order
    from disttrain_cli.planning.sensitivity import Change, Sensitivity
    from disttrain_cli.spec.plan import Layout, Plan, UnitPlan
    from disttrain_cli.spec.prediction import Prediction, Traffic
    from disttrain_cli.spec.runfile import RunFile


def show_layout(
    console: Console, plan: Plan, explanation: Explanation, available: int, columns: int
) -> None:
    """Print the layout: one row per unit."""
    from disttrain_cli.planning.explain import delays, layers

    layout, predicted = plan.plan, plan.predicted
    of = "" if layout.gpus_used == available else f" of {available:,}"
    title = "Plan" if layout.strategy == "auto" else f"Plan of {layout.strategy}"
    head = f"{title} on {layout.gpus_used:,}{of} devices: {headline(predicted, explanation)}"
    console.say(textwrap.fill(head, columns))
    console.say(mfu_line(predicted, layout.gpus_used < available))
    console.say(
        f"{layout.global_batch_size:,} sequences per step = {layout.microbatches:,}"
        f" slot{'s' if layout.microbatches > 1 else ''} ×"
        f" {layout.global_batch_size // layout.microbatches:,} ({layout.microbatch_size} per LLM"
        f" replica); ZeRO-{layout.zero_stage}{_trained(layout)}"
        f"{'; reductions and gathers overlapped' if layout.overlap else ''}"
    )
    times = {time.unit: time for time in predicted.units}
    shares = {share.unit: share for share in explanation.units}
    units = layout.units

    def degree(unit: UnitPlan) -> str:
        return f"{unit.tp_degree}{' overlapped' * unit.tp_overlap}"

    def peak(unit: UnitPlan) -> str:
        share = shares[unit.name]
        return f"{_gib(share.peak_gib)} / {_gib(share.limit_gib)}"

    shown: list[tuple[str, Callable[[UnitPlan], object]]] = [
        ("unit", lambda unit: unit.name),
        ("modules", lambda unit: " + ".join(unit.modules)),
        ("TP", degree),
        ("CP", lambda unit: unit.cp_degree),
        ("EP", lambda unit: f"{unit.ep}{' overlapped' * unit.ep_overlap}"),
        ("DP", lambda unit: unit.dp),
        ("PP", lambda unit: unit.pp_degree),
        ("devices", lambda unit: f"{unit.gpus:,}"),
        ("layers per stage", layers),
        ("recomputes", lambda unit: _yes(unit.checkpointing)),
        ("W delay", delays),
        ("ms per slot", lambda unit: f"{shares[unit.name].stage_ms:.1f}"),
        ("MFU", lambda unit: percent(times[unit.name].mfu or None)),
        ("peak / limit GiB", peak),
    ]
    used = {
        "modules": any(unit.modules != [unit.name] for unit in units),
        "CP": any(unit.cp > 1 for unit in units),
        "EP": any(unit.ep > 1 for unit in units),
        "recomputes": any(unit.checkpointing for unit in units),
        "W delay": any(unit.weight_delay for unit in units),
    }
    console.grid(
        "Units, in pipeline order", units, [one for one in shown if used.get(one[0], True)]
    )


def headline(predicted: Prediction, explanation: Explanation) -> str:
    """Return a sentence with the expected step, its range and its basis."""
    if predicted.expected_s is None or predicted.range_s is None:
        return f"{_seconds(predicted.iteration_s)} per step."
    low_s, high_s = predicted.range_s
    return (
        f"{_about(predicted.expected_s)} per step expected, {_about(low_s)} to {_about(high_s)},"
        f" from {explanation.grounds}."
    )


def mfu_line(predicted: Prediction, idle: bool) -> str:
    """Return throughput and MFU of the expected step, with both ways to count attention."""
    slower = (predicted.expected_s or predicted.iteration_s) / predicted.iteration_s
    mfu = percent(predicted.mfu / slower)
    if idle and predicted.mfu_used is not None:
        mfu += f" over all devices, {percent(predicted.mfu_used / slower)} over those used"
    if predicted.mfu_causal is not None and predicted.mfu_causal < predicted.mfu:
        mfu += f" ({percent(predicted.mfu_causal / slower)} with causal attention counted half)"
    return f"{predicted.sequences_per_s / slower:.4g} sequences/s, MFU {mfu}"


def show_memory(console: Console, plan: Plan) -> None:
    """Print the parts of the peak memory of every unit's fullest stage."""
    from disttrain_cli.spec.prediction import PARTS

    fullest = [
        max(
            (stage for stage in plan.predicted.memory if stage.unit == unit.name),
            key=lambda stage: stage.peak_gib,
        )
        for unit in plan.plan.units
    ]
    shown = [name for name in PARTS if any(stage.parts[name] >= 0.05 for stage in fullest)]
    console.table(
        "Peak memory of each unit's largest stage, in GiB (fragmentation and reserve are stated,"
        " not measured)",
        ["unit", "stage", *shown, "peak", "limit"],
        [
            [
                stage.unit,
                stage.stage,
                *(_gib(stage.parts[name]) for name in shown),
                _gib(stage.peak_gib),
                _gib(stage.limit_gib),
            ]
            for stage in fullest
        ],
    )


def show_changes(console: Console, changes: Changes | None, path: str, columns: int) -> None:
    """Print the differences from the previous plan, and whether the change pays off."""
    if changes is None:
        return
    console.table(
        f"Changes from the plan in place, {path}",
        ["unit", "what", "before", "now"],
        [
            [change.unit or "all", change.what, _value(change.before), _value(change.after)]
            for change in changes.differences
        ],
    )
    console.say("\n" + textwrap.fill(worth_it(changes), columns))


def worth_it(changes: Changes) -> str:
    """Return sentences that compare the new plan with the previous one."""
    from disttrain_cli.planning.explain import two_digits

    new = _seconds(changes.new_s)
    if changes.old_now_s is None or changes.gain_pct is None:
        return (
            f"The plan in place does not fit any more. {changes.unfit}. This one takes {new} per"
            " step."
        )
    moved = [
        f"{unit.unit} {_ms(unit.then_ms)} → {_ms(unit.now_ms)}"
        for unit in changes.moved
        if _differs(unit)
    ]
    if changes.old_iteration_s is None:
        why = " It was edited by hand since it was planned."
    else:
        why = f" It was predicted to take {_seconds(changes.old_iteration_s)} when it was made" + (
            f"; since then its slowest stages changed in the profile, per slot: {', '.join(moved)}."
            if moved
            else "."
        )
    old = f"takes {_seconds(changes.old_now_s)} per step under this profile"
    if not changes.differences:
        return f"The plan in place is still good: this one is the same, and {old}.{why}"
    more = (
        f"{two_digits(abs(changes.gain_pct))} %"
        f" {'more' if changes.gain_pct >= 0 else 'fewer'} sequences per second"
    )
    if changes.keep:
        return f"The plan in place is still good: it {old}; this one {new}: {more}.{why}"
    return f"The plan in place {old}; this one {new}: {more}.{why}"


def show_strategies(
    console: Console,
    plan: Plan,
    explanation: Explanation,
    orders: Mapping[str, Order],
    run_file: Path,
) -> None:
    """Print the plan next to the baselines, per available GPU and per GPU used.

    Args:
        orders: comparisons of the plan with the baselines, at the expected costs among others.
    """
    layout, predicted = plan.plan, plan.predicted
    rows: list[list[object]] = [
        [
            "this plan",
            f"{predicted.iteration_s:.3f}",
            f"{predicted.sequences_per_s:.2f}",
            percent(predicted.mfu),
            f"{layout.gpus_used:,}",
            *[""] * (2 + bool(orders)),
            shape(layout),
        ]
    ]
    for ratio in explanation.baselines:
        other = plan.baselines[ratio.name]
        rows.append(
            [ratio.name, "does not fit", *[""] * (6 + bool(orders))]
            if other is None
            else [
                ratio.name,
                f"{other.iteration_s:.3f}",
                f"{other.sequences_per_s:.2f}",
                percent(other.mfu),
                f"{other.gpus_used:,}",
                f"{ratio.per_gpu_given:.2f} ×",
                f"{ratio.per_gpu_used:.2f} ×",
                *([_expected(orders.get(ratio.name))] if orders else []),
                shape(other.plan) if other.plan else other.layout,
            ]
        )
    console.table(
        "Comparison with other strategies at the profile's costs (given, used: throughput of this"
        " plan ÷ theirs, per device"
        f"{'; expected: given, at the expected costs' if orders else ''})",
        [
            "strategy",
            "s per step",
            "sequences/s",
            "MFU",
            "devices",
            "given",
            "used",
            *(["expected"] if orders else []),
            "TP×DP×PP of each unit, M",
        ],
        rows,
    )
    better = [
        ratio.name
        for ratio in explanation.baselines
        if ratio.per_gpu_given and ratio.per_gpu_given < 1 - 1e-3
    ]
    if better:
        planned = plan.baselines[better[0]]
        runs = (
            with_named(f"disttrain plan --strategy {better[0]}", run_file)
            if planned and planned.plan
            else f"{better[0]}, which is only a baseline"
        )
        console.say(f"Faster, but not among the layouts of --strategy {layout.strategy}: {runs}")


def show_runners_up(console: Console, plan: Plan, explanation: Explanation) -> None:
    """Print the next best layouts and why they are slower."""
    console.table(
        "Next best layouts, simulated at the profile's costs",
        ["", "s per step", "slower", "devices", "differs in", "why"],
        [
            [
                other.name,
                f"{alternative.iteration_s:.3f}",
                f"{other.slower_pct:+.2f} %",
                f"{alternative.gpus_used:,}",
                other.differs,
                other.why,
            ]
            for other, alternative in zip(explanation.runners_up, plan.alternatives, strict=False)
        ],
    )


def show_sensitivity(console: Console, plan: Plan, sensitivity: Sensitivity | None) -> None:
    """Print how the best layout changes with other clusters, data and batches."""
    if sensitivity is None:
        return
    names = [unit.name for unit in plan.plan.units]
    rows = [
        [change.what, f"{change.gpus:,}", *_figures(change), *_moves(change, names)]
        for change in (
            sensitivity.now,
            sensitivity.one_more_gpu,
            sensitivity.one_more_node,
            *sensitivity.changes,
        )
    ]
    limit = (
        f", with at most {sensitivity.most_llm_replicas:,} LLM replicas"
        if sensitivity.most_llm_replicas
        else ""
    )
    console.table(
        f"What if (best layout in each case, by the formula{limit})",
        ["", "devices", "s per step", "sequences/s", "change", *names],
        rows,
    )
    console.say(more_gpus(sensitivity, plan.plan.global_batch_size))


def more_gpus(sensitivity: Sensitivity, batch: int) -> str:
    """Return sentences on the effect of more GPUs.

    A jump beyond one device's share is explained by the discrete shapes.
    """
    from disttrain_cli.planning.explain import two_digits

    one, until = sensitivity.one_more_gpu, sensitivity.gpus_until_faster
    if until == 1 and one.speedup:
        gains = [move.unit for move in one.units if move.gpus_then > move.gpus]
        share = 1 / (one.gpus - 1)
        used, then = (
            sum(getattr(move, gpus) for move in one.units) for gpus in ("gpus", "gpus_then")
        )
        jump = (
            f" Its share is {two_digits(100 * share)} %: layouts come in steps, as the LLM's"
            f" replicas divide the {batch:,} sequences of a step and stages hold whole layers"
            + (f"; the best uses {used:,} devices now, {then:,} then." if one.units else ".")
        )
        return (
            f"One more device brings {two_digits(100 * (one.speedup - 1))} % more sequences per"
            f" second{', for ' + ' and '.join(gains) if gains else ', with a different layout'}."
            + (jump if one.speedup - 1 > JUMP * share else "")
        )
    if until is None:
        return "One more device changes nothing; nor do several."
    return f"One more device changes nothing; the next faster layout takes {until:,} more."


def show_clusters(console: Console, offers: list[Offer], file: RunFile, columns: int) -> None:
    """Print time and cost of training on several clusters, and how to read them."""
    console.answer(
        [
            "device",
            "devices",
            "idle",
            "s per step",
            "range",
            "tokens/s",
            "per device",
            "hours",
            "GPU-hours",
            "cost",
            "TP×DP×PP of each unit, M",
        ],
        [[one.device, f"{one.gpus:,}", *_offered(one)] for one in offers],
    )
    priceless = dict.fromkeys(one.device for one in offers if one.price_per_gpu_hour is None)
    stated = ", ".join(f"{device}: PRICE" for device in priceless)
    by_grounds: dict[str, dict[str, None]] = {}
    for one in offers:
        by_grounds.setdefault(one.grounds, {})[f"{one.gpus:,} × {one.device}"] = None
    sentences = [
        *(f"{one.gpus:,} × {one.device}: {one.unfit}." for one in offers if one.unfit),
        *(
            f"{one.device}: {one.idle_because.removeprefix('Idle').strip()}"
            for one in offers
            if one.idle_because
        ),
        *(f"From {basis}: {', '.join(clusters)}." for basis, clusters in by_grounds.items()),
        "Times are those of the expected step; hours, GPU-hours and costs of"
        f" {file.train.total_steps:,} steps (train.steps, train.epochs) without checkpoints and"
        " evaluation, idle devices included. Tokens are those of packed sequences without padding."
        " Between nodes of"
        f" {file.cluster.gpus_per_node:,} devices each has"
        f" {file.cluster.links.inter_node_gbps:g} Gbit/s, as the run file states.",
        *(
            [f"No price of {', '.join(priceless)}: state cluster.price_per_gpu_hour: {{{stated}}}."]
            if priceless
            else []
        ),
    ]
    console.say("\n" + "\n".join(textwrap.fill(sentence, columns) for sentence in sentences))
    console.note(
        "\nNo plan was written. For one of them: disttrain profile --device analytic:NAME &&"
        " disttrain plan --gpus N"
    )


def _offered(one: Offer) -> list[object]:
    """Return the cells of a cluster's row after device and number."""
    if one.layout is None or one.step_s is None:
        return [*[""] * 8, "nothing fits"]
    low_s, high_s = one.range_s or (one.step_s, one.step_s)
    return [
        f"{one.idle:,}",
        f"{one.step_s:.3g}",
        f"{low_s:.3g}–{high_s:.3g}",
        f"{one.tokens_per_s:,.0f}",
        f"{one.tokens_per_s_per_gpu:,.0f}",
        f"{one.hours:,.1f}",
        f"{one.gpu_hours:,.0f}",
        "no price" if one.cost is None else f"{one.cost:,.0f}",
        shape(one.layout),
    ]


def needs(plan: Plan) -> list[str]:
    """Return one line on CPU nodes and one on messages."""
    lines: list[str] = []
    need = plan.predicted.preprocess
    if need is not None:
        lines.append(
            f"Decoding  {need.sequences_per_s:.4g} sequences/s with {need.images_per_s:,.0f}"
            f" images/s take {_count(need.cores, 'core')}: {_count(need.hosts, 'CPU host')}."
        )
    if plan.predicted.traffic:
        largest = ", ".join(map(_traffic, _largest(plan.predicted.traffic)))
        lines.append(f"Messages  of the busiest rank per step: {largest}.")
    return lines


def shape(layout: Layout) -> str:
    """Return TP×DP×PP of every unit in pipeline order, and M.

    ×CP follows TP for units with context parallelism, and EP the others, whose ranks it divides.
    """
    units = (
        f"{u.tp_degree}{f'×CP {u.cp_degree}' if u.cp > 1 else ''}×{u.dp}×{u.pp_degree}"
        f"{f' (EP {u.ep})' if u.ep > 1 else ''}"
        for u in layout.units
    )
    return f"{' → '.join(units)}, M {layout.microbatch_size}"


def _largest(traffic: list[Traffic]) -> list[Traffic]:
    """Return the largest message of every kind, longest first."""
    kinds: dict[str, Traffic] = {}
    for one in sorted(traffic, key=lambda one: one.rank_s):
        kinds[one.kind] = one
    return sorted(kinds.values(), key=lambda one: -one.rank_s)


def _traffic(one: Traffic) -> str:
    where = f"{one.unit} → {one.to}" if one.to else one.unit
    return (
        f"{one.kind.replace('_', ' ')} {_gib(one.rank_gib)} GiB in {_seconds(one.rank_s)} ({where})"
    )


def _expected(order: Order | None) -> str:
    """Format the ratio of a plan's throughput to another layout's at the expected costs."""
    return "" if order is None else f"{1 + order.expected:.2f} ×"


def _figures(change: Change) -> list[object]:
    if change.iteration_s is None or change.sequences_per_s is None or change.speedup is None:
        return ["", "", change.note]
    percent_more = 100 * (change.speedup - 1)
    said = f"{percent_more:+.1f} %" if abs(percent_more) >= 0.05 else "–"
    return [f"{change.iteration_s:.3f}", f"{change.sequences_per_s:.2f}", said]


def _moves(change: Change, names: list[str]) -> list[object]:
    moves = {move.unit: move for move in change.units}
    return [
        (
            (
                f"{moves[name].gpus_then:,}"
                + (
                    f" ({moves[name].gpus_then - moves[name].gpus:+,})"
                    if moves[name].gpus_then != moves[name].gpus
                    else ""
                )
            )
            if name in moves
            else ""
        )
        for name in names
    ]


def _trained(layout: Layout) -> str:
    return f"; trained: {', '.join(layout.trained)}" if layout.trained is not None else ""


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def _value(value: Value) -> str:
    from disttrain_cli.planning.explain import runs

    return (
        _yes(value)
        if isinstance(value, bool)
        else runs(value)
        if isinstance(value, list)
        else str(value)
    )


def _differs(unit: Moved) -> bool:
    """Return True if a stage's time changed by enough to be mentioned."""
    return abs(unit.now_ms - unit.then_ms) > 5e-3 * unit.then_ms


def _ms(value: float) -> str:
    return f"{value:.3g} ms" if value < 1e3 else f"{value:,.0f} ms"


def _yes(value: bool) -> str:
    return "yes" if value else "no"


def _seconds(value: float) -> str:
    return f"{value:.3f} s" if value >= 1 else f"{1e3 * value:.3g} ms"


def _about(value: float) -> str:
    """Format a time with three digits."""
    value, unit = (value, "s") if value >= 1 else (1e3 * value, "ms")
    return f"{value:,.{0 if value >= 100 else 1 if value >= 10 else 2}f} {unit}"


def _gib(size: float) -> str:
    return f"{size:.1f}" if size >= 10 else f"{size:.2g}"
