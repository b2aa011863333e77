"""Sample sizes drawn from a named distribution, to plan for data that is not available.

A document holds images read, images to generate, each with its caption, and text between them;
audio clips are drawn like images, each with a text about it. A document fills one packed sequence,
unless the distribution sets the length of documents: then as many are drawn as fill the requested
sequences. The number of images is exactly the requested mean times the number of sequences; each
image goes to a document in proportion to the document's gamma weight, which makes the counts
negative binomial as far as they fit: a document without room for an image takes no more, and the
image goes to another one. Numbers are hashed, not drawn from a random state, so every machine gets
the same sizes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from disttrain_cli.data.arrays import mix, ranges, starts_of
from disttrain_cli.data.headers import MAX_PIXELS
from disttrain_cli.data.slots import Ints
from disttrain_cli.errors import SpecError
from disttrain_cli.spec.cutting import ALONE, Written
from disttrain_cli.spec.files import Strict, fingerprint, identity, parse_yaml, validate
from disttrain_cli.spec.heads import Head, Item
from disttrain_cli.spec.index import KINDS, SAMPLE_SPECIALS, TEXT, UNREAD
from disttrain_cli.spec.inputs import ModelInputs
from disttrain_cli.spec.library_calls import RATE_HZ
from disttrain_cli.spec.runfile.data import DistributionSpec
from disttrain_cli.spec.suggestions import listed

Floats = NDArray[np.float64]

FOLDER = files("disttrain_cli") / "templates" / "distributions"
# Weight of a document, in images; a weight of 0 could leave an image without a document.
LEAST_WEIGHT = 1e-9
PROBED = 1000  # images of a kind that are drawn to estimate their mean size
#: The order in which items are drawn: another order would give other sizes.
DRAWN_IN = ("target", "image", "audio")
TOLD = {"image": "images read", "target": "images generated"}
SPECIAL = re.compile(r"<[^<>]+>|\n+")  # about one token each, in texts around parts
LAST_TEXT = 1  # every document ends with a text of at least one token
SHORTEST = SAMPLE_SPECIALS + LAST_TEXT

# Purposes of `mix`, distinct from those of packing.
SHORT_SIDE, ASPECT, UPRIGHT, CAPTION, WEIGHT, PLACE, PLACE_INSIDE, TEXT_SHARE, LENGTH = range(
    10, 19
)
DURATION = 19


class LogNormal(Strict):
    median: float = Field(gt=0)
    sigma: float = Field(gt=0, description="Standard deviation of the logarithm of the size.")


#: Durations of clips where a model's clips have different lengths: sentences, and some silence.
CLIP_MS, CLIP_LIMITS_MS = LogNormal(median=6000, sigma=0.7), (300, 30_000)


class Distribution(Strict):
    """A file of templates/distributions/."""

    version: Literal[1] = 1
    seed: int = Field(0, ge=0)
    images_per_page: float = Field(
        gt=0,
        description="Mean size of the geometric groups in which images come; larger values skew"
        " the counts per sequence.",
    )
    short_side_px: LogNormal
    aspect_sigma: float = Field(
        gt=0, description="Ratio of the longer to the shorter side: exp(|N(0, aspect_sigma)|)."
    )
    most_aspect: float = Field(gt=1, description="Largest ratio of the longer to the shorter side.")
    caption_tokens: LogNormal
    text_sigma: float = Field(
        gt=0, description="Skew of the distribution of a document's text between its images."
    )
    document_tokens: LogNormal | None = Field(
        None,
        description="Tokens per document, images included; longer documents are cut to a sequence."
        " None: every document fills a sequence.",
    )


class Items(NamedTuple):
    """Files to distribute to documents, each with its parts, which are items."""

    kinds: Ints  # [files] of `KINDS`
    tokens: Ints  # [files] of all parts
    grids: Ints  # [files, 2] of each part
    captions: Ints  # [files] tokens, with those of the texts around the parts
    parts: Ints  # [files] number of parts
    of_parts: Ints  # [Σ parts] tokens of each part


@dataclass(frozen=True)
class Drawn:
    """Sizes of N documents; the segments of all documents are concatenated."""

    fingerprint: str
    segment_start: Ints  # [N + 1]
    kinds: Ints  # [segments]
    tokens: Ints  # [segments]
    grids: Ints  # [segments, 2] of items (`spec.heads.Head`); 0 of texts


def read_distribution(name: str) -> Distribution:
    """Read a distribution by name.

    Raises:
        SpecError: there is no distribution of that name.
    """
    known = sorted(
        entry.name.removesuffix(".yaml")
        for entry in FOLDER.iterdir()
        if entry.name.endswith(".yaml")
    )
    if name not in known:
        raise SpecError(
            f"There is no distribution {name!r} (data.distribution.name)",
            "there is " + listed(name, known),
            "Use one of these, or set data.sources.",
        )
    path = Path(str(FOLDER / f"{name}.yaml"))
    return validate(Distribution, parse_yaml(path, "distribution", ""), path, "distribution")


def draw(spec: DistributionSpec, inputs: ModelInputs) -> Drawn:
    """Draw the sizes of as many documents as `spec` has sequences, for a model.

    Images and clips for which the model has no module are left out.

    Raises:
        SpecError: the distribution is not known, or the requested items do not fit into the
            sequences.
    """
    form = read_distribution(spec.name)
    probe = _items(form, spec, inputs, dict.fromkeys(KINDS, PROBED))
    # checked before the requested number is drawn
    if _mean_tokens(spec, probe) > inputs.sequence_length:
        raise _too_much(spec, inputs, probe)
    asked = {item: round(mean * spec.sequences) for item, mean in spec.per_sequence.items()}
    items = _items(form, spec, inputs, asked)
    lengths = _lengths(form, spec.sequences, inputs.sequence_length)
    document = _place(form, items, lengths)
    if document is None:
        raise _too_much(spec, inputs, probe)
    tokens = _lay_out(form, items, document, lengths)
    made_for = {
        # `exclude_none`: a new field that a distribution does not use leaves its fingerprint
        # unchanged
        "distribution": form.model_dump(mode="json", exclude_none=True),
        "asked": spec.model_dump(mode="json"),
        "inputs": identity(inputs),
    }
    return Drawn(fingerprint(made_for), *tokens)


def _lengths(form: Distribution, sequences: int, sequence_length: int) -> Ints:
    """Return the tokens of each document [documents], in total about those of the sequences."""
    if form.document_tokens is None:
        return np.full(sequences, sequence_length, dtype=np.int64)
    asked, count = sequences * sequence_length, sequences
    while True:
        lengths = (
            _log_normal(form.document_tokens, _uniform(count, form.seed, LENGTH))
            .astype(np.int64)
            .clip(SHORTEST, sequence_length)
        )
        total = np.cumsum(lengths)
        if total[-1] >= asked:
            return lengths[: int(np.searchsorted(total, asked)) + 1]
        count *= 2


def _items(
    form: Distribution, spec: DistributionSpec, inputs: ModelInputs, asked: Mapping[Item, int]
) -> Items:
    """Draw the requested number of items of each modality for which the model has a module."""
    kinds, grids, cuts = [], [], []
    for item in DRAWN_IN:
        heads = inputs.of(item)
        count = asked.get(item, 0) if heads else 0
        if not count:
            continue
        sizes = None
        if not heads[0].alike:
            sizes = (
                clip_sizes(form, count)
                if item == "audio"
                else image_sizes(form, count, spec.min_side_px)
            )
        sizes = np.ones((count, 2), dtype=np.int64) if sizes is None else heads[0].drawn(sizes)
        kinds.append(np.full(count, KINDS[item], dtype=np.int64))
        grids.append(heads[0].grids(sizes))
        cuts.append(_cut(heads[0], sizes))
    nothing = np.zeros(0, dtype=np.int64)
    parts, of_parts, around = (
        np.concatenate([nothing, *(cut[at] for cut in cuts)]) for at in range(3)
    )
    count = sum(map(len, kinds))
    captions = (
        _log_normal(form.caption_tokens, _uniform(count, form.seed, CAPTION))
        .astype(np.int64)
        .clip(1)
    )
    return Items(
        np.concatenate([nothing, *kinds]),
        np.diff(starts_of(of_parts)[starts_of(parts)]),
        np.concatenate([nothing.reshape(0, 2), *grids]),
        captions + around,
        parts,
        of_parts,
    )


def clip_sizes(form: Distribution, count: int) -> Ints:
    """Return the durations of clips in ms and their rate: [count, 2]."""
    drawn = _log_normal(CLIP_MS, _uniform(count, form.seed, DURATION)).clip(*CLIP_LIMITS_MS)
    durations = drawn.astype(np.int64)
    return np.stack([durations, np.full(count, RATE_HZ)], axis=1)


def _cut(head: Head, sizes: Ints) -> tuple[Ints, Ints, Ints]:
    """Cut files with these sizes into parts, each file by itself.

    Images that the model refuses as too large are halved until it reads them.

    Returns:
        (parts of each file, tokens of each part, tokens around the parts of each file).
    """
    if not head.cuts:
        one, none = np.ones(len(sizes), dtype=np.int64), np.zeros(len(sizes), dtype=np.int64)
        return one, head.tokens_of(sizes, none, one), none
    written, read = [], []
    for width, height in sizes.tolist():
        while (texts := _written(head, width, height)) is None:
            width, height = -(-width // 2), -(-height // 2)
        written.append(texts)
        read.append((width, height))
    parts = np.array([len(texts) - 1 for texts in written], dtype=np.int64)
    of_parts = head.tokens_of(
        np.repeat(np.array(read, dtype=np.int64), parts, axis=0),
        ranges(np.zeros_like(parts), parts),
        np.repeat(parts, parts),
    )
    around = [sum(len(SPECIAL.findall(text)) for text in texts) for texts in written]
    return parts, of_parts, np.array(around, dtype=np.int64)


def _written(head: Head, width: int, height: int) -> Written | None:
    """Return the texts around the parts of an image; None if the model does not read it."""
    try:
        (texts,) = head.written([(width, height)])
    except ValueError:
        return None if min(width, height) > 1 else ALONE
    return texts


def image_sizes(form: Distribution, count: int, min_side_px: int = 0) -> Ints:
    """Draw the widths and heights [count, 2] in pixels, portrait and landscape equally often.

    Raises:
        SpecError: images with so long a shorter side are never read.
    """
    from scipy.special import ndtr, ndtri

    if min_side_px**2 > MAX_PIXELS:
        raise SpecError(
            f"No image has a shorter side of {min_side_px} px (data.distribution.min_side_px)",
            f"images of more than {MAX_PIXELS:,} pixels are not read",
            "Lower it.",
        )
    side, sigma = form.short_side_px, form.short_side_px.sigma
    least = math.log(max(1, min_side_px) / side.median) / sigma
    # of the normal distribution's part above `least`
    above = -ndtri(_uniform(count, form.seed, SHORT_SIDE) * ndtr(-least))
    short = side.median * np.exp(sigma * above)
    within = ndtr(math.log(form.most_aspect) / form.aspect_sigma) - 0.5
    long = short * np.exp(
        form.aspect_sigma * ndtri(0.5 + within * _uniform(count, form.seed, ASPECT))
    )
    sizes = np.stack([short, long], axis=1).round().astype(np.int64).clip(1)
    upright = _uniform(count, form.seed, UPRIGHT) < 0.5
    return np.where(upright[:, None], sizes, sizes[:, ::-1])


def _place(form: Distribution, items: Items, lengths: Ints) -> Ints | None:
    """Assign a document to each image by the documents' weights; None if the images do not fit.

    Longer documents have larger weights. No document gets more tokens than its length.
    """
    from scipy.special import gammaincinv

    kinds, need, documents = items.kinds, items.tokens + items.captions, len(lengths)
    longer = lengths / lengths.mean()
    weights = {}
    for kind, count in zip(*np.unique(kinds, return_counts=True), strict=True):
        pages = count / documents / form.images_per_page * longer
        weights[kind] = np.maximum(
            gammaincinv(pages, _uniform(documents, form.seed, WEIGHT, kind)), LEAST_WEIGHT
        )
    document = np.empty(len(kinds), dtype=np.int64)
    room, is_open = lengths - SHORTEST, np.ones(documents, dtype=bool)
    left, turn = np.arange(len(kinds)), 0
    while len(left):
        if not is_open.any():
            return None
        chance = _unit(mix(form.seed, PLACE, turn, left))
        chosen = np.empty(len(left), dtype=np.int64)
        for kind, weight in weights.items():
            total = np.cumsum(weight * is_open)
            mask = kinds[left] == kind
            chosen[mask] = np.searchsorted(total, chance[mask] * total[-1], side="right")
        by_document = np.argsort(chosen, kind="stable")
        left, chosen = left[by_document], chosen[by_document]
        total = np.cumsum(need[left])
        first = np.flatnonzero(np.diff(chosen, prepend=-1))
        before = np.repeat((total - need[left])[first], np.diff(first, append=len(left)))
        fits = total - before <= room[chosen]
        document[left[fits]] = chosen[fits]
        room -= np.bincount(chosen[fits], need[left[fits]], documents).astype(np.int64)
        is_open[chosen[~fits]] = False
        left, turn = left[~fits], turn + 1
    return document


def _lay_out(
    form: Distribution, items: Items, document: Ints, lengths: Ints
) -> tuple[Ints, Ints, Ints, Ints]:
    """Return the segments in order: (start of each document, kinds, tokens, grids).

    A text, which contains the image's caption, precedes every image, and a text ends the document.
    """
    order = np.lexsort((mix(form.seed, PLACE_INSIDE, np.arange(len(document))), document))
    parts = items.parts[order]
    of_files = starts_of(1 + parts)  # segments, a text and the parts
    ends = np.cumsum(np.bincount(document, minlength=len(lengths)))
    start = np.concatenate([[0], of_files[ends] + np.arange(1, len(lengths) + 1)])
    count, last = int(start[-1]), start[1:] - 1
    # each earlier document adds its last text
    first = of_files[:-1] + 1 + document[order]
    segment = ranges(first, parts)
    kinds, tokens = np.full(count, TEXT, dtype=np.int64), np.zeros(count, dtype=np.int64)
    grids = np.zeros((count, 2), dtype=np.int64)
    kinds[segment], tokens[segment], grids[segment] = (
        np.repeat(items.kinds[order], parts),
        items.of_parts[ranges(starts_of(items.parts)[order], parts)],
        np.repeat(items.grids[order], parts, axis=0),
    )
    tokens[first - 1] = items.captions[order]
    rest = lengths - SAMPLE_SPECIALS - np.add.reduceat(tokens, start[:-1])
    share = _log_normal(
        LogNormal(median=1.0, sigma=form.text_sigma), _uniform(count, form.seed, TEXT_SHARE)
    )
    share[segment] = 0.0
    part = rest / np.add.reduceat(share, start[:-1])
    tokens += (share * np.repeat(part, np.diff(start))).astype(np.int64)
    tokens[last] += lengths - SAMPLE_SPECIALS - np.add.reduceat(tokens, start[:-1])
    return start, kinds, tokens, grids


def _asked(spec: DistributionSpec, probe: Items) -> list[tuple[float, str, float]]:
    """Return (number per sequence, description, mean tokens with caption) of each kind of item.

    Kinds that the model does not use are left out.
    """
    need = probe.tokens + probe.captions
    return [
        (mean, TOLD.get(item, UNREAD[KINDS[item]]), float(need[probe.kinds == KINDS[item]].mean()))
        for item, mean in spec.per_sequence.items()
        if (probe.kinds == KINDS[item]).any()
    ]


def _mean_tokens(spec: DistributionSpec, probe: Items) -> float:
    """Return the tokens of a sequence without its free text."""
    return (
        sum(mean * tokens for mean, _, tokens in _asked(spec, probe)) + SAMPLE_SPECIALS + LAST_TEXT
    )


def _too_much(spec: DistributionSpec, inputs: ModelInputs, probe: Items) -> SpecError:
    parts = " + ".join(
        f"{mean:g} {what} × {tokens:.0f} tokens" for mean, what, tokens in _asked(spec, probe)
    )
    return SpecError(
        "The items of data.distribution do not fit into the sequences",
        f"{parts} (captions included) take {_mean_tokens(spec, probe):,.0f} of data.sequence_length"
        f" = {inputs.sequence_length:,} tokens; the largest item takes"
        f" {(probe.tokens + probe.captions).max():,}",
        "Lower their number per sequence or data.max_image_pixels, or raise data.sequence_length.",
    )


def _log_normal(form: LogNormal, uniform: Floats) -> Floats:
    from scipy.special import ndtri

    return np.asarray(form.median * np.exp(form.sigma * ndtri(uniform)))


def _uniform(count: int, seed: int, *purpose: int) -> Floats:
    return _unit(mix(seed, *purpose, np.arange(count)))


def _unit(hashed: NDArray[np.uint64]) -> Floats:
    """Map hashes to numbers between 0 and 1, both excluded."""
    return ((hashed >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52
