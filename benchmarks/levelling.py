"""Largest encoder load over the mean when a slot's work is split over the replicas of an encoder
unit.

Three splits of the same slots: whole sequences in the order they were packed; whole sequences
levelled (longest first, equal counts); image by image, as disttrain orders them. A load is a number
of patches. The figure is the sum over slots of the largest load ÷ the sum of the means: what the
encoder's part of a step pays. Deterministic.

Two data sets: the sample data of the preset `tiny` (sequences of 256 tokens), and synthetic
documents (8,192 tokens, patches of 14 pixels, 2x2 of them a token, at most 1022x1022 pixels): 815
text tokens and 2.5 images on average, as published for OBELICS; the forms are ours (text log-normal
with sigma 1, images geometric: 1, 2, ...), the sizes of images those of the distribution
`laion-like`.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np

from benchmarks.common import Tables, main
from disttrain_cli.data.arrays import starts_of
from disttrain_cli.data.distribution import image_sizes, read_distribution
from disttrain_cli.data.epochs.mixture import Mixture
from disttrain_cli.data.index.sample_index import Index
from disttrain_cli.data.indexing.building import build_index
from disttrain_cli.data.ordering.assigning import assign, count_costs, order_step
from disttrain_cli.data.ordering.levelling import level
from disttrain_cli.data.packing import SequenceStream
from disttrain_cli.data.sizes import sizes_of
from disttrain_cli.data.sources import Shard
from disttrain_cli.spec.heads import ImageInput
from disttrain_cli.spec.index import IMAGE, SAMPLE_SPECIALS, TEXT
from disttrain_cli.spec.inputs import ModelInputs
from disttrain_cli.spec.plan import Layout, UnitPlan

DEGREES = (2, 4, 8)
SLOT_SEQUENCES = (8, 32)
DOCUMENT_TOKENS, DOCUMENT_IMAGES = 815, 2.5
INPUTS = ModelInputs(
    llm="llm",
    vocabulary=32_000,
    sequence_length=8192,
    heads=[ImageInput(module="image_encoder", patch_px=14, merge=2, max_pixels=1022 * 1022)],
)


def synthetic(documents: int, seed: int = 0) -> Index:
    """An index of synthetic documents; those longer than a sequence are left out, as with real
    data."""
    assert INPUTS.image is not None
    random = np.random.default_rng(seed)
    kinds, tokens, grids, counts = [], [], [], []
    images_of = random.geometric(1 / DOCUMENT_IMAGES, documents)
    every_grid = INPUTS.image.grids(
        image_sizes(read_distribution("laion-like"), int(images_of.sum()))
    ).tolist()
    for images, end in zip(images_of.tolist(), images_of.cumsum().tolist(), strict=True):
        own = every_grid[end - images : end]
        text = max(1, round(random.lognormal(np.log(DOCUMENT_TOKENS) - 0.5, 1.0)))
        lengths = [text, *(rows * columns // INPUTS.image.merge**2 for rows, columns in own)]
        if sum(lengths) + SAMPLE_SPECIALS <= INPUTS.sequence_length:
            kinds += [TEXT] + [IMAGE] * images
            tokens += lengths
            grids += [(0, 0), *own]
            counts.append(len(lengths))
    none = np.zeros(len(kinds), dtype=np.int64)
    return Index(
        fingerprint="synthetic",
        inputs=INPUTS,
        weights=[1.0],
        shards=[Shard("tar", "none", "none")],
        skipped=[],
        source=np.zeros(len(counts), np.int64),
        shard=np.zeros(len(counts), np.int64),
        keys=[str(number) for number in range(len(counts))],
        segment_start=starts_of(np.array(counts)),
        kinds=np.array(kinds),
        tokens=np.array(tokens),
        trained=np.array(kinds) == TEXT,
        ended=none.astype(bool),
        offsets=none,
        sizes=none,
        grids=np.array(grids),
    )


def sample_data() -> Index:
    """The index of the preset `tiny` on the sample data."""
    from disttrain_cli.api.presets import preset_text
    from disttrain_cli.data.sample_data import write_sample_data
    from disttrain_cli.models.graph import describe
    from disttrain_cli.spec.runfile import read_run

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_sample_data(folder / "data")
        (folder / "disttrain.yaml").write_text(preset_text("tiny"), encoding="utf-8")
        run = read_run(folder / "disttrain.yaml")
        return build_index(run, describe(run))


def imbalance(index: Index, dp: int, slot_sequences: int, steps: int) -> dict[str, float]:
    """Σ largest load ÷ Σ mean load over the slots of the first `steps` global batches, by kind of
    split."""
    inputs = index.inputs
    assert inputs.image is not None
    slots = max(1, 256 // slot_sequences)
    units = [
        UnitPlan(name=name, modules=[name], dp=degree, gpus=degree, layers_per_stage=[1])
        for name, degree in ((inputs.image.module, dp), (inputs.llm, slot_sequences))
    ]
    layout = Layout(
        global_batch_size=slots * slot_sequences,
        microbatch_size=1,
        microbatches=slots,
        gpus_used=dp + slot_sequences,
        units=units,
    )
    stream = SequenceStream(Mixture(index, seed=0))
    largest = dict.fromkeys(("sequences in order", "sequences levelled", "images (disttrain)"), 0.0)
    mean = 0.0
    for step in range(steps):
        batch = stream.batch(step * layout.global_batch_size, layout.global_batch_size)
        packed = assign(count_costs(sizes_of(batch), inputs), layout, inputs.llm, "none")
        for slot in order_step(batch, layout, step, packed).slots:
            patches = slot.items["image"].grid.prod(axis=1)
            load = np.bincount(
                slot.items["image"].sequence, weights=patches, minlength=slot_sequences
            ).astype(np.int64)
            levelled = level(load, dp, slot_sequences // dp)
            largest["sequences in order"] += load.reshape(dp, -1).sum(axis=1).max()
            largest["sequences levelled"] += max(load[members].sum() for members in levelled)
            largest["images (disttrain)"] += max(
                slot.work(inputs.image.module, items).tokens
                for items in slot.replicas[inputs.image.module]
            )
            mean += patches.sum() / dp
    return {name: float(value) / mean for name, value in largest.items()}


def measure(small: bool = False) -> Tables:
    """One table per data set."""
    indices = {"Synthetic documents": synthetic(500 if small else 20_000)}
    if not small:
        indices["Sample data"] = sample_data()
    return {
        f"{name}: largest encoder load over the mean": [
            {"DP": dp, "sequences per slot": slot} | imbalance(index, dp, slot, 1 if small else 8)
            for slot in SLOT_SEQUENCES
            for dp in DEGREES
        ]
        for name, index in indices.items()
    }


if __name__ == "__main__":
    main(__doc__, measure)
