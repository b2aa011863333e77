"""The dataset in numbers: distributions over packed sequences, work that each brings, entropy of its tokens."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from disttrain_cli.data.index import Index
from disttrain_cli.data.packing import Packing
from disttrain_cli.data.reading import ShardReader
from disttrain_cli.data.tokenizer import read_tokenizer
from disttrain_cli.spec.index import IMAGE, TEXT
from disttrain_cli.spec.profile import DataProfile, Distribution
from disttrain_cli.spec.runfile import Run
from disttrain_cli.spec.work import Work

ENTROPY_SAMPLES = 20_000  # samples read at most, evenly spaced


def describe_data(packing: Packing) -> DataProfile:
    """What the profile says of the data; `packing` is one epoch."""
    index = packing.index
    return DataProfile(
        samples=len(index),
        sequences=len(packing),
        fingerprint=index.fingerprint,
        text_tokens=int(index.tokens[index.kinds == TEXT].sum()),
        image_tokens=int(index.tokens[index.kinds == IMAGE].sum()),
        images=len(packing.image_segment),
        targets=len(packing.target_segment),
        fill_fraction=packing.fill_fraction,
        images_per_sequence=distribution(np.diff(packing.image_start)),
        skipped=len(index.skipped),
    )


def distribution(values: NDArray[np.int64]) -> Distribution:
    """Mean, percentiles and maximum; zeros where there are no values."""
    if not len(values):
        return Distribution(mean=0, p50=0, p95=0, p99=0, max=0)
    p50, p95, p99 = (float(value) for value in np.percentile(values, (50, 95, 99)))
    return Distribution(mean=float(values.mean()), p50=p50, p95=p95, p99=p99, max=float(values.max()))


def sequence_work(packing: Packing) -> dict[str, NDArray[np.float64]]:
    """By module name, [Q, 3]: the columns of `Work` that each packed sequence brings to the module."""
    inputs = packing.index.inputs
    work = {inputs.llm: np.stack([np.ones(len(packing)), packing.tokens, packing.length_sq], axis=1)}
    if inputs.image is not None:
        patches = packing.image_grid.prod(axis=1)
        work[inputs.image.module] = np.stack(
            [
                np.diff(packing.image_start),
                packing.of_sequences(packing.image_start, patches),
                packing.of_sequences(packing.image_start, patches**2),
            ],
            axis=1,
        ).astype(float)
    if inputs.target is not None:
        work[inputs.target.module] = np.diff(packing.target_start)[:, None] * np.array(inputs.target.work(1))
    return work


def mean_and_max_work(packing: Packing) -> dict[str, tuple[Work, Work]]:
    """By module name: mean work per sequence, and the largest of each of its amounts in one sequence."""
    return {
        module: (Work(*rows.mean(axis=0).tolist()), Work(*rows.max(axis=0).tolist()))
        for module, rows in sequence_work(packing).items()
    }


def unigram_entropy(run: Run, index: Index) -> float:
    """Entropy in nats of the label tokens by their frequency alone: the text loss of a model without context.

    Over all samples, or evenly spaced ones where there are more than `ENTROPY_SAMPLES`; raises DataError where a
    shard changed.
    """
    tokenizer = read_tokenizer(run)
    reader = ShardReader(index, tokenizer)
    counts = np.zeros(index.inputs.vocabulary, dtype=np.int64)
    for sample in np.unique(np.linspace(0, len(index) - 1, min(len(index), ENTROPY_SAMPLES)).astype(int)).tolist():
        counts[tokenizer.eos] += 1
        for text in reader.texts(sample):
            counts += np.bincount(np.array(text, dtype=np.int64), minlength=len(counts))
    share = counts[counts > 0] / counts.sum()
    return float(-(share * np.log(share)).sum())
