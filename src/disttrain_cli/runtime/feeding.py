"""What a rank's loader prepared, as tensors on its device.

On a GPU a thread takes the slots one ahead of the engine and copies them into page-locked memory,
so that the copy to the device does not need the engine. Pixels travel as bytes and are normalised
on the device. On a CPU nothing else is copied.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from disttrain_cli.data.slots import Ints, SlotBatch, StepOrder
from disttrain_cli.models.host import constant
from disttrain_cli.models.layer import Batch
from disttrain_cli.spec.inputs import Affine, ImageInput, TargetInput

#: Takes the model's precision on the way to the device.
SOUND = "audio_features"


class Slots(Protocol):
    """Where a rank's inputs come from (`data.loader.Loader`)."""

    def fetch(self, step: int, slot: int) -> SlotBatch:
        """Inputs of this replica for one slot; slots are asked for in the order of training."""
        ...

    def prefetch(self, step: int, slot: int) -> None:
        """Have this slot and those after it prepared in the background."""
        ...


def fetcher(
    loader: Slots, device: torch.device, dtype: torch.dtype
) -> Callable[[StepOrder], Callable[[int], Batch]]:
    """For a step, what the engine calls to wait for this rank's inputs of a slot."""
    slots = PinnedAhead(loader, device, dtype) if device.type == "cuda" else None

    def fetch_of(order: StepOrder) -> Callable[[int], Batch]:
        def fetch(slot: int) -> Batch:
            if slots:
                return to_batch(slots.fetch(order, slot), order, device, dtype)
            batch = to_batch(loader.fetch(order.step, slot), order, device, dtype)
            loader.prefetch(order.step, slot + 1)
            return batch

        return fetch

    return fetch_of


def to_batch(
    arrays: SlotBatch, order: StepOrder, device: torch.device, dtype: torch.dtype
) -> Batch:
    """Prepared arrays as tensors on the device; pixels and sound take the model's precision.

    From page-locked memory the copies are asynchronous, and torch keeps that memory until they are
    done.
    """

    def tensor(value: Any, kind: torch.dtype | None = None) -> Any:
        return None if value is None else as_tensor(value).to(device, kind, non_blocking=True)

    def pixels(value: Any, head: ImageInput | TargetInput) -> Tensor:
        return normalised(tensor(value), head.affine, dtype)

    def blocks(
        values: list[Any] | None, heads: Sequence[ImageInput | TargetInput]
    ) -> list[Tensor] | None:
        """Blocks of one head after the other, of each as many."""
        return (
            None
            if values is None
            else [
                pixels(value, heads[number * len(heads) // len(values)])
                for number, value in enumerate(values)
            ]
        )

    inputs = order.slots[0].inputs
    images, targets = inputs.images, inputs.targets
    return Batch(
        image_grids=[(int(rows), int(columns)) for rows, columns in arrays.image_grids],
        clips=0 if arrays.clips is None else int(arrays.clips),
        audio_features=tensor(arrays.audio_features, dtype),
        audio_rows=tensor(arrays.audio_rows),
        pixels=blocks(arrays.pixels, images[:1]),
        other_pixels=blocks(arrays.other_pixels, images[1:]),
        token_ids=tensor(arrays.token_ids),
        positions=tensor(arrays.positions),
        sample_lengths=None if arrays.documents is None else sample_lengths(arrays.documents),
        image_rows=tensor(arrays.image_rows),
        context_rows=tensor(arrays.context_rows),
        labels=tensor(arrays.labels),
        target_pixels=None
        if arrays.target_pixels is None
        else pixels(arrays.target_pixels, targets[0]),
        target_weights=tensor(arrays.target_weights),
        other_targets=blocks(arrays.other_targets, targets[1:]),
        noise_seeds=None if arrays.noise_seeds is None else as_tensor(arrays.noise_seeds),
        image_seeds=tensor(arrays.image_seeds),
        clip_seeds=tensor(arrays.clip_seeds),
        target_seeds=tensor(arrays.target_seeds),
        label_tokens=float(max(1, order.label_tokens)),
        targets=float(max(1, order.targets)),
    )


def sample_lengths(documents_ML: Ints) -> list[int]:
    """Tokens of each sample in the M·L rows, a sequence's padding as one more."""
    # no sample's number, so every sequence begins one
    starts = np.flatnonzero(np.diff(documents_ML, prepend=-2))
    return np.diff(starts, append=documents_ML.size).tolist()


def normalised(planes: Tensor, affine: Affine, dtype: torch.dtype) -> Tensor:
    """Bytes [N, C, H, W] as a model reads them: computed in single precision, whatever the
    model's."""
    if not len(planes):  # of an encoder or generator that is not asked for
        return planes.to(dtype)
    scale, shift = constant(torch.tensor, affine, device=planes.device, dtype=torch.float32).T[
        ..., None, None
    ]
    return planes.to(torch.float32).mul_(scale).sub_(shift).to(dtype)


class PinnedAhead:
    """The slots of a loader in page-locked memory, the next one taken while the engine works on
    this one."""

    def __init__(self, loader: Slots, device: torch.device, dtype: torch.dtype) -> None:
        self._loader, self._dtype = loader, dtype
        self._thread = ThreadPoolExecutor(1, "pin", initializer=_use, initargs=(device,))
        self._next: dict[tuple[int, int], Future[SlotBatch]] = {}

    def fetch(self, order: StepOrder, slot: int) -> SlotBatch:
        """Tensors in the place of arrays; raises what the loader raises."""
        batch = self._begin(order.step, slot).result()
        following = (order.step, slot + 1) if slot + 1 < len(order.slots) else (order.step + 1, 0)
        self._next = {following: self._begin(*following)}
        return batch

    def _begin(self, step: int, slot: int) -> Future[SlotBatch]:
        return self._next.get((step, slot)) or self._thread.submit(self._take, step, slot)

    def _take(self, step: int, slot: int) -> SlotBatch:
        batch = pinned(self._loader.fetch(step, slot), self._dtype)
        self._loader.prefetch(step, slot + 1)
        return batch


def pinned(arrays: SlotBatch, dtype: torch.dtype) -> SlotBatch:
    """The same in page-locked memory: tensors, sound in the model's precision; what the host reads
    stays."""
    kept = {"image_grids", "clips", "documents", "noise_seeds"}
    copies: dict[str, Any] = {}
    for name, value in vars(arrays).items():
        if value is not None and name not in kept:
            kind = dtype if name == SOUND else None
            copies[name] = (
                [page_locked(one, kind) for one in value]
                if isinstance(value, list)
                else page_locked(value, kind)
            )
    return replace(arrays, **copies)


def page_locked(array: Any, dtype: torch.dtype | None) -> Tensor:
    """One copy of an array, converted on the way, from which a GPU reads by itself."""
    source = as_tensor(array)
    return torch.empty(source.shape, dtype=dtype or source.dtype, pin_memory=True).copy_(source)


def as_tensor(value: Any) -> Tensor:
    """An array's own memory as a tensor; what a preprocessing worker sent is read-only, and nothing
    writes to it."""
    if isinstance(value, Tensor) or value.flags.writeable:
        return torch.as_tensor(value)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.as_tensor(value)


def _use(device: torch.device) -> None:
    """Have a thread work on the rank's device: a new one would take up memory on the first."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
