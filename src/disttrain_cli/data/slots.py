"""The result of an ordering: the items of each replica of each unit in every slot of a step.

Items of a slot are numbered in canonical order: sequences as the ordering lists them, items of a
modality by (sequence, index in the sequence). Replicas refer to them by these numbers, so every
rank can derive the routes between units without communication.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from disttrain_cli.spec.heads import Item
from disttrain_cli.spec.index import KINDS
from disttrain_cli.spec.inputs import ModelInputs
from disttrain_cli.spec.work import Work

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Floats32 = NDArray[np.float32]


def no_items() -> Ints:
    """Return the empty array of item numbers."""
    return np.zeros(0, dtype=np.int64)


def replica_items(**numbers: Ints) -> ReplicaItems:
    """Return the given items, and none of all other modalities."""
    return dict.fromkeys(("sequence", *KINDS), no_items()) | numbers


#: Items of one replica of one unit in one slot: canonical numbers in the replica's order. Sequences
#: are empty for units without the LLM. Items of equal grid are adjacent: sorted by (grid rows, grid
#: columns, number).
ReplicaItems = Mapping[Item, Ints]


@dataclass(frozen=True)
class Assignment:
    """The decision of an ordering policy.

    It has the positions of the sequences, and how units without the LLM divide a slot's items.
    """

    positions: Ints  # [n slots, LLM replicas, M] in the batch; every sequence has one
    carry: bool = False  # replicas' loads are also balanced over the slots of a step


@dataclass(frozen=True)
class SlotItems:
    """Items of one modality in a slot."""

    sequence: Ints  # [N] position in the slot's `sequences`
    grid: Ints  # [N, 2] rows, columns (`spec.heads.Head`)

    @property
    def area(self) -> Ints:
        """[N] rows · columns."""
        return np.asarray(self.grid.prod(axis=1))

    def __len__(self) -> int:
        return len(self.sequence)


def slot_items(sequence: Ints | None = None, grid: Ints | None = None) -> SlotItems:
    """Return the items of these sequences, all alike without grids; none without sequences."""
    sequence = no_items() if sequence is None else sequence
    return SlotItems(
        sequence, np.ones((len(sequence), 2), dtype=np.int64) if grid is None else grid
    )


@dataclass(frozen=True)
class Slot:
    """The k-th microbatch of all LLM replicas together: S = DP_lm · M sequences."""

    inputs: ModelInputs
    sequences: Ints  # [S] packed-sequence ids
    sequence_tokens: Ints  # [S] unpadded tokens
    sequence_length_sq: Ints  # [S] Σ length² over the samples inside
    items: Mapping[Item, SlotItems]  # of every modality
    replicas: Mapping[str, list[ReplicaItems]]  # unit name → its replicas

    def rows(self, item: Item, column: str) -> Ints:
        """Return the rows that each item has in a state tensor (`models.layer.TensorSpec.rows`)."""
        if item == "sequence":
            return np.full(len(self.sequences), self.inputs.sequence_length, dtype=np.int64)
        head, area = self.inputs.of(item)[0], self.items[item].area
        return np.asarray(self.inputs.rows(item, column).of(head.size(area)))

    def work(self, module: str, items: ReplicaItems) -> Work:
        """Return the work of these items in a module."""
        head = self.inputs.head(module)
        if head is None:
            numbers = items["sequence"]
            return Work(
                len(numbers),
                float(self.sequence_tokens[numbers].sum()),
                float(self.sequence_length_sq[numbers].sum()),
            )
        return Work(*columns(head.size(self.items[head.item].area[items[head.item]])).sum(axis=0))


def columns(size: Ints) -> Floats:
    """Return the columns of `Work` [N, 3] of items of these sizes."""
    exact = size.astype(float)
    return np.stack([np.ones(len(size)), exact, exact**2], axis=1)


@dataclass(frozen=True)
class StepOrder:
    """The global batch of one step."""

    step: int
    slots: list[Slot]
    label_tokens: int  # over the global batch: the text loss is divided by it
    targets: int  # over the global batch: the image loss is divided by it


@dataclass(frozen=True)
class ItemArrays:
    """Prepared items of one modality of one replica, in its order; fields of `models.layer.Items`.

    Fields that were not requested are None.
    """

    grids: Ints  # [N, 2]; always present
    #: of each requested encoder or generator, by its number among those of the modality: an array
    #: [n, ...] for each run of equal grids
    values: dict[int, list[NDArray[Any]]] = field(default_factory=dict)
    rows: Ints | None = None
    weights: Floats32 | None = None
    noise_seeds: Ints | None = None
    seeds: Ints | None = None
    shares: Floats32 | None = None  # of the rows, as in `spec.places.Places`
    #: as `values`, the tables of packed items (`spec.library_images.Packed`), which the host reads
    tables: dict[int, list[Ints]] = field(default_factory=dict)


@dataclass(frozen=True)
class SlotBatch:
    """Prepared inputs of one replica for one slot, as NumPy arrays; fields of `models.layer.Batch`.

    Pixels are bytes, which the rank normalises (`ImageInput.affine`): a quarter of the memory and
    of the transfer. Fields that were not requested are None.
    """

    items: dict[Item, ItemArrays]
    token_ids: Ints | None = None
    positions: Ints | None = None
    documents: Ints | None = None
    sample_seeds: Ints | None = None
    labels: Ints | None = None


#: Fields of `ItemArrays` that are lists of arrays by number.
LISTS = ("values", "tables")


def flat_arrays(batch: SlotBatch) -> dict[str, Any]:
    """Return all arrays by name, such as "token_ids", "image/rows", or "image/values/0", a list."""
    named = {name: value for name, value in vars(batch).items() if name != "items"}
    for item, arrays in batch.items.items():
        named |= {
            f"{item}/{name}": value for name, value in vars(arrays).items() if name not in LISTS
        }
        named |= {
            f"{item}/{name}/{number}": value
            for name in LISTS
            for number, value in vars(arrays)[name].items()
        }
    return {name: value for name, value in named.items() if value is not None}


def of_flat_arrays(named: Mapping[str, Any]) -> SlotBatch:
    """Return the inverse of `flat_arrays`."""
    whole: dict[str, Any] = {"items": {}}
    of_items: dict[Item, dict[str, Any]] = {}
    for name, value in named.items():
        item, *rest = name.rsplit("/", 2) if name.count("/") > 1 else name.rsplit("/", 1)
        if not rest:
            whole[name] = value
        elif len(rest) == 2:
            of_items.setdefault(item, {}).setdefault(rest[0], {})[int(rest[1])] = value
        else:
            of_items.setdefault(item, {})[rest[0]] = value
    whole["items"] = {item: ItemArrays(**fields) for item, fields in of_items.items()}
    return SlotBatch(**whole)
