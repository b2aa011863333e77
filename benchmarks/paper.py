"""DistTrain's evaluation, planned and simulated: each part of it is one command.

    python -m benchmarks.paper end_to_end     throughput and MFU of the three models on 1,296 A800
    python -m benchmarks.paper curve          the same gain over images per sequence
    python -m benchmarks.paper efficiency     orchestration efficiency at 1,172 devices, 72B
    python -m benchmarks.paper orchestration  plans alone, 96 devices, samples as they come
    python -m benchmarks.paper reordering     orderings alone, the same plan, 1,296 devices
    python -m benchmarks.paper freezing       parts of the model frozen
    python -m benchmarks.paper overhead       time to plan

Nothing is measured on a device: costs are those of the hardware catalogue (one efficiency curve for
all models), data the distribution `laion-like`. "Megatron-LM of the paper" has TP 8 everywhere and
the LLM's PP of 1, 2, 10, and encoder and generator one stage each; "megatron" is the best pipeline
of one unit, in which layers of several modules may share a stage. Figures of the paper are named in
docs/paper.md.
"""

from __future__ import annotations

import argparse
import itertools
import re
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np

from benchmarks.common import Tables, table
from benchmarks.rules import planned_by
from disttrain_cli.api.presets import preset_text
from disttrain_cli.costs.memory import fits
from disttrain_cli.planning.bounds import divisors
from disttrain_cli.planning.layouts import layout_of, layout_with
from disttrain_cli.planning.objective import layout_time
from disttrain_cli.planning.predict import predict, simulated_steps
from disttrain_cli.planning.search import search
from disttrain_cli.planning.solve import cluster_of, ranking, solve, solve_for
from disttrain_cli.planning.units import Cluster, groupings
from disttrain_cli.profiling.analytic import analytic_profile
from disttrain_cli.simulation.timeline import Pipeline
from disttrain_cli.spec.plan import Layout, Strategy
from disttrain_cli.spec.prediction import Prediction
from disttrain_cli.spec.profile import Profile
from disttrain_cli.spec.runfile import Run, RunFile, read_run
from disttrain_cli.spec.shape import ParallelShape

DEVICE, GPUS, BATCH = "A800", 1296, 1920
TP, LLM_PP = 8, {"mllm-9b": 1, "mllm-15b": 2, "mllm-72b": 10}  # of the paper's Megatron-LM
SMALL_BATCHES = {"mllm-9b": 128, "mllm-15b": 64, "mllm-72b": 40}  # on 96 devices
IMAGES = (1, 2, 4, 8, 16)
STEPS = 5  # global batches of other sequences, for the orderings
TRAINED = {
    "all": None,
    "encoder": ["image_encoder"],
    "LLM": ["llm"],
    "generator": ["image_generator"],
    "projectors": ["projectors"],
}
OVERHEAD_GPUS = (112, 324, 648, 1296, 16384)


def profiled(
    preset: str, images: int | None = None, device: str | None = None
) -> tuple[RunFile, Profile]:
    """A preset and its profile, computed for its own device or another; with `images` read and
    generated per sequence instead of the preset's."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "disttrain.yaml"
        text = preset_text(preset)
        if images is not None:
            text = re.sub(
                r"(images|generated)_per_sequence: \d+", rf"\1_per_sequence: {images}", text
            )
        path.write_text(text)
        run: Run = read_run(path, *([f"cluster.device=analytic:{device}"] if device else []))
        return run.file, analytic_profile(run, run.file.cluster.device.removeprefix("analytic:"))


def changed(
    run: RunFile,
    gpus: int | None = None,
    batch: int | None = None,
    ordering: str | None = None,
    trained: list[str] | None = None,
) -> RunFile:
    """The run file with another cluster, batch, ordering or set of trained modules."""
    update: dict[str, Any] = {}
    train = {
        "global_batch_size": batch or run.train.global_batch_size,
        "ordering": ordering or run.train.ordering,
    }
    update["train"] = run.train.model_copy(update=train)
    update["model"] = run.model.model_copy(update={"trained": trained})
    if gpus is not None:
        update["cluster"] = run.cluster.model_copy(
            update={"nodes": -(-gpus // run.cluster.gpus_per_node)}
        )
    return run.model_copy(update=update)


def ours(
    run: RunFile, profile: Profile, gpus: int, strategy: Strategy = "auto"
) -> tuple[Layout, Prediction, Cluster]:
    """The plan of a strategy."""
    cluster = cluster_of(run, profile, gpus)
    plan = solve_for(profile, cluster, strategy)
    return plan.plan, plan.predicted, cluster


def megatron_lm(profile: Profile, cluster: Cluster, pp: int) -> tuple[Layout, Prediction] | None:
    """The paper's Megatron-LM: TP 8, the LLM on `pp` stages, samples as they come, reductions
    after the step; None where it does not fit.

    Encoder and generator are one stage each on as many devices as a stage of the LLM, divided over
    its TP groups or copied, whichever is faster by the formula. Images are levelled over the copies
    all the same, which is more than Megatron-LM does.
    """
    cluster = replace(cluster, ordering="none", overlaps=False)
    units = groupings(profile, cluster, "disaggregated")[0]
    found: list[tuple[float, Layout]] = []
    for size in divisors(cluster.batch):
        for dp, recomputes in itertools.product(divisors(size), (False, True)):
            if TP * dp * (pp + len(units) - 1) > cluster.gpus:
                continue
            shapes = [
                [ParallelShape(tp=TP, dp=dp, pp=pp, recompute=recomputes)]
                if unit.holds_llm
                else [
                    ParallelShape(tp=tp, dp=TP * dp // tp, recompute=recomputes)
                    for tp in (1, TP)
                    if tp in unit.tps
                ]
                for unit in units
            ]
            for chosen in itertools.product(*shapes):
                layout = layout_with(units, cluster, chosen, size, "megatron")
                if layout is not None and fits(profile, layout, cluster.memory_gib):
                    found.append((layout_time(units, layout).total_ms, layout))
    if not found:
        return None
    layout = min(found, key=lambda one: one[0])[1]
    return layout, predict(units, layout, cluster)


def one_unit(profile: Profile, cluster: Cluster) -> tuple[Layout, Prediction] | None:
    """The best pipeline with all modules in one unit, reductions after the step, if there is
    one."""
    cluster = replace(cluster, overlaps=False)
    units = groupings(profile, cluster, "megatron")[0]
    best = search(units, cluster).best
    if not best:
        return None
    layout = layout_of(units, cluster, best[0], "megatron")
    return layout, predict(units, layout, cluster)


def gain(
    mine: tuple[Layout, Prediction], other: tuple[Layout, Prediction] | None
) -> tuple[str, str]:
    """Throughput over another layout's, per GPU given and per GPU used."""
    if other is None:
        return "does not fit", ""
    given = mine[1].sequences_per_s / other[1].sequences_per_s
    return f"{given:.2f}", f"{given * other[0].gpus_used / mine[0].gpus_used:.2f}"


def shapes(layout: Layout) -> str:
    """TP×DP×PP of every unit, with CP and modules that are whole on every TP rank where there are
    some."""
    return " → ".join(
        f"{unit.tp}×{f'CP {unit.cp}×' if unit.cp > 1 else ''}{unit.dp}×{unit.pp}"
        + (f" ({', '.join(unit.module_tp)} whole)" if unit.module_tp else "")
        for unit in layout.units
    )


def end_to_end(small: bool) -> Tables:
    rows = []
    for preset in [*LLM_PP][: 1 if small else None]:
        run, profile = profiled(preset)
        plan = solve(run, profile, top=0)
        mine, cluster = (plan.plan, plan.predicted), cluster_of(run, profile)
        published = megatron_lm(profile, cluster, LLM_PP[preset])
        best, relaxed = plan.baselines["megatron"], planned_by(profile, cluster, "paper")
        given, used = gain(mine, published)
        assert best is not None and relaxed is not None
        rows.append(
            {
                "model": preset,
                "layout": shapes(plan.plan),
                "devices": plan.plan.gpus_used,
                "s per step": plan.predicted.iteration_s,
                "MFU %": 100 * plan.predicted.mfu,
                "Megatron-LM of the paper": shapes(published[0]) if published else "does not fit",
                "its devices": published[0].gpus_used if published else "",
                "its MFU %": 100 * published[1].mfu if published else "",
                "gain per device given": given,
                "per device used": used,
                "over the best megatron": plan.predicted.sequences_per_s / best.sequences_per_s,
                "over the paper's planner": (
                    plan.predicted.sequences_per_s / relaxed[1].sequences_per_s
                ),
            }
        )
    return {f"End to end, {GPUS:,} × {DEVICE}, batch {BATCH:,}": rows}


def curve(small: bool) -> Tables:
    rows = []
    for preset in [*LLM_PP][: 1 if small else None]:
        for images in IMAGES[: 1 if small else None]:
            run, profile = profiled(preset, images)
            layout, predicted, cluster = ours(run, profile, GPUS)
            published = megatron_lm(profile, cluster, LLM_PP[preset])
            given, used = gain((layout, predicted), published)
            rows.append(
                {
                    "model": preset,
                    "images per sequence": images,
                    "layout": shapes(layout),
                    "MFU %": 100 * predicted.mfu,
                    "over Megatron-LM of the paper, per device given": given,
                    "per device used": used,
                }
            )
    return {
        f"Gain over images read and generated per sequence, {GPUS:,} × {DEVICE}, batch {BATCH:,}": (
            rows
        )
    }


def efficiency(small: bool) -> Tables:
    preset = "mllm-9b" if small else "mllm-72b"
    run, profile = profiled(preset)
    layout, predicted, _ = ours(run, profile, 1172)
    return {
        "Orchestration efficiency at 1,172 devices": [
            {
                "model": preset,
                "layout": shapes(layout),
                "slots": layout.microbatches,
                "devices": layout.gpus_used,
                "MFU %": 100 * predicted.mfu,
                "efficiency": predicted.orchestration_efficiency,
            }
        ]
    }


def orchestration(small: bool) -> Tables:
    rows = []
    for preset in [*LLM_PP][: 1 if small else None]:
        original, profile = profiled(preset)
        run = changed(original, gpus=96, batch=SMALL_BATCHES[preset], ordering="none")
        layout, predicted, cluster = ours(run, profile, 96)
        published = megatron_lm(profile, cluster, LLM_PP[preset])
        shared = planned_by(profile, cluster, "distmm")
        rows.append(
            {
                "model": preset,
                "batch": run.train.global_batch_size,
                "layout": shapes(layout),
                "MFU %": 100 * predicted.mfu,
                "over Megatron-LM of the paper": (
                    predicted.mfu / published[1].mfu if published else "does not fit"
                ),
                "over distmm": predicted.mfu / shared[1].mfu if shared else "does not fit",
            }
        )
    return {"Orchestration alone, 96 devices, MFU over MFU, ordering none": rows}


def reordering(small: bool) -> Tables:
    rows: list[dict[str, Any]] = []
    for preset in ["mllm-9b", "mllm-72b", "mllm-15b"][: 1 if small else None]:
        run, profile = profiled(preset)
        gpus, batch = (96, 128) if small else (GPUS, BATCH)
        run = changed(run, gpus=gpus, batch=batch)
        mine, _, cluster = ours(run, profile, gpus, "disaggregated")
        others = {
            "Megatron-LM of the paper": megatron_lm(profile, cluster, LLM_PP[preset]),
            "one unit": one_unit(profile, cluster),
        }
        layouts = {"units": mine} | {name: other[0] for name, other in others.items() if other}
        rows += [
            {"model": preset, "plan": name, "layout": shapes(layout), "slots": layout.microbatches}
            | orderings(profile, layout, cluster, 1 if small else STEPS)
            for name, layout in layouts.items()
        ]
    return {f"Reordering alone: the same plan, {STEPS} steps": rows}


def orderings(profile: Profile, layout: Layout, cluster: Cluster, steps: int) -> dict[str, Any]:
    """Seconds per step by policy, mean over steps, gains of `best` (in each step), and what no
    order can go below."""
    times_s: dict[str, list[float]] = {}
    for name in ("none", "paper", "best"):
        own = replace(cluster, ordering=name)
        simulated = list(simulated_steps(profile, layout, own, range(steps)))
        times_s[name] = [step.timeline.iteration_s for step in simulated]
    bound_s = [busiest_s(step.pipeline) for step in simulated]
    gains = [none / best for none, best in zip(times_s["none"], times_s["best"], strict=True)]
    over = [paper / best for paper, best in zip(times_s["paper"], times_s["best"], strict=True)]
    return {
        **{f"{name}, s": mean(own) for name, own in times_s.items()},
        "best over none": mean(gains),
        "least, most": f"{min(gains):.3f}, {max(gains):.3f}",
        "best over paper": mean(over),
        "its least": f"{min(over):.3f}",
        "none over the bound": mean(
            none / bound for none, bound in zip(times_s["none"], bound_s, strict=True)
        ),
    }


def busiest_s(pipeline: Pipeline) -> float:
    """What the stage with most work takes when its replicas are level and never wait, with what of
    reduction and optimizer nothing hides."""
    computing = pipeline.computing_s.sum(axis=(0, 2)) / pipeline.replicas
    left_s = np.where(pipeline.present, pipeline.lead_s + pipeline.exposed_s, np.inf).min(axis=1)
    return float((computing + left_s).max()) + pipeline.closing_s


def freezing(small: bool) -> Tables:
    rows = []
    for preset in [*LLM_PP][: 1 if small else None]:
        original, profile = profiled(preset)
        for name, trained in TRAINED.items():
            run = changed(original, trained=trained)
            layout, predicted, cluster = ours(run, profile, GPUS)
            published = megatron_lm(profile, cluster, LLM_PP[preset])
            given, used = gain((layout, predicted), published)
            rows.append(
                {
                    "model": preset,
                    "trained": name,
                    "layout": shapes(layout),
                    "sequences/s": predicted.sequences_per_s,
                    "MFU %": 100 * predicted.mfu,
                    "over Megatron-LM of the paper, per device given": given,
                    "per device used": used,
                }
            )
    return {f"Parts of the model trained, {GPUS:,} × {DEVICE}, batch {BATCH:,}": rows}


def overhead(small: bool) -> Tables:
    rows = []
    for preset in ("mllm-9b", "mllm-72b")[: 1 if small else None]:
        original, profile = profiled(preset)
        for gpus in OVERHEAD_GPUS[: 1 if small else None]:
            cluster = cluster_of(changed(original, gpus=gpus), profile, gpus)
            start = time.process_time()
            for units in groupings(profile, cluster, "auto"):
                search(units, cluster)
            searched = time.process_time()
            found, _, simulated = ranking(profile, cluster, "auto")
            rows.append(
                {
                    "model": preset,
                    "devices": gpus,
                    "search ms": 1e3 * (searched - start),
                    "with finalists simulated ms": 1e3 * (time.process_time() - searched),
                    "finalists": simulated,
                    "layout": shapes(found[0].layout) if found else "does not fit",
                }
            )
    return {"Time to plan, CPU time of one core": rows}


PARTS: dict[str, Callable[[bool], Tables]] = {
    "end_to_end": end_to_end,
    "curve": curve,
    "efficiency": efficiency,
    "orchestration": orchestration,
    "reordering": reordering,
    "freezing": freezing,
    "overhead": overhead,
}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", choices=[*PARTS])
    parser.add_argument(
        "--small", action="store_true", help="smallest form: shows that it runs, measures little"
    )
    options = parser.parse_args()
    print(
        "\n\n".join(
            table(title, rows) for title, rows in PARTS[options.part](options.small).items()
        )
    )
