"""Published recipes (`recipes.yaml`) as they stand, and our plans on the same devices.

    python -m benchmarks.recipes          on H100 and on A800
    python -m benchmarks.recipes --small  the first recipe, on H100

Each is priced on its preset's data and sequence length, not on its own, with its own devices, batch
and microbatch, trained modules and recomputing. Megatron's layers are split evenly or as the recipe
says, the encoder beside its share on the first stage; samples come in their own order, and messages
overlap where the recipe says so. Backwards are whole, and TP groups share activations between
products, also where a recipe has no sequence parallelism. Parameters under ZeRO-3 and FSDP are
sharded as in `planning.sharded`. A recipe whose predicted peak exceeds the memory has its time in
brackets: its own sequences were shorter. "over" is our plan's throughput over the recipe's.

Costs are those frozen in `costs/` (`grouping.py`). Simulated; nothing here was measured on a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from benchmarks.common import Tables, main
from benchmarks.grouping import DEVICES, frozen
from disttrain_cli.costs.memory import layout_memory
from disttrain_cli.errors import InfeasibleError
from disttrain_cli.planning.draws import Draws
from disttrain_cli.planning.predict import batches, simulated_s
from disttrain_cli.planning.sharded import Sharding, sharded
from disttrain_cli.planning.solve import solve_for
from disttrain_cli.planning.units import Cluster
from disttrain_cli.spec.plan import Layout, UnitPlan
from disttrain_cli.spec.profile import Profile

PUBLISHED = Path(__file__).parent / "recipes.yaml"


@dataclass(frozen=True)
class Recipe:
    """What a published file says, as far as it decides the step (`recipes.yaml`)."""

    name: str
    model: str
    preset: str
    source: str
    gpus: int
    batch: int
    microbatch: int
    length: int
    device: str = ""
    tp: int = 1
    pp: int = 1
    zero: int = 1
    first: int | None = None
    recomputes: bool = False
    trained: tuple[str, ...] | None = None
    overlap: bool = False
    tp_overlap: bool = False

    @property
    def dp(self) -> int:
        return self.gpus // (self.tp * self.pp)

    def __str__(self) -> str:
        degrees = "ZeRO-3" if self.zero == 3 else f"TP {self.tp} DP {self.dp} PP {self.pp}"
        return f"{degrees}, M {self.microbatch}{', recomputing' * self.recomputes}"


def recipes() -> list[Recipe]:
    """All published recipes."""
    rows = yaml.safe_load(PUBLISHED.read_text())
    return [
        Recipe(**row | {"trained": tuple(row["trained"]) if "trained" in row else None})
        for row in rows
    ]


def cluster_of(recipe: Recipe, profile: Profile) -> Cluster:
    """The devices of a recipe, in nodes of 8, for plans that may do what ours may."""
    return Cluster(
        gpus=recipe.gpus,
        gpus_per_node=8,
        memory_gib=profile.device.memory_gib,
        zero_stage=1,
        batch=recipe.batch,
        trained=recipe.trained,
        checkpointing="auto",
        splits=True,
        overlaps=True,
        hides=True,
    )


def layout_of(recipe: Recipe, profile: Profile) -> Layout:
    """The recipe as one unit of all modules, with the encoder on its first stage."""
    *encoders, llm = (len(module.layers) for module in profile.modules.values())
    blocks, stages = llm - 2, recipe.pp  # without the embedding and the head
    first = blocks // stages if recipe.first is None else recipe.first
    others = (blocks - first) // max(1, stages - 1)
    layers = [first, *[others] * (stages - 1)]
    layers[0] += sum(encoders) + 1
    layers[-1] += 1
    return Layout(
        strategy="megatron",
        global_batch_size=recipe.batch,
        microbatch_size=recipe.microbatch,
        microbatches=recipe.batch // (recipe.dp * recipe.microbatch),
        gpus_used=recipe.gpus,
        trained=None if recipe.trained is None else list(recipe.trained),
        overlap=recipe.overlap,
        units=[
            UnitPlan(
                name="model",
                modules=list(profile.modules),
                tp=recipe.tp,
                dp=recipe.dp,
                pp=stages,
                gpus=recipe.gpus,
                layers_per_stage=layers,
                checkpointing=recipe.recomputes,
                tp_overlap=recipe.tp_overlap,
            )
        ],
    )


def as_published(recipe: Recipe, profile: Profile) -> tuple[float, float]:
    """Seconds of a recipe's step, and the peak memory of its fullest device in GiB."""
    cluster = replace(cluster_of(recipe, profile), ordering="none")
    draws = Draws(profile, cluster)
    if recipe.zero == 3:
        known = (recipe.gpus, recipe.gpus, recipe.microbatch, recipe.recomputes)
        sharding = Sharding(profile, cluster, *known)
        return sharding.step_s(draws, batches(cluster)), sharding.peak_gib()
    layout = layout_of(recipe, profile)
    memory = layout_memory(profile, layout, cluster.memory_gib)
    seconds = simulated_s(profile, layout, cluster, draws=draws)
    return seconds, max(stage.peak_gib for stage in memory)


def row(recipe: Recipe, device: str) -> dict[str, Any]:
    """A recipe beside our plan for its devices, batch and trained modules."""
    _, profile = frozen(recipe.preset, device)
    seconds, peak_gib = as_published(recipe, profile)
    fits = peak_gib <= profile.device.memory_gib
    cluster = cluster_of(recipe, profile)
    fsdp = sharded(profile, cluster, Draws(profile, cluster))
    try:
        plan = solve_for(profile, cluster)
    except InfeasibleError:
        plan = None
    ours_s = None if plan is None else plan.predicted.iteration_s
    return {
        "recipe": recipe.name,
        "preset": recipe.preset,
        "GPUs": recipe.gpus,
        "batch": recipe.batch,
        "layout": str(recipe),
        "its tokens": recipe.length,
        "GiB": peak_gib,
        "s": f"{seconds:.3f}" if fits else f"({seconds:.3f})",
        "best FSDP, s": "–" if fsdp is None else fsdp.iteration_s,
        "our plan": "does not fit" if plan is None else plan.plan.describe(),
        "ours, s": "–" if ours_s is None else ours_s,
        "over": "–" if ours_s is None else seconds / ours_s,
    }


def measure(small: bool = False) -> Tables:
    """One table per device."""
    chosen, devices = (recipes()[:1], DEVICES[:1]) if small else (recipes(), DEVICES)
    return {
        f"Published recipes on {device}, simulated": [row(recipe, device) for recipe in chosen]
        for device in devices
    }


if __name__ == "__main__":
    main(__doc__, measure)
