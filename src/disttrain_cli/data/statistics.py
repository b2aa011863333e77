"""Statistics of the dataset: sizes of packed sequences, their work, entropy of the tokens."""

from __future__ import annotations

from array import array
from collections import Counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from disttrain_cli.data.index.sample_index import Index
from disttrain_cli.data.packing import Packing
from disttrain_cli.data.reading import ShardReader
from disttrain_cli.data.sizes import sizes_of
from disttrain_cli.data.sources.samples import largest_first, samples_lost, shown_skipped
from disttrain_cli.data.tokenizer import read_tokenizer
from disttrain_cli.spec.index import IMAGE, KINDS, TEXT
from disttrain_cli.spec.profile import (
    NAMED_ITEMS,
    DataProfile,
    Distribution,
    LossToBeat,
    SizeSample,
)
from disttrain_cli.spec.runfile import Run
from disttrain_cli.spec.work import Work

ENTROPY_SAMPLES = 20_000  # samples read at most, evenly spaced
REPEATED = 5  # mean occurrences of a question with its answer, or of an answer, to be counted
OPEN = 0.1  # nats per answer that must remain to be learnt
NAMED = 3  # skipped entries that the profile names
SAMPLED_SEQUENCES = 1024  # packed sequences whose sizes the profile stores


def describe_data(packing: Packing) -> DataProfile:
    """Return the statistics of the data for the profile; `packing` is one epoch."""
    index = packing.index
    return DataProfile(
        samples=len(index),
        sequences=len(packing),
        fingerprint=index.fingerprint,
        text_tokens=int(index.tokens[index.kinds == TEXT].sum()),
        label_tokens=int(index.label_tokens.sum()),
        image_tokens=int(index.tokens[index.kinds == IMAGE].sum()),
        images=len(packing.items["image"]),
        scaled_down=index.scaled_down,
        videos=int((index.files & (index.frames > 0)).sum()),
        targets=len(packing.items["target"]),
        clips=len(packing.items["audio"]),
        others={item: len(packing.items[item]) for item in KINDS if item not in NAMED_ITEMS},
        fill_fraction=packing.fill_fraction,
        images_per_sequence=distribution(packing.items["image"].counts),
        duplicates=index.repeated_count,
        skipped=samples_lost(index.skipped),
        skipped_first=[
            f"{shown_skipped(one)}: {one.reason}" for one in largest_first(index.skipped)[:NAMED]
        ],
        skipped_entries=len(index.skipped),
        unread=index.unread,
        unread_files=index.unread_files,
        unread_keys=index.unread_keys if any(index.unread_keys) else [],
        sample=size_sample(packing),
    )


def size_sample(packing: Packing, count: int = SAMPLED_SEQUENCES) -> SizeSample:
    """Return the sizes of `count` sequences in packed order, or of all if there are fewer.

    They are spread evenly over the sequences sorted by patches read and, among similar ones, by
    images to generate and then by items of other modalities: the error of their means is a fraction
    of that of a random sample of the same size.
    """
    sizes, target = sizes_of(packing), packing.index.inputs.target
    count = min(count, len(sizes))
    areas = {item: items.per_sequence(items.area) for item, items in sizes.items.items()}
    keys = [items for item, items in areas.items() if item in ("image", "target") or items.any()]
    spread = _spread(keys, groups=max(1, round(count ** (1 / len(keys)))))
    sizes = sizes.take(np.sort(spread[(2 * np.arange(count) + 1) * len(sizes) // (2 * count)]))
    return SizeSample(
        tokens=sizes.tokens.tolist(),
        length_sq=sizes.length_sq.tolist(),
        images=sizes.items["image"].lists(),
        targets=sizes.items["target"].counts.tolist(),
        target_areas=[] if target is None or target.alike else sizes.items["target"].lists(),
        clips=sizes.items["audio"].counts.tolist() if len(sizes.items["audio"].area) else [],
        others={
            item: items.lists()
            for item, items in sizes.items.items()
            if item not in NAMED_ITEMS and len(items.area)
        },
    )


def _spread(keys: list[NDArray[np.int64]], groups: int) -> NDArray[np.int64]:
    """Return indices sorted by the first key, within groups of similar values by the next key, etc.

    Groups are sorted in ascending and descending order in turn, so that the errors of one group's
    choice and the next one's compensate.
    """
    similar = [np.arange(len(keys[0]))]
    for depth, key in enumerate(keys):
        parts = [
            part for group in similar for part in np.array_split(group, groups if depth else 1)
        ]
        similar = [
            part[np.argsort((-1) ** turn * key[part], kind="stable")]
            for turn, part in enumerate(parts)
        ]
    return np.concatenate(similar)


def distribution(values: NDArray[np.int64]) -> Distribution:
    """Return mean, percentiles and maximum; zeros without values."""
    if not len(values):
        return Distribution(mean=0, p50=0, p95=0, p99=0, max=0)
    p50, p95, p99 = (float(value) for value in np.percentile(values, (50, 95, 99)))
    return Distribution(
        mean=float(values.mean()), p50=p50, p95=p95, p99=p99, max=float(values.max())
    )


def sequence_work(packing: Packing) -> dict[str, NDArray[np.float64]]:
    """Return, by module name, the work [Q, 3] of each packed sequence: columns of `Work`."""
    return sizes_of(packing).work(packing.index.inputs)


def mean_and_max_work(packing: Packing) -> dict[str, tuple[Work, Work]]:
    """Return, by module name, the mean work per sequence and the largest of each of its columns."""
    return {
        module: (Work(*rows.mean(axis=0).tolist()), Work(*rows.max(axis=0).tolist()))
        for module, rows in sequence_work(packing).items()
    }


def text_loss_to_beat(run: Run, index: Index) -> LossToBeat:
    """Return the text loss of a model that has not learned the task, in nats per label token.

    Such a model predicts by frequencies. For conversations about images, they are those of each
    answer after its question; for other conversations, and if such pairs occur fewer than
    `REPEATED` times on average, those of each answer. If answers repeat too rarely as well, or less
    than `OPEN` nats per answer remain to be learnt, and for all other texts, they are those of each
    token.

    The samples are all, or evenly spaced ones if there are more than `ENTROPY_SAMPLES`.

    Raises:
        DataError: a shard changed.
    """
    tokenizer = read_tokenizer(run)
    reader = ShardReader(index, tokenizer)
    tokens = Counter[int]()  # of labels outside of answers
    answered: dict[bytes, Counter[bytes]] = {}  # by question
    ends = 0  # EOS of samples that end with an answer: no loss remains for them
    shown = False  # True if a conversation has more than texts
    spaced = np.linspace(0, len(index) - 1, min(len(index), ENTROPY_SAMPLES)).astype(int)
    for sample in np.unique(spaced).tolist():
        segments = slice(*index.segment_start[sample : sample + 2])
        texts = index.kinds[segments] == TEXT
        trained = index.trained[segments][texts]
        asks = index.own_texts[segments][texts] & ~trained
        talks = bool(trained.any() and asks[: int(trained.nonzero()[0][-1])].any())
        shown |= talks and not texts.all()
        asked, ids = array("q"), array("q")
        for text, answers in zip(reader.texts(sample), trained.tolist(), strict=False):
            if not answers:
                asked.extend(text)
            elif talks:
                answer = array("q", text).tobytes()
                answered.setdefault(asked.tobytes(), Counter())[answer] += 1
                asked = array("q")
            else:
                ids.extend(text)
        tokens.update(ids)
        if index.end_trained[sample]:
            ends += talks
            tokens.update([] if talks else [tokenizer.eos])
    alone = sum(answered.values(), Counter[bytes]())
    labels = ends + tokens.total() + sum(len(one) // 8 * count for one, count in alone.items())
    for groups, basis in (
        ([*answered.values()] * shown, "answers by their frequency after each question"),
        ([alone], "answers by their frequency"),
    ):
        nats = sum(map(_nats, groups))
        repeated = alone.total() >= REPEATED * sum(map(len, groups)) > 0
        if repeated and nats >= OPEN * alone.total():
            value = (nats + _nats(tokens)) / labels
            return LossToBeat(loss="text", value=value, basis=basis)
    tokens.update([tokenizer.eos] * ends)
    for answer, count in alone.items():
        tokens.update({id_: count * times for id_, times in Counter(array("q", answer)).items()})
    return LossToBeat(
        loss="text", value=_nats(tokens) / max(1, labels), basis="tokens by their frequency"
    )


def _nats(counts: Counter[Any]) -> float:
    """Return the nats that encode all members of some kinds, by their frequency."""
    values = np.array([*counts.values()], dtype=float)
    return float((values * np.log(values.sum() / values)).sum()) if len(values) else 0.0
