"""Time of ordering a global batch, and what the order is worth: largest load over the mean, by
policy.

A batch of 1,920 packed sequences of the distribution `laion-like` with the means of the paper's
models (8 images read and 8 generated of 512x512 pixels, 16 of 1024x1024), over layouts from one LLM
replica to many. `assign` gives the sequences their places, `loads` the work of every replica,
`order_step` the slots that training runs. The figure of a module is the mean over slots of its
largest replica's work ÷ the mean of all replicas and slots: 1 is level. CPU time of one core,
median; the loads are deterministic. The policy `best` is measured by benchmarks/best.py. Run from
the repository with the `dev` extra installed.
"""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.common import Tables, alternate, main
from disttrain_cli.data.epochs.mixture import Mixture
from disttrain_cli.data.indexing.building import open_index
from disttrain_cli.data.ordering.assigning import assign, count_costs, order_step
from disttrain_cli.data.ordering.loads import replica_loads
from disttrain_cli.data.packing import Packing, SequenceStream
from disttrain_cli.data.sizes import Sizes, sizes_of
from disttrain_cli.spec.heads import ImageInput, TargetInput
from disttrain_cli.spec.inputs import ModelInputs
from disttrain_cli.spec.plan import Layout, UnitPlan
from disttrain_cli.spec.runfile import Run, RunFile

BATCH = 1920
MODULES = ("encoder", "llm", "generator")
#: (images read and generated, side in pixels, merge) of the paper's models.
MODELS = {"9B, 15B": (8, 512, 2), "72B": (16, 1024, 4)}
#: (encoder DP, LLM DP, LLM PP, generator DP, M); the last one has all modules in one unit.
LAYOUTS = (
    (8, 1, 10, 8, 1),
    (16, 8, 10, 32, 1),
    (100, 60, 2, 200, 1),
    (200, 120, 1, 300, 4),
    (None, 16, 10, None, 1),
)


def batch_of(images: int, side: int, merge: int, count: int) -> Packing:
    """The first sequences of the stream."""
    inputs = ModelInputs(
        llm="llm",
        vocabulary=32_000,
        sequence_length=8192,
        heads=[
            ImageInput(module="encoder", patch_px=14, merge=merge, max_pixels=side * side),
            TargetInput(
                module="generator", size_px=side, context_tokens=77, latent_pixels=(side // 8) ** 2
            ),
        ],
    )
    distribution = {
        "images_per_sequence": images,
        "generated_per_sequence": images,
        "min_side_px": side,
    }
    file = RunFile.model_validate(
        {
            "name": "ordering",
            "model": {"modules": {"llm": {"kind": "llm", "architecture": "llama"}}},
            "data": {"distribution": distribution},
            "train": {"global_batch_size": count, "steps": 1},
        }
    )
    with tempfile.TemporaryDirectory() as folder:
        index = open_index(Run(path=Path(folder) / "disttrain.yaml", file=file), inputs)
    return SequenceStream(Mixture(index, 0)).batch(0, count)


def layout_of(
    encoder_dp: int | None, dp: int, pp: int, generator_dp: int | None, m: int, batch: int
) -> Layout:
    def unit(name: str, modules: list[str], dp: int, pp: int = 1) -> UnitPlan:
        return UnitPlan(
            name=name, modules=modules, dp=dp, pp=pp, gpus=dp * pp, layers_per_stage=[1] * pp
        )

    units = [unit("all", list(MODULES), dp, pp)]
    if encoder_dp is not None and generator_dp is not None:
        units = [
            unit("encoder", ["encoder"], encoder_dp),
            unit("llm", ["llm"], dp, pp),
            unit("generator", ["generator"], generator_dp),
        ]
    return Layout(
        global_batch_size=batch,
        microbatch_size=m,
        microbatches=batch // (dp * m),
        gpus_used=sum(own.gpus for own in units),
        units=units,
    )


def times(batch: Packing, layout: Layout, rounds: int) -> dict[str, float]:
    """CPU ms of each part, policy `paper`."""
    inputs, sizes = batch.index.inputs, sizes_of(batch)
    costs = count_costs(sizes, inputs)
    assignment = assign(costs, layout, inputs.llm, "paper")
    seconds = alternate(
        {
            "assign ms": partial(assign, costs, layout, inputs.llm, "paper"),
            "loads ms": partial(replica_loads, sizes, inputs, layout, assignment),
            "order_step ms": partial(order_step, batch, layout, 0, assignment),
        },
        rounds,
    )
    return {name: 1e3 * median(own) for name, own in seconds.items()}


def imbalance(sizes: Sizes, inputs: ModelInputs, layout: Layout, policy: str) -> dict[str, float]:
    """Mean over slots of the largest replica's tokens ÷ the mean over replicas and slots, by
    module.

    All sequences of the distribution are full, so the LLM's replicas are level.
    """
    assignment = assign(count_costs(sizes, inputs), layout, inputs.llm, policy)
    tokens = {
        module: load[..., 1]
        for module, load in replica_loads(sizes, inputs, layout, assignment).items()
    }
    return {
        f"{module}, {policy}": float(tokens[module].max(axis=1).mean() / tokens[module].mean())
        for module in ("encoder", "generator")
    }


def measure(small: bool = False) -> Tables:
    """Times and loads of every model and layout."""
    count, rounds = (96, 1) if small else (BATCH, 5)
    time_rows: list[dict[str, Any]] = []
    load_rows: list[dict[str, Any]] = []
    for model, shape in MODELS.items():
        batch = batch_of(*shape, count)
        sizes, inputs = sizes_of(batch), batch.index.inputs
        for degrees in LAYOUTS:
            if count % (degrees[1] * degrees[-1]):
                continue
            layout = layout_of(*degrees, count)
            head = {
                "model": model,
                "DP": " → ".join(f"{'+'.join(own.modules)} {own.dp}" for own in layout.units),
                "M": layout.microbatch_size,
                "slots": layout.microbatches,
            }
            time_rows.append(
                head | {"images": len(batch.items["image"].segment)} | times(batch, layout, rounds)
            )
            none, paper = (imbalance(sizes, inputs, layout, policy) for policy in ("none", "paper"))
            load_rows.append(head | none | paper)
    return {
        "Time of ordering a batch, CPU ms": time_rows,
        "Largest load of a slot over the mean": load_rows,
    }


if __name__ == "__main__":
    main(__doc__, measure)
