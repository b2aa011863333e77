"""Files that become several items: an image cut into tiles, a video cut into pieces.

Each part of a file is a segment, an item of its modality. The texts that the model's processor
writes around parts are constant and not trained. In conversations of a chat template they belong to
its text (`data.chat`); elsewhere they are segments `AROUND`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from disttrain_cli.data.slots import Ints
from disttrain_cli.data.sources.samples import Segment
from disttrain_cli.spec.cutting import Written
from disttrain_cli.spec.heads import Numbers
from disttrain_cli.spec.index import AROUND, ITEMS, KINDS, TEMPLATED, TEXT
from disttrain_cli.spec.inputs import ModelInputs


def in_parts(segments: Sequence[Segment], inputs: ModelInputs) -> list[Segment]:
    """Return a sample's segments with every file cut into its parts, and the texts around them.

    A sample that a chat template rendered is unchanged, as its text already contains them.

    Raises:
        ValueError: the model's processor refuses such files; the message has the reason.
    """
    if any(one.kind == TEXT and one.height_px == TEMPLATED for one in segments):
        return list(segments)
    pieces = list[Segment]()
    texts = written_around(
        [(one.kind, one.numbers) for one in segments if one.kind != TEXT], inputs
    )
    for segment in segments:
        if segment.kind == TEXT:
            pieces.append(segment)
            continue
        first, *others = next(texts)
        pieces += _around(segment, first)
        for part, text in enumerate(others):
            pieces += [segment._replace(part=part), *_around(segment, text)]
    return pieces


def _around(file: Segment, text: str) -> list[Segment]:
    return [Segment(TEXT, file.location, text, part=AROUND)] if text else []


def written_around(files: Sequence[tuple[int, Numbers]], inputs: ModelInputs) -> Iterator[Written]:
    """Return the texts around the parts of each file of a sample (`Head.written`).

    Args:
        files: kind and header sizes of each.
    """
    by_kind = {
        kind: iter(inputs.of(item)[0].written([given for of, given in files if of == kind]))
        for item, kind in KINDS.items()
        if any(of == kind for of, _ in files)
    }
    return iter([next(by_kind[kind]) for kind, _ in files])


def cutting(inputs: ModelInputs) -> bool:
    """Return True if any file may become several parts, or has texts around it."""
    return any(heads and heads[0].cuts for heads in map(inputs.of, ITEMS.values()))


def first_parts(kinds: Ints, part: Ints) -> Ints:
    """Return the index [segments] of the first part of each item's file; for a text, its own."""
    places = np.arange(len(kinds))
    begins = np.where((kinds != TEXT) & (part == 0), places, 0)
    return np.where(kinds == TEXT, places, np.maximum.accumulate(begins))


def counts_of_parts(first: Ints) -> Ints:
    """Return the number [segments] of parts of each item's file, from its `first_parts`."""
    return np.bincount(first, minlength=len(first))[first]
