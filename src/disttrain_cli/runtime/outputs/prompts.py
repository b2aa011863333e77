"""Prompts as a batch of the model: images and text in the data's format, and tokens for drawing.

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
from disttrain_cli.data.sources.chats import FILM, MARK
from disttrain_cli.data.sources.samples import Turn
from disttrain_cli.data.tokenizer import Tokenizer
from disttrain_cli.errors import UsageError
from disttrain_cli.models.layer import Batch, Items
from disttrain_cli.runtime.feeding import in_tokens, normalised
from disttrain_cli.runtime.outputs.pictures import Picture, in_order, pictures_of
from disttrain_cli.runtime.outputs.trained import Trained
from disttrain_cli.spec.heads import ImageInput, Numbers
from disttrain_cli.spec.index import KINDS
from disttrain_cli.spec.places import Places, together


@dataclass(frozen=True)
class Prompt:
    """Input of a model: the bytes of image files, a text, or both."""

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
    def planes(picture: Picture, head: ImageInput) -> list[Any]:
        return picture.planes(head)

    def pixels_of(group: Iterable[int], head: ImageInput) -> torch.Tensor:
        parts = [seen[at][1] for at in group]
        stacked = np.stack([planes(part.picture, head)[part.number] for part in parts])
        return normalised(torch.from_numpy(stacked).to(device), head.affine, torch.float32)

    items = {item: Items([], **rows_of([])) for item in KINDS}
    grids = [part.grid for _, part in seen]
    items["image"] = Items(
        [grids[at] for at in order],
        {
            at: [pixels_of(group, head) for _, group in groupby(order, key=grids.__getitem__)]
            for at, head in enumerate(inputs.images)
        },
        **rows_of((seen[at][0], seen[at][1].places) for at in order),
    )
    seen_in: dict[int, list[tuple[int, Ints, int | None]]] = {row: [] for row in range(len(rows))}
    for row_number, part in seen:
        assert inputs.image is not None
        inside = grid_positions(inputs.image.frames(part.grid))
        time = part.picture.times(inputs.image)[part.number]
        seen_in[row_number].append((part.first, inside, time))
    drawn = len(rows) if draws else 0
    items["target"] = Items(
        [(1, 1)] * drawn,
        **rows_of((row, Places(np.array(own))) for row, own in enumerate(context_rows)),
        weights=torch.ones(drawn),
    )
    batch = Batch(
        items,
        token_ids=ids,
        positions=torch.from_numpy(
            np.stack(
                [
                    sample_positions(inputs.positions, width, joined_in_time(seen_in[row]))
                    for row in range(len(rows))
                ],
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
    """Return a prompt with the placeholders of its images, without them if the model reads none."""
    head = model.inputs.image
    pictures = pictures_of(prompt.images, head, prompt.sizes) if head is not None else []
    parts, begins = in_order(pictures), list[int]()
    row = Row()
    for token in _ids(tokenizer, prompt, pictures, draws):
        if token != IMAGE_ROW:
            row.ids.append(token)
        elif head is not None:
            picture, number = next(parts)
            begins = [*(begins if number else []), len(row.ids)]
            placeholder = tokenizer.video if picture.is_video else tokenizer.image
            row.ids.extend([placeholder] * picture.tokens(head)[number])
            if number == picture.parts - 1:
                grid, places = picture.grid(head), picture.places(head, begins)
                row.parts.extend(
                    Part(picture, at, grid, first, own)
                    for at, (first, own) in enumerate(zip(begins, places, strict=True))
                )
    return row


def _ids(
    tokenizer: Tokenizer, prompt: Prompt, pictures: Sequence[Picture], draws: bool
) -> list[int]:
    """Return the token ids of a prompt, `IMAGE_ROW` for each part of an image.

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
    marks = [FILM if picture.is_video else MARK for picture in pictures]
    turn = Turn("user", [*marks, prompt.text], [], listed=True)
    try:
        return tokenizer.chat.written([turn], around, prompt=True).ids.tolist()
    except ValueError as error:
        raise UsageError(
            "The tokenizer's chat template cannot write a prompt",
            str(error),
            "Change the text of the prompt.",
        ) from None
