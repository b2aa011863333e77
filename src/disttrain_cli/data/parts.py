"""Files that become several items: a picture cut into tiles, a film in pieces.

Each part of a file is a segment of its own, an item of the modality that reads it. What the model's
processor writes around them are texts, known and not trained. In conversations of a chat template
they belong to its text (`data.chat`); elsewhere they are segments `AROUND`.
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
    """A sample's segments with every file in its parts, and the texts around them; as it is where a
    chat template wrote it, which knows them.

    Raises:
        ValueError: the model's processor does not take such files, and why.
    """
    if any(one.kind == TEXT and one.height_px == TEMPLATED for one in segments):
        return list(segments)
    made = list[Segment]()
    texts = written_around(
        [(one.kind, one.numbers) for one in segments if one.kind != TEXT], inputs
    )
    for segment in segments:
        if segment.kind == TEXT:
            made.append(segment)
            continue
        first, *others = next(texts)
        made += _around(segment, first)
        for part, text in enumerate(others):
            made += [segment._replace(part=part), *_around(segment, text)]
    return made


def _around(file: Segment, text: str) -> list[Segment]:
    return [Segment(TEXT, file.location, text, part=AROUND)] if text else []


def written_around(files: Sequence[tuple[int, Numbers]], inputs: ModelInputs) -> Iterator[Written]:
    """Of each file of a sample, of its kind and numbers, the texts around its parts
    (`Head.written`)."""
    by_kind = {
        kind: iter(inputs.of(item)[0].written([given for of, given in files if of == kind]))
        for item, kind in KINDS.items()
        if any(of == kind for of, _ in files)
    }
    return iter([next(by_kind[kind]) for kind, _ in files])


def cutting(inputs: ModelInputs) -> bool:
    """Whether any file may become several parts, or has texts around it."""
    return any(heads and heads[0].cuts for heads in map(inputs.of, ITEMS.values()))


def first_parts(kinds: Ints, part: Ints) -> Ints:
    """[segments] the first part of each item's file; of a text itself."""
    places = np.arange(len(kinds))
    begins = np.where((kinds != TEXT) & (part == 0), places, 0)
    return np.where(kinds == TEXT, places, np.maximum.accumulate(begins))


def counts_of_parts(first: Ints) -> Ints:
    """[segments] how many parts each item's file has, of their `first_parts`."""
    return np.bincount(first, minlength=len(first))[first]
