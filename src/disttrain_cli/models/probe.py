"""Synthetic inputs of given sizes: batches and state tensors with random values and consistent
counts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from disttrain_cli.models.division import own_rows
from disttrain_cli.models.graph import LayerInfo, live_tensors
from disttrain_cli.models.layer import Batch, TensorSpec
from disttrain_cli.spec.inputs import ModelInputs, number_of
from disttrain_cli.spec.work import Work


def probe_work(
    inputs: ModelInputs,
    module: str,
    *,
    windows: bool = True,
    grids: Sequence[tuple[int, int]] = (),
    clips: int = 0,
    documents: Sequence[Sequence[int]] = (),
    targets: int = 0,
) -> Work:
    """Work that a probe batch of these sizes brings to a module (see `probe_batch`).

    Args:
        windows: as a step's work counts; else as operators on the meta device do, which know no
        windows.
    """
    item = inputs.item(module)
    if item == "image":
        patches = [rows * columns for rows, columns in grids]
        return Work(len(patches), sum(patches), sum(n * n for n in patches))
    if item == "audio":
        assert inputs.audio is not None
        return inputs.audio.work(float(clips))
    if item == "sequence":
        lengths = [length for sequence in documents for length in sequence]
        return Work(
            len(documents),
            sum(lengths),
            int(inputs.length_sq(lengths).sum()) if windows else sum(n * n for n in lengths),
        )
    return inputs.target_of(module).work(float(targets))


def probe_batch(
    inputs: ModelInputs,
    *,
    grids: Sequence[tuple[int, int]] = (),
    clips: int = 0,
    documents: Sequence[Sequence[int]] = (),
    targets: int = 0,
    device: torch.device | str = "cpu",
    seed: int = 0,
    length: int | None = None,
) -> Batch:
    """A batch with images of these grids, audio clips, sequences of samples of these lengths,
    images to generate.

    Args:
        grids: patches (rows, columns) of each image; sorted, so that equal grids are adjacent.
        documents: for each sequence the tokens of its samples; the rest of the sequence is padding.
        length: tokens of a sequence, padding included; the model's own if not given.

    Image tokens take the first places of the sequences, audio tokens the next and context tokens
    the last. If the sequences have no room for them (or there are none), the batch has no places
    for them and serves the other modules only.
    """
    generator = torch.Generator("cpu").manual_seed(seed)
    with torch.device("cpu"):
        batch = _batch(
            inputs,
            sorted(grids),
            clips,
            documents,
            targets,
            length or inputs.sequence_length,
            generator,
        )
    return _moved(batch, torch.device(device))


def row_count(spec: TensorSpec, inputs: ModelInputs, batch: Batch) -> int:
    """Rows of a state tensor for a whole batch."""
    patches = [rows * columns for rows, columns in batch.image_grids]
    if spec.item == "image":
        assert inputs.image is not None
        if spec.rows.startswith("patches"):
            return sum(patches) + len(patches) * inputs.images[number_of(spec.rows)].extra_tokens
        return sum(patches) // inputs.image.merge**2
    if spec.item == "audio":
        assert inputs.audio is not None and batch.audio_features is not None
        return len(batch.audio_features) * (
            inputs.audio.tokens if spec.rows == "tokens" else inputs.audio.positions
        )
    if spec.item == "sequence":
        assert batch.token_ids is not None
        return batch.token_ids.numel()
    assert inputs.target is not None and batch.target_pixels is not None
    return len(batch.target_pixels) * (
        inputs.target.context_tokens if spec.rows == "context" else 1
    )


def state_at(
    table: list[LayerInfo],
    cut: int,
    inputs: ModelInputs,
    batch: Batch,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    tp: int = 1,
) -> dict[str, Tensor]:
    """Random state for the cut before layer `cut`: standard normal leaves that ask for gradients.

    Of a TP group the first rank's, which has the own rows of tensors that are divided.
    """
    generator = torch.Generator("cpu").manual_seed(seed)
    state = {}
    for spec in live_tensors(table, cut):
        rows = row_count(spec, inputs, batch)
        shape = (own_rows(rows, tp, 0)[1] if spec.split else rows, *spec.shape)
        if torch.device(device).type == "meta":
            tensor = torch.empty(shape, device=device, dtype=dtype)
        else:
            tensor = torch.randn(shape, generator=generator).to(device=device, dtype=dtype)
        state[spec.name] = tensor.requires_grad_()
    return state


def entry_state(
    table: list[LayerInfo],
    module: str,
    inputs: ModelInputs,
    batch: Batch,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> dict[str, Tensor]:
    """Random state at the entry of a module (see `state_at`)."""
    cut = next(i for i, layer in enumerate(table) if layer.module == module)
    return state_at(table, cut, inputs, batch, device, dtype, seed)


def _batch(
    inputs: ModelInputs,
    grids: list[tuple[int, int]],
    clips: int,
    documents: Sequence[Sequence[int]],
    targets: int,
    length: int,
    generator: torch.Generator,
) -> Batch:
    image, audio, target = inputs.image, inputs.audio, inputs.target
    batch = Batch(image_grids=grids)
    fields: dict[str, Any] = {}
    if image is not None:
        side = image.patch_px
        fields["pixels"] = [
            torch.randn(
                sum(1 for _ in run),
                image.channels,
                rows * side,
                columns * side,
                generator=generator,
            )
            for (rows, columns), run in groupby(grids)
        ]
        fields["other_pixels"] = [
            torch.randn(pixels.shape, generator=generator)
            for _ in inputs.other_images
            for pixels in fields["pixels"]
        ]
        fields["image_seeds"] = torch.arange(len(grids))
    if audio is not None:
        fields["clips"] = clips
        fields["clip_seeds"] = torch.arange(clips)
        fields["audio_features"] = torch.randn(
            clips, audio.mel_bins, audio.frames, generator=generator
        )
    if target is not None:
        fields["target_pixels"] = torch.rand((targets, *target.shape), generator=generator) * 2 - 1
        fields["other_targets"] = [
            torch.rand((targets, *head.shape), generator=generator) * 2 - 1
            for head in inputs.other_targets
        ]
        fields["target_weights"] = torch.ones(targets)
        fields["noise_seeds"] = torch.randint(2**31, (targets,), generator=generator)
        fields["target_seeds"] = fields["noise_seeds"]
        fields["targets"] = float(max(1, targets))
    if documents:
        fields |= _tokens(inputs, grids, clips, documents, targets, length, generator)
    return replace(batch, **fields)


def _tokens(
    inputs: ModelInputs,
    grids: list[tuple[int, int]],
    clips: int,
    documents: Sequence[Sequence[int]],
    targets: int,
    length: int,
    generator: torch.Generator,
) -> dict[str, Any]:
    shape = (len(documents), length)
    numbers, positions = torch.full(shape, -1), torch.zeros(shape, dtype=torch.int64)
    for row, lengths in enumerate(documents):
        assert sum(lengths) <= length, "samples longer than their sequence"
        start = 0
        for number, size in enumerate(lengths):
            numbers[row, start : start + size] = number
            positions[row, start : start + size] = torch.arange(size)
            start += size
    token_ids = torch.randint(inputs.vocabulary, shape, generator=generator)
    labels = torch.where(
        numbers >= 0, torch.randint(inputs.vocabulary, shape, generator=generator), -100
    )
    places = (numbers.flatten() >= 0).nonzero().flatten()
    image_tokens = sum(rows * columns for rows, columns in grids) // (
        inputs.image.merge**2 if inputs.image else 1
    )
    audio_tokens = clips * (inputs.audio.tokens if inputs.audio else 0)
    context_tokens = targets * (inputs.target.context_tokens if inputs.target else 0)
    fits = image_tokens + audio_tokens + context_tokens <= len(places)
    return {
        "token_ids": token_ids,
        "positions": positions,
        "sample_lengths": [
            size for lengths in documents for size in (*lengths, length - sum(lengths)) if size
        ],
        "labels": labels,
        "image_rows": places[:image_tokens] if fits else None,
        "audio_rows": places[image_tokens : image_tokens + audio_tokens] if fits else None,
        "context_rows": places[len(places) - context_tokens :] if fits else None,
        "label_tokens": float(max(1, int((labels >= 0).sum()))),
    }


def _moved(batch: Batch, device: torch.device) -> Batch:
    def move(value: Any) -> Any:
        if isinstance(value, list):
            return [move(item) for item in value]
        return value.to(device) if isinstance(value, Tensor) else value

    host = {"noise_seeds"} if device.type != "meta" else set()  # what layers read there (`noise`)
    return Batch(
        **{name: value if name in host else move(value) for name, value in vars(batch).items()}
    )
