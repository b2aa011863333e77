"""One simulated iteration, and a whole plan whose finalists are simulated.

Costs are those of the paper's 9B model's shape (tests/planning/synthetic.py: plausible, not
measured), on 96 and on 1,296 GPUs with a batch of 1,920 sequences whose images vary from none to
twice the mean. "event by event" is the plain Python simulator that the tests compare with; it gives
the same times to the bit. One core; CPU time. Run from the repository with the `dev` extra
installed.
"""

from __future__ import annotations

from dataclasses import replace
from statistics import median
from typing import Any

from benchmarks.common import Tables, alternate, main, paired_ratio
from benchmarks.layouts import Shape, even_units
from benchmarks.rules import planned_by
from disttrain_cli.planning.predict import simulated_step
from disttrain_cli.planning.search import search
from disttrain_cli.planning.solve import cluster_of, ranking
from disttrain_cli.planning.units import Cluster, groupings
from disttrain_cli.simulation.pipeline import simulate
from disttrain_cli.spec.plan import Layout
from disttrain_cli.spec.profile import Profile
from tests.planning import synthetic
from tests.simulation.test_pipeline import by_events

LAYERS = {"image_encoder": 32, "llm": 34, "image_generator": 11}
BATCH = 1920
#: (TP, DP, PP) of encoder, LLM and generator, and slots; the last ones use nearly all of 1,296
#: GPUs.
SHAPES = (
    ((1, 5, 1), (1, 8, 11), (1, 3, 1), 240),
    ((1, 82, 1), (4, 96, 3), (1, 62, 1), 20),
    ((1, 78, 1), (8, 32, 4), (2, 48, 2), 60),
    ((1, 32, 2), (8, 5, 28), (1, 10, 5), 384),
)


def case(gpus: int, batch: int = BATCH) -> tuple[Profile, Cluster]:
    """The profile and the cluster of nodes of 8 GPUs."""
    run = synthetic.run_file(batch=batch, gpus=gpus, nodes=gpus // 8, precision="bf16")
    profile = synthetic.paper_9b(run)
    return profile, cluster_of(run, profile)


def layout_of(shapes: tuple[Shape, ...], slots: int) -> Layout:
    """A layout with its layers spread evenly."""
    units = even_units(dict(zip(LAYERS, shapes, strict=True)), LAYERS)
    return Layout(
        global_batch_size=BATCH,
        microbatch_size=BATCH // slots // units[1].dp,
        microbatches=slots,
        gpus_used=sum(unit.gpus for unit in units),
        units=units,
    )


def iteration(shapes: tuple[Shape, ...], slots: int, rounds: int) -> dict[str, Any]:
    """The simulator alone, with drawing and ordering the batch and the cost models, and event by
    event."""
    profile, cluster = case(1296)
    layout = layout_of(shapes, slots)
    pipeline = simulated_step(profile, layout, cluster).pipeline
    seconds = alternate(
        {
            "simulate": lambda: simulate(pipeline),
            "step": lambda: simulated_step(profile, layout, cluster),
            "events": lambda: by_events(pipeline),
        },
        rounds,
    )
    return {
        "GPUs": layout.gpus_used,
        "slots": slots,
        "stages": len(pipeline.replicas),
        "replicas of all stages": int(pipeline.replicas.sum()),
        "simulation ms": 1e3 * median(seconds["simulate"]),
        "with batch, ordering and cost models ms": 1e3 * median(seconds["step"]),
        "event by event over simulation": paired_ratio(seconds["events"], seconds["simulate"]),
    }


def plan(gpus: int, batch: int, rounds: int) -> dict[str, Any]:
    """Search alone, and with its finalists simulated; what their simulation gains over the paper's
    plan."""
    profile, cluster = case(gpus, batch)
    seconds = alternate(
        {
            "search": lambda: search(groupings(profile, cluster, "disaggregated")[0], cluster),
            "plan": lambda: ranking(profile, cluster, "disaggregated", 3),
        },
        rounds,
    )
    ranked, _, simulated = ranking(profile, cluster, "disaggregated", 3)
    plain = replace(cluster, splits=False, overlaps=False, hides=False)
    published = planned_by(profile, plain, "paper")
    return {
        "GPUs": gpus,
        "batch": batch,
        "search ms": 1e3 * median(seconds["search"]),
        "finalists": simulated,
        "search and finalists ms": 1e3 * median(seconds["plan"]),
        "predicted s": ranked[0].iteration_s,
        "paper's plan over it": (
            published[1].iteration_s / ranked[0].iteration_s if published else "–"
        ),
    }


def measure(small: bool = False) -> Tables:
    """Two tables."""
    rounds = 1 if small else 5
    shapes = SHAPES[:1] if small else SHAPES
    plans = [(16, 64)] if small else [(96, BATCH), (1296, BATCH)]
    return {
        "One simulated iteration, batch 1,920": [
            iteration(tuple(units), slots, rounds) for *units, slots in shapes
        ],
        "A plan with its finalists simulated": [plan(gpus, batch, rounds) for gpus, batch in plans],
    }


if __name__ == "__main__":
    main(__doc__, measure)
