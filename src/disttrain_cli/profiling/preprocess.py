"""Rate at which one core turns the dataset's files into model inputs.

Images and clips are decoded and sequences are packed. These rates decide how many preprocessing
cores a run needs. Files are read as training reads them, through the index; broken files are
skipped, as in training. A named distribution has no files: `decode_like` uses synthetic ones of its
mean image size, and noise for clips.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple, cast

import numpy as np

from disttrain_cli.data.index.sample_index import Index
from disttrain_cli.data.modalities.modality import InParts
from disttrain_cli.data.modalities.registry import MODALITIES
from disttrain_cli.data.packing import Members, Packing
from disttrain_cli.data.reading import ShardReader
from disttrain_cli.data.sequences import SequencePlan
from disttrain_cli.data.tokenizer import read_tokenizer
from disttrain_cli.spec.heads import Grid, Head, Item
from disttrain_cli.spec.index import KINDS
from disttrain_cli.spec.profile import NAMED_ITEMS, PreprocessProfile
from disttrain_cli.spec.runfile import Run

SECONDS = 0.5
#: Modalities that share one rate.
PICTURES = ("image", "target")


def measure_preprocessing(
    run: Run, packing: Packing, seconds: float = SECONDS
) -> PreprocessProfile:
    """Prepare the sequences of `packing` in order for about `seconds`, at least one of them.

    A sequence's time includes its items. The rate of a modality is 0 where the sequences have none.

    Raises:
        DataError: a shard is gone or changed.
    """
    index, tokenizer = packing.index, read_tokenizer(run)
    reader = ShardReader(index, tokenizer)
    seen = {item: Seen() for item in KINDS}
    for item in KINDS:  # the first item loads the decoding libraries
        _alone(packing, reader, item, 0.0)
    sequences, begin = 0, time.perf_counter()
    for number in range(len(packing)):
        plan = SequencePlan(packing, number)
        plan.layout()
        plan.token_ids(tokenizer, reader.texts)
        for sample in plan.samples.tolist():
            for item, timing in seen.items():
                seen[item] = timing + _decode(index, reader, sample, item)
        sequences += 1
        if time.perf_counter() - begin > seconds:
            break
    sequence_s = (time.perf_counter() - begin) / sequences
    for item, timing in seen.items():
        if not timing.items and item not in PICTURES:  # none among the first sequences
            seen[item] = _alone(packing, reader, item, seconds / 2)
    return _rates(seen, 1.0 / sequence_s)


class Seen(NamedTuple):
    """Number of prepared items, and the time that it took."""

    items: int = 0
    seconds: float = 0.0

    def __add__(self, other: object) -> Seen:
        assert isinstance(other, Seen)
        return Seen(self.items + other.items, self.seconds + other.seconds)

    @property
    def per_s(self) -> float:
        """Items per second; 0 = not known."""
        return self.items / self.seconds if self.seconds else 0.0


def _rates(seen: Mapping[Item, Seen], sequences_per_s: float) -> PreprocessProfile:
    """Return the rates; images to read and images to generate share one."""
    pictures = sum((seen[item] for item in PICTURES), Seen())
    return PreprocessProfile(
        images_per_s_per_core=pictures.per_s,
        clips_per_s_per_core=seen["audio"].per_s,
        others_per_s_per_core={
            item: timing.per_s for item, timing in seen.items() if item not in NAMED_ITEMS
        },
        sequences_per_s_per_core=sequences_per_s,
    )


def _decode(index: Index, reader: ShardReader, sample: int, item: Item) -> Seen:
    """Decode all items of one modality in a sample."""
    first, last = index.segment_start[sample : sample + 2].tolist()
    begin, count, heads = time.perf_counter(), 0, index.inputs.decoding(item)
    for segment in range(first, last):
        if not index.files[segment] or index.kinds[segment] != KINDS[item] or not heads:
            continue
        head, grid = heads[0], tuple(index.grids[segment].tolist())
        count += (parts := int(index.parts[segment]))
        data, modality = reader.file(sample, segment), MODALITIES[item]
        with contextlib.suppress(ValueError):
            if head.packed:
                modality.check(data, head, grid)
            elif head.cuts:
                outs = [(part, modality.blank(head, grid)) for part in range(parts)]
                cast(InParts, modality).decode_parts(data, head, grid, parts, outs)
            else:
                modality.decode(data, head, grid, modality.blank(head, grid))
    return Seen(count, time.perf_counter() - begin if count else 0.0)


def _alone(packing: Packing, reader: ShardReader, item: Item, seconds: float) -> Seen:
    """Decode the first items of a modality for about `seconds`."""
    index = packing.index
    samples = np.searchsorted(index.segment_start, packing.items[item].segment, side="right") - 1
    seen, begin = Seen(), time.perf_counter()
    for sample in dict.fromkeys(samples.tolist()):
        seen += _decode(index, reader, sample, item)
        if time.perf_counter() - begin > seconds:
            break
    return seen


def decode_like(packing: Packing, seconds: float = SECONDS) -> PreprocessProfile:
    """Return rates on synthetic files: images of the model's mean input size, targets as generated.

    Clips are as long as the model's inputs, without the decoding of their files. Larger originals
    take longer, and packing tokens is not timed here: an upper bound of the rates. The rate of
    sequences is 0 where they have no items.
    """
    inputs, seen = packing.index.inputs, {item: Seen() for item in KINDS}
    for item, members in packing.items.items():
        heads = inputs.decoding(item)
        if not heads or not len(members):
            continue
        call = MODALITIES[item].example(heads[0], _mean_grid(heads[0], members))
        if call is not None:
            seen[item] = Seen(len(members), len(members) * _mean_s(call, seconds / 2.0))
    all_s = sum(timing.seconds for timing in seen.values())
    return _rates(seen, len(packing) / all_s if all_s else 0.0)


def _mean_grid(head: Head, members: Members) -> Grid:
    """Return a square of the mean area, in whole merge blocks."""
    if head.alike:
        return 1, 1
    merge = getattr(head, "merge", 1)
    side = max(1, round(np.sqrt(members.area.mean()) / merge)) * merge
    return side, side


def _mean_s(call: Callable[[], object], seconds: float) -> float:
    """Return the mean time of a call repeated for about `seconds`, after one warm-up call."""
    call()
    begin, calls = time.perf_counter(), 0
    while calls == 0 or time.perf_counter() - begin < seconds:
        call()
        calls += 1
    return (time.perf_counter() - begin) / calls
