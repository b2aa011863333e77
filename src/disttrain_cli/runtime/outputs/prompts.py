"""Prompts as a batch of the model: files and text in the data's format, and tokens for drawing.

The latter condition an image to be drawn.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import groupby
from typing import Any

import numpy as np
import torch

from disttrain_cli.data.chat import IMAGE_ROW
from disttrain_cli.data.positions import grid_positions, joined_in_time, sample_positions
from disttrain_cli.data.slots import Ints
from disttrain_cli.data.sources.chats import FILM, MARK, SOUND
from disttrain_cli.data.sources.samples import Turn
from disttrain_cli.data.tokenizer import Tokenizer
from disttrain_cli.errors import UsageError
from disttrain_cli.models.layer import Batch, Items
from disttrain_cli.runtime.feeding import in_tokens, normalised
from disttrain_cli.runtime.outputs.pictures import Picture, in_order, pictures_of
from disttrain_cli.runtime.outputs.trained import Trained
from disttrain_cli.spec.heads import Head, ImageInput, Item, Numbers
from disttrain_cli.spec.index import KINDS
from disttrain_cli.spec.library_images import LibraryImages
from disttrain_cli.spec.places import Places, together


@dataclass(frozen=True)
class Prompt:
    """Input of a model: the bytes of image, video and sound files, a text, or both."""

    text: str = ""
    images: tuple[bytes, ...] = ()
    #: token ids, with `IMAGE_ROW` for each of the images, or each of their parts; None: the images,
    #: then the text, as a user's turn where the tokenizer has a chat template
    ids: tuple[int, ...] | None = None
    #: sizes of the images, where they differ from the files' headers (`Head.budgeted`)
    sizes: tuple[Numbers, ...] | None = None


@dataclass(frozen=True)
class PromptBatch:
    """Prompts of a batch, each the beginning of one sequence."""

    batch: Batch
    lengths: list[int]  # tokens of each prompt


def batch_of(
    model: Trained,
    tokenizer: Tokenizer,
    prompts: Sequence[Prompt],
    *,
    room: int = 0,
    draws: bool = False,
) -> PromptBatch:
    """Return the prompts as a batch, with room for `room` tokens after each.

    With `draws`, tokens that condition an image follow each prompt.

    Raises:
        UsageError: a prompt is longer than the model's sequences.
        ValueError: an image cannot be decoded.
    """
    inputs, device = model.inputs, model.device
    context = inputs.targets[0].context_tokens if draws else 0
    written = [_written(model, tokenizer, prompt, draws) for prompt in prompts]
    rows = [[*row.ids, *[tokenizer.context] * context] for row in written]
    context_rows = [range(len(row) - context, len(row)) for row in rows]
    seen = [(number, part) for number, row in enumerate(written) for part in row.parts]
    # items of equal grid are adjacent
    order = sorted(range(len(seen)), key=lambda at: (*seen[at][1].grid, at))
    longest = max(map(len, rows))
    if longest > inputs.sequence_length:
        raise UsageError(
            "A prompt is longer than the sequences that the model was trained on",
            f"{longest} tokens; data.sequence_length is {inputs.sequence_length}",
            "Shorten the text, or give a smaller image.",
        )
    width = min(inputs.sequence_length, longest + room)
    ids = torch.tensor([row + [tokenizer.pad] * (width - len(row)) for row in rows], device=device)

    def rows_of(places: Iterable[tuple[int, Places]]) -> dict[str, Any]:
        return in_tokens(together([own.moved(row * width) for row, own in places]), device)

    @cache
    def planes(picture: Picture, head: Head) -> list[Any]:
        return picture.planes(head)

    def values_of(parts: Sequence[Part], head: Head) -> torch.Tensor:
        stacked = np.stack([planes(part.picture, head)[part.number] for part in parts])
        values = torch.from_numpy(stacked).to(device)
        return values if head.affine is None else normalised(values, head.affine, torch.float32)

    def items_of(item: Item) -> Items:
        own = [seen[at] for at in order if seen[at][1].picture.item == item]
        parts = [part for _, part in own]
        places = rows_of((row, part.places) for row, part in own)
        if any(head.packed for head in inputs.of(item)):
            packed = [part.picture.packed() for part in parts]
            values = [torch.from_numpy(one.values)[None].to(device) for one in packed]
            tables = {0: [one.table[None] for one in packed]}
            return Items([part.grid for part in parts], {0: values}, tables=tables, **places)
        return Items(
            [part.grid for part in parts],
            {
                at: [values_of([*group], head) for _, group in groupby(parts, key=lambda p: p.grid)]
                for at, head in enumerate(inputs.of(item))
            },
            **places,
        )

    items = {item: Items([], **rows_of([])) for item in KINDS}
    items |= {item: items_of(item) for item in ("image", "audio") if inputs.of(item)}
    drawn = len(rows) if draws else 0
    items["target"] = Items(
        [(1, 1)] * drawn,
        **rows_of(
            (row, Places(np.arange(own.start, own.stop))) for row, own in enumerate(context_rows)
        ),
        weights=torch.ones(drawn),
    )
    batch = Batch(
        items,
        token_ids=ids,
        positions=torch.from_numpy(
            np.stack(
                [sample_positions(inputs.positions, width, _grids(row.parts)) for row in written],
                axis=-2,
            )
        ).to(device),
        sample_lengths=[width] * len(rows),
    )
    return PromptBatch(batch, [len(row) for row in rows])


@dataclass(frozen=True)
class Part:
    """Item of a prompt: an image, or a part of one."""

    picture: Picture
    number: int
    grid: tuple[int, int]
    first: int  # its first token in the prompt
    places: Places  # token positions of its rows


@dataclass(frozen=True)
class Row:
    """Token ids of a prompt, and the parts of its images in order."""

    ids: list[int] = field(default_factory=list)
    parts: list[Part] = field(default_factory=list)


def _written(model: Trained, tokenizer: Tokenizer, prompt: Prompt, draws: bool) -> Row:
    """Return a prompt with the placeholders of its files, without them if the model reads none."""
    reads = model.inputs.of("image") or model.inputs.of("audio")
    pictures = pictures_of(prompt.images, model.inputs, prompt.sizes) if reads else []
    parts, begins = in_order(pictures), list[int]()
    row = Row()
    for token in _ids(tokenizer, prompt, pictures, draws):
        if token != IMAGE_ROW:
            row.ids.append(token)
        elif reads:
            picture, number = next(parts)
            begins = [*(begins if number else []), len(row.ids)]
            placeholder = tokenizer.video if picture.is_video else tokenizer.image
            row.ids.extend(picture.ids(number, placeholder))
            if number == picture.parts - 1:
                grid, places = picture.grid, picture.places(begins)
                row.parts.extend(
                    Part(picture, at, grid, first, own)
                    for at, (first, own) in enumerate(zip(begins, places, strict=True))
                )
    return row


def _grids(parts: Sequence[Part]) -> list[tuple[int, Ints, *tuple[int, ...]]]:
    """Return the grids of a prompt's images and videos, as `sample_positions` reads them."""
    grids = list[tuple[int, Ints, int | None]]()
    for part in parts:
        head = part.picture.head
        if isinstance(head, LibraryImages):  # all its images are
            return [
                (one.first, *head.positions(one.picture.numbers))
                for one in parts
                if one.picture.item == "image"
            ]
        if isinstance(head, ImageInput):
            time = part.picture.times()[part.number]
            grids.append((part.first, grid_positions(head.frames(part.grid)), time))
    return joined_in_time(grids)


def _ids(
    tokenizer: Tokenizer, prompt: Prompt, pictures: Sequence[Picture], draws: bool
) -> list[int]:
    """Return the token ids of a prompt, `IMAGE_ROW` for each part of a file.

    Images are drawn after captions, which are not written by a chat template.
    """
    if prompt.ids is not None:
        return list(prompt.ids)
    around = [picture.around for picture in pictures]
    if tokenizer.chat is None or draws or not prompt.text:
        begin = [tokenizer.bos]
        for first, *others in around:
            begin += tokenizer.encode(first)
            for text in others:
                begin += [IMAGE_ROW, *tokenizer.encode(text)]
        return begin + tokenizer.encode(prompt.text)
    marks = [
        SOUND if picture.item == "audio" else FILM if picture.is_video else MARK
        for picture in pictures
    ]
    turn = Turn("user", [*marks, prompt.text], [], listed=True)
    try:
        return tokenizer.chat.written([turn], around, prompt=True).ids.tolist()
    except ValueError as error:
        raise UsageError(
            "The tokenizer's chat template cannot write a prompt",
            str(error),
            "Change the text of the prompt.",
        ) from None
