"""Prompts as a batch of the model: images and text as the data write them, and the tokens that
condition an image to be drawn."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import torch

from disttrain_cli.data.chat import IMAGE_ROW
from disttrain_cli.data.decoding import decode_image
from disttrain_cli.data.headers import ImageHeader, read_header
from disttrain_cli.data.positions import grid_positions, sample_positions
from disttrain_cli.data.slots import Ints
from disttrain_cli.data.sources.chats import MARK
from disttrain_cli.data.sources.samples import Turn
from disttrain_cli.data.tokenizer import Tokenizer
from disttrain_cli.errors import UsageError
from disttrain_cli.models.layer import Batch, Items
from disttrain_cli.runtime.feeding import normalised
from disttrain_cli.runtime.outputs.trained import Trained
from disttrain_cli.spec.heads import ImageInput
from disttrain_cli.spec.index import KINDS


@dataclass(frozen=True)
class Prompt:
    """What a model is given: the bytes of image files, a text, or both."""

    text: str = ""
    images: tuple[bytes, ...] = ()
    #: what it is in tokens, `IMAGE_ROW` for each of the images; None: the images, then the text,
    #: as a user's turn where the tokenizer has a chat template
    ids: tuple[int, ...] | None = None


@dataclass(frozen=True)
class PromptBatch:
    """Prompts of a batch, each the beginning of one sequence."""

    batch: Batch
    lengths: list[int]  # tokens given


def batch_of(
    model: Trained,
    tokenizer: Tokenizer,
    prompts: Sequence[Prompt],
    *,
    room: int = 0,
    draws: bool = False,
) -> PromptBatch:
    """The prompts, with room for `room` tokens after each; with `draws` tokens that condition an
    image follow it.

    Raises:
        UsageError: a prompt is longer than the model's sequences.
        ValueError: an image cannot be decoded.
    """
    inputs, device = model.inputs, model.device
    context = inputs.targets[0].context_tokens if draws else 0
    pictures = [(number, image) for number, prompt in enumerate(prompts) for image in prompt.images]
    grids = [_grid(model, image) for _, image in pictures]
    # images of equal grid are adjacent
    order = sorted(range(len(grids)), key=lambda at: (*grids[at], at))
    rows: list[list[int]] = []
    spans: list[range] = []  # of each picture in its row
    context_rows = []
    for prompt in prompts:
        row: list[int] = []
        for token in _written(tokenizer, prompt, draws):
            if token != IMAGE_ROW:
                row.append(token)
            elif inputs.image is not None:
                seen = int(np.prod(grids[len(spans)])) // inputs.image.merge**2
                spans.append(range(len(row), len(row) + seen))
                row += [tokenizer.image] * seen
        row += [tokenizer.context] * context
        rows.append(row)
        context_rows.append(range(len(row) - context, len(row)))
    longest = max(map(len, rows))
    if longest > inputs.sequence_length:
        raise UsageError(
            "A prompt is longer than the sequences that the model was trained on",
            f"{longest} tokens; data.sequence_length is {inputs.sequence_length}",
            "Shorten the text, or give a smaller image.",
        )
    width = min(inputs.sequence_length, longest + room)
    ids = torch.tensor([row + [tokenizer.pad] * (width - len(row)) for row in rows], device=device)

    def positions(spans: Sequence[tuple[int, range]]) -> torch.Tensor:
        return torch.tensor(
            [number * width + at for number, span in spans for at in span], device=device
        ).long()

    def pixels_of(group: Iterable[int], head: ImageInput) -> torch.Tensor:
        planes = np.stack([decode_image(pictures[at][1], grids[at], head) for at in group])
        return normalised(torch.from_numpy(planes).to(device), head.affine, torch.float32)

    items = {item: Items([], rows=positions([])) for item in KINDS}
    items["image"] = Items(
        [grids[at] for at in order],
        {
            at: [pixels_of(group, head) for _, group in groupby(order, key=grids.__getitem__)]
            for at, head in enumerate(inputs.images)
        },
        rows=positions([(pictures[at][0], spans[at]) for at in order]),
    )
    seen_in: dict[int, list[tuple[int, Ints]]] = {row: [] for row in range(len(rows))}
    for (row_number, _), span, grid in zip(pictures, spans, grids, strict=False):
        assert inputs.image is not None
        inside = grid_positions(inputs.image.frames(grid))
        seen_in[row_number].append((span.start, inside))
    drawn = len(rows) if draws else 0
    items["target"] = Items(
        [(1, 1)] * drawn,
        rows=positions(list(enumerate(context_rows))),
        weights=torch.ones(drawn),
    )
    batch = Batch(
        items,
        token_ids=ids,
        positions=torch.from_numpy(
            np.stack(
                [
                    sample_positions(inputs.positions, width, seen_in[row])
                    for row in range(len(rows))
                ],
                axis=-2,
            )
        ).to(device),
        sample_lengths=[width] * len(rows),
    )
    return PromptBatch(batch, [len(row) for row in rows])


def _written(tokenizer: Tokenizer, prompt: Prompt, draws: bool) -> list[int]:
    """Token ids of a prompt, `IMAGE_ROW` for each image; images are drawn after captions, which no
    template writes."""
    if prompt.ids is not None:
        return list(prompt.ids)
    if tokenizer.chat is None or draws or not prompt.text:
        begin = [tokenizer.bos, *[IMAGE_ROW] * len(prompt.images)]
        return begin + tokenizer.encode(prompt.text)
    turn = Turn("user", [*[MARK] * len(prompt.images), prompt.text], [], listed=True)
    try:
        return tokenizer.chat.written([turn], prompt=True).ids.tolist()
    except ValueError as error:
        raise UsageError(
            "The tokenizer's chat template cannot write a prompt",
            str(error),
            "Change the text of the prompt.",
        ) from None


def _grid(model: Trained, image: bytes) -> tuple[int, int]:
    assert model.inputs.image is not None
    header = header_of(image)
    return model.inputs.image.grid(header.width_px, header.height_px)


def header_of(image: bytes) -> ImageHeader:
    """Format and size of an image file; ValueError where it is none."""
    return read_header(lambda offset, length: image[offset : offset + length])
