"""Transfer of a rank's loaded batches to tensors on its device.

On a GPU a thread is one slot ahead of the engine and copies slots into page-locked memory, so that
the copy to the device does not need the engine. Pixels are transferred as bytes and normalised on
the device. On a CPU nothing else is copied.
"""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from disttrain_cli.data.ordering.levelling import owners
from disttrain_cli.data.slots import (
    Ints,
    ItemArrays,
    SlotBatch,
    StepOrder,
    flat_arrays,
    of_flat_arrays,
)
from disttrain_cli.models.division import Place
from disttrain_cli.models.graph import LayerInfo
from disttrain_cli.models.host import constant, to_device
from disttrain_cli.models.layer import Batch, Items, Share, Shared, TensorSpec
from disttrain_cli.models.levelling import Run, runs_of
from disttrain_cli.spec.heads import Affine, Head, Item
from disttrain_cli.spec.inputs import ModelInputs
from disttrain_cli.spec.places import Places
from disttrain_cli.spec.plan import UnitPlan
from disttrain_cli.spec.runfile.train import TrainSpec

#: Arrays that the host reads, which are not copied to page-locked memory.
KEPT = frozenset(("grids", "documents", "noise_seeds", "rows", "shares", "tables"))
#: Coordinates of a rank that is a replica by itself.
WHOLE = Place()


class Slots(Protocol):
    """Source of a rank's inputs (`data.loader.Loader`)."""

    def fetch(self, step: int, slot: int) -> SlotBatch:
        """Return this replica's inputs for one slot; slots are requested in training order."""
        ...

    def prefetch(self, step: int, slot: int) -> None:
        """Prepare this slot and the following ones in the background."""
        ...


def fields_of(layers: Iterable[LayerInfo], unit: UnitPlan) -> set[str]:
    """Return the batch fields that a stage of these layers needs (`Loader`).

    These include samples' lengths wherever tokens are balanced by them.
    """
    fields = {field for info in layers for field in info.needs}
    levelled = unit.gathers and fields & {"tokens", "rows", "context", "labels"}
    return fields | {"layout"} if levelled else fields


def message_dtype(train: TrainSpec) -> torch.dtype:
    """Return the precision of layers' inputs and of messages between ranks."""
    return torch.bfloat16 if train.precision == "bf16" else torch.float32


def fetcher(
    loader: Slots, device: torch.device, dtype: torch.dtype, place: Place = WHOLE
) -> Callable[[StepOrder], Callable[[int], Batch]]:
    """Return a function of a step that returns the engine's `fetch(slot)`.

    `fetch` waits for the inputs of a slot, for a rank with coordinates `place` in its replica.
    """
    slots = PinnedAhead(loader, device, dtype, place) if device.type == "cuda" else None

    def fetch_of(order: StepOrder) -> Callable[[int], Batch]:
        def fetch(slot: int) -> Batch:
            if slots:
                return to_batch(slots.fetch(order, slot), order, device, dtype, place)
            arrays = own_values(loader.fetch(order.step, slot), order.slots[slot].inputs, place)
            batch = to_batch(arrays, order, device, dtype, place)
            loader.prefetch(order.step, slot + 1)
            return batch

        return fetch

    return fetch_of


def to_batch(
    arrays: SlotBatch,
    order: StepOrder,
    device: torch.device,
    dtype: torch.dtype,
    place: Place = WHOLE,
) -> Batch:
    """Return prepared arrays as tensors on the device.

    Pixels and sound take the model's precision. A rank of a CP group takes its part of the tokens;
    of items that are distributed over a TP group, the arrays have only the rank's values
    (`own_values`). From page-locked memory the copies are asynchronous, and torch holds that memory
    until they are complete.
    """

    def tensor(value: Any, kind: torch.dtype | None = None) -> Any:
        return None if value is None else as_tensor(value).to(device, kind, non_blocking=True)

    def read(value: Any, head: Head) -> Tensor:
        raw = tensor(value)
        if raw.dtype == torch.uint16:  # bf16, which NumPy lacks
            raw = raw.view(torch.bfloat16)
        return raw.to(dtype) if head.affine is None else normalised(raw, head.affine, dtype)

    def of_tokens(values: Any) -> Any:
        """Return this rank's part of values [..., M, L]."""
        if values is None or own is None:
            return tensor(values)
        flat = as_tensor(values).flatten(-2)
        runs = [tensor(flat[..., None, slice(*run)]) for run in own]
        return runs[0] if len(runs) == 1 else torch.cat(runs, -1)

    def of_item(item: Item, arrays_of_item: ItemArrays) -> Items:
        heads, rows = inputs.of(item), arrays_of_item.rows
        places = None if rows is None else Places(rows, arrays_of_item.shares)
        return Items(
            grids=[(int(rows), int(columns)) for rows, columns in arrays_of_item.grids],
            values={
                number: [read(value, heads[number]) for value in blocks]
                for number, blocks in arrays_of_item.values.items()
                if heads[number].module not in place.replicated
            },
            tables=arrays_of_item.tables,
            **({} if places is None else in_tokens(places, device, own)),
            seeds=tensor(arrays_of_item.seeds),
            weights=tensor(arrays_of_item.weights),
            noise_seeds=None
            if arrays_of_item.noise_seeds is None
            else as_tensor(arrays_of_item.noise_seeds),
        )

    def share(item: Item, number: int, head: Head) -> Share:
        arrays_of_item, whole = arrays.items[item], items[item]
        owner = owners_of(arrays_of_item, head, place)
        numbers = np.flatnonzero(owner == place.tp_rank)

        def chosen(values: Tensor | None) -> Tensor | None:
            if values is None:
                return None
            return values.index_select(0, to_device(torch.from_numpy(numbers), values.device))

        def counts(spec: TensorSpec) -> Ints:
            size = inputs.of(item)[0].size(arrays_of_item.grids.prod(axis=1))
            return np.asarray(inputs.rows(item, spec.rows).of(size))

        own = Items(
            grids=[whole.grids[index] for index in numbers],
            values={number: [read(value, head) for value in arrays_of_item.values[number]]},
            tables=arrays_of_item.tables,
            seeds=chosen(whole.seeds),
            weights=chosen(whole.weights),
            noise_seeds=chosen(whole.noise_seeds),
        )
        return Share(Batch({item: own}, targets=targets), owner, counts)

    inputs = order.slots[0].inputs
    targets = float(max(1, order.targets))
    lengths = None if arrays.documents is None else sample_lengths(arrays.documents)
    own = None if place.cp == 1 else own_tokens(arrays, lengths, place)
    items = {item: of_item(item, arrays_of_item) for item, arrays_of_item in arrays.items.items()}
    return Batch(
        items=items,
        token_ids=of_tokens(arrays.token_ids),
        positions=of_tokens(arrays.positions),
        sample_lengths=lengths,
        sample_seeds=tensor(arrays.sample_seeds),
        labels=of_tokens(arrays.labels),
        shares={
            head.module: share(item, number, head)
            for item, number, head in replicated_in(arrays, inputs, place)
        },
        label_tokens=float(max(1, order.label_tokens)),
        targets=targets,
    )


def replicated_in(
    arrays: SlotBatch, inputs: ModelInputs, place: Place
) -> Iterator[tuple[Item, int, Head]]:
    """Yield the modules whose items are distributed over the TP group, where a slot has values.

    Yields:
        (item, index among the modules of that item, head).
    """
    for item, arrays_of_item in arrays.items.items():
        for number in arrays_of_item.values:
            head = inputs.of(item)[number]
            if head.module in place.replicated:
                yield item, number, head


def owners_of(arrays: ItemArrays, head: Head, place: Place) -> Ints:
    """Return [N] the TP rank that works on each of a replica's items."""
    return owners(head.size(np.asarray(arrays.grids).prod(axis=1)), place.tp)


def own_values(arrays: SlotBatch, inputs: ModelInputs, place: Place) -> SlotBatch:
    """Return a slot's arrays with only this rank's items of modules distributed over a TP group.

    Nothing else is copied to a device.
    """
    items = dict(arrays.items)
    for item, number, head in replicated_in(arrays, inputs, place):
        given = items[item]
        own = owners_of(given, head, place) == place.tp_rank
        ends = np.cumsum([len(run) for run in given.values[number]])
        runs = [
            run[own[end - len(run) : end]]
            for run, end in zip(given.values[number], ends, strict=True)
        ]
        values = given.values | {number: [run for run in runs if len(run)]}
        tables = {
            each: [one for one, here in zip(of_all, own, strict=True) if here]
            for each, of_all in given.tables.items()
        }
        items[item] = dataclasses.replace(given, values=values, tables=tables)
    return dataclasses.replace(arrays, items=items)


def sample_lengths(documents_ML: Ints) -> list[int]:
    """Return the tokens of each sample in the M·L rows; padding counts as one more sample."""
    # no sample has number -2, so every sequence starts a new sample
    starts = np.flatnonzero(np.diff(documents_ML, prepend=-2))
    return np.diff(starts, append=documents_ML.size).tolist()


def tokens_of(arrays: SlotBatch) -> int:
    """Return the tokens of all sequences of a slot, M·L; 0 if it has no token fields."""
    of_tokens = (arrays.token_ids, arrays.labels, arrays.positions)
    return next((math.prod(known.shape[-2:]) for known in of_tokens if known is not None), 0)


def own_tokens(arrays: SlotBatch, lengths: list[int] | None, place: Place) -> list[Run]:
    """Return the runs of a slot's tokens of a rank in a CP group, in ascending order."""
    tokens = tokens_of(arrays)
    if not place.gathers or not tokens:
        return [place.of_group(tokens)]
    assert lengths is not None, "asked for (`fields_of`)"
    return runs_of(lengths, place.cp, causal=True)[place.cp_rank]


def in_tokens(
    places: Places, device: torch.device, own: Sequence[Run] | None = None
) -> dict[str, Any]:
    """Return the fields of `Items` for the tokens that their rows become.

    Token indices are among all tokens, or, with `own`, among the tokens of these runs.
    """
    if own is None and places.shares is None:
        return {"rows": to_device(as_tensor(places.at), device), "at": places.at}
    starts, stops = np.array(own or [(0, np.iinfo(np.int64).max)]).T
    run = np.maximum(0, np.searchsorted(starts, places.at, "right") - 1)
    inside = (places.at >= starts[run]) & (places.at < stops[run])
    before = np.cumsum(stops - starts) - (stops - starts) - starts  # of the runs before
    fields = {
        "rows": to_device(as_tensor((places.at + before[run])[inside]), device),
        "at": places.at,
        "shared": Shared(np.nonzero(inside)[0], len(places.at)),
    }
    if places.shares is not None and (places.shares[inside] != 1).any():
        fields["shares"] = to_device(as_tensor(places.shares[inside]), device)
    return fields


def normalised(planes: Tensor, affine: Affine, dtype: torch.dtype) -> Tensor:
    """Return bytes [N, C, H, W] as model input, computed in single precision for any `dtype`."""
    scale, shift = constant(torch.tensor, affine, device=planes.device, dtype=torch.float32).T[
        ..., None, None
    ]
    return planes.to(torch.float32).mul_(scale).sub_(shift).to(dtype)


class PinnedAhead:
    """A loader's slots in page-locked memory, fetched one slot ahead of the engine."""

    def __init__(
        self, loader: Slots, device: torch.device, dtype: torch.dtype, place: Place = WHOLE
    ) -> None:
        self._loader, self._dtype, self._place = loader, dtype, place
        self._thread = ThreadPoolExecutor(1, "pin", initializer=_use, initargs=(device,))
        self._next: dict[tuple[int, int], Future[SlotBatch]] = {}

    def fetch(self, order: StepOrder, slot: int) -> SlotBatch:
        """Return a slot with tensors in place of arrays; raises what the loader raises."""
        inputs = order.slots[slot].inputs
        batch = self._begin(inputs, order.step, slot).result()
        following = (order.step, slot + 1) if slot + 1 < len(order.slots) else (order.step + 1, 0)
        self._next = {following: self._begin(inputs, *following)}
        return batch

    def _begin(self, inputs: ModelInputs, step: int, slot: int) -> Future[SlotBatch]:
        return self._next.get((step, slot)) or self._thread.submit(self._take, inputs, step, slot)

    def _take(self, inputs: ModelInputs, step: int, slot: int) -> SlotBatch:
        batch = pinned(own_values(self._loader.fetch(step, slot), inputs, self._place), self._dtype)
        self._loader.prefetch(step, slot + 1)
        return batch


def pinned(arrays: SlotBatch, dtype: torch.dtype) -> SlotBatch:
    """Return the arrays as page-locked tensors, floats in `dtype`; those the host reads stay."""
    copies = {
        name: value if KEPT.intersection(name.split("/")) else _locked(name, value, dtype)
        for name, value in flat_arrays(arrays).items()
    }
    return of_flat_arrays(copies)


def _locked(name: str, value: Any, dtype: torch.dtype) -> Any:
    if not isinstance(value, list):
        return page_locked(value, None)
    return [
        page_locked(one, dtype if np.issubdtype(one.dtype, np.floating) else None) for one in value
    ]


def page_locked(array: Any, dtype: torch.dtype | None) -> Tensor:
    """Copy and convert an array into page-locked memory, from which a GPU reads by itself."""
    source = as_tensor(array)
    return torch.empty(source.shape, dtype=dtype or source.dtype, pin_memory=True).copy_(source)


def as_tensor(value: Any) -> Tensor:
    """Return a tensor over an array's memory.

    Arrays from preprocessing workers are read-only, and nothing writes to them.
    """
    if isinstance(value, Tensor) or value.flags.writeable:
        return torch.as_tensor(value)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.as_tensor(value)


def _use(device: torch.device) -> None:
    """Set a thread's device to the rank's: else it would allocate memory on the first device."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
