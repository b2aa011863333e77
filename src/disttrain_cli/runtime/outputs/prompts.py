"""Prompts as a batch of the model: images first, then text, and the tokens that condition an image
to be drawn."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import torch

from disttrain_cli.data.decoding import decode_image
from disttrain_cli.data.headers import ImageHeader, read_header
from disttrain_cli.data.positions import grid_positions, sample_positions
from disttrain_cli.data.tokenizer import Tokenizer
from disttrain_cli.errors import UsageError
from disttrain_cli.models.layer import Batch, Items
from disttrain_cli.runtime.feeding import normalised
from disttrain_cli.runtime.outputs.trained import Trained
from disttrain_cli.spec.heads import ImageInput
from disttrain_cli.spec.index import KINDS


@dataclass(frozen=True)
class Prompt:
    """What a model is given: an image file's bytes, a text, or both."""

    text: str = ""
    image: bytes | None = None


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
    grids = {
        number: _grid(model, prompt.image)
        for number, prompt in enumerate(prompts)
        if prompt.image is not None
    }
    # images of equal grid are adjacent
    order = sorted(grids, key=lambda number: (*grids[number], number))
    rows, image_rows, context_rows = [], {}, []
    for number, prompt in enumerate(prompts):
        head = inputs.image
        seen = (
            0
            if number not in grids or head is None
            else int(np.prod(grids[number])) // head.merge**2
        )
        rows.append(
            [
                tokenizer.bos,
                *[tokenizer.image] * seen,
                *tokenizer.encode(prompt.text),
                *[tokenizer.context] * context,
            ]
        )
        image_rows[number] = range(1, 1 + seen)
        context_rows.append(range(len(rows[-1]) - context, len(rows[-1])))
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

    def pixels_of(numbers: Iterable[int], head: ImageInput) -> torch.Tensor:
        planes = np.stack(
            [decode_image(prompts[number].image or b"", grids[number], head) for number in numbers]
        )
        return normalised(torch.from_numpy(planes).to(device), head.affine, torch.float32)

    items = {item: Items([], rows=positions([])) for item in KINDS}
    items["image"] = Items(
        [grids[number] for number in order],
        {
            at: [pixels_of(group, head) for _, group in groupby(order, key=grids.__getitem__)]
            for at, head in enumerate(inputs.images)
        },
        rows=positions([(number, image_rows[number]) for number in order]),
    )
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
                    sample_positions(
                        inputs.positions,
                        width,
                        [(1, grid_positions(inputs.image.frames(grids[number])))]
                        if inputs.image and number in grids
                        else (),
                    )
                    for number in range(len(rows))
                ],
                axis=-2,
            )
        ).to(device),
        sample_lengths=[width] * len(rows),
    )
    return PromptBatch(batch, [len(row) for row in rows])


def _grid(model: Trained, image: bytes | None) -> tuple[int, int]:
    assert image is not None and model.inputs.image is not None
    header = header_of(image)
    return model.inputs.image.grid(header.width_px, header.height_px)


def header_of(image: bytes) -> ImageHeader:
    """Format and size of an image file; ValueError where it is none."""
    return read_header(lambda offset, length: image[offset : offset + length])
