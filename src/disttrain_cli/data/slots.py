"""What an ordering decides: for every slot of a step, which replica of which unit works on which
items.

Items of a slot are numbered in canonical order: sequences as the ordering lists them, those of a
modality by (sequence, place in the sequence). Replicas refer to them by these numbers, so routes
between units can be derived on every rank without a message.
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
    """The numbers of no item."""
    return np.zeros(0, dtype=np.int64)


def replica_items(**numbers: Ints) -> ReplicaItems:
    """The items that are given, none of all others."""
    return dict.fromkeys(("sequence", *KINDS), no_items()) | numbers


#: The items of one replica of one unit in one slot: canonical numbers in the replica's own order.
#: Sequences are empty for units without the LLM. Items of equal grid are adjacent: sorted by (grid
#: rows, grid columns, number).
ReplicaItems = Mapping[Item, Ints]


@dataclass(frozen=True)
class Assignment:
    """What a policy decides: positions of the sequences, and how units without the LLM share a
    slot's items."""

    positions: Ints  # [n slots, LLM replicas, M] in the batch; every sequence has one
    carry: bool = False  # replicas are level over the slots of the step too, not only in each one


@dataclass(frozen=True)
class SlotItems:
    """The items of one modality in a slot."""

    sequence: Ints  # [N] position in the slot's `sequences`
    grid: Ints  # [N, 2] rows, columns (`spec.heads.Head`)

    @property
    def area(self) -> Ints:
        """[N] rows · columns."""
        return np.asarray(self.grid.prod(axis=1))

    def __len__(self) -> int:
        return len(self.sequence)


def slot_items(sequence: Ints | None = None, grid: Ints | None = None) -> SlotItems:
    """Items of these sequences, all alike where there are no grids; without sequences none."""
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
        """Rows that each item contributes to a state tensor (`models.layer.TensorSpec.rows`)."""
        if item == "sequence":
            return np.full(len(self.sequences), self.inputs.sequence_length, dtype=np.int64)
        head, area = self.inputs.of(item)[0], self.items[item].area
        return np.asarray(self.inputs.rows(item, column).of(head.size(area)))

    def work(self, module: str, items: ReplicaItems) -> Work:
        """Work that these items bring to a module."""
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
    """[N, 3] the columns of `Work` of items of these sizes."""
    exact = size.astype(float)
    return np.stack([np.ones(len(size)), exact, exact**2], axis=1)


@dataclass(frozen=True)
class StepOrder:
    """The whole global batch of one step."""

    step: int
    slots: list[Slot]
    label_tokens: int  # over the global batch: the text loss is divided by it
    targets: int  # over the global batch: the image loss is divided by it


@dataclass(frozen=True)
class ItemArrays:
    """Prepared items of one modality of one replica, in its own order; the fields of
    `models.layer.Items`. Fields that were not asked for are None."""

    grids: Ints  # [N, 2]; always comes
    #: of each encoder or generator that was asked for, by its number among those of the modality:
    #: per run of equal grids [n, ...]
    values: dict[int, list[NDArray[Any]]] = field(default_factory=dict)
    rows: Ints | None = None
    weights: Floats32 | None = None
    noise_seeds: Ints | None = None
    seeds: Ints | None = None
    shares: Floats32 | None = None  # of the rows, as in `spec.places.Places`


@dataclass(frozen=True)
class SlotBatch:
    """Prepared inputs of one replica for one slot, as NumPy arrays; the fields of
    `models.layer.Batch`.

    Pixels are bytes, which the rank normalises (`ImageInput.affine`): a quarter of the memory and
    of the way there. Fields that were not asked for are None.
    """

    items: dict[Item, ItemArrays]
    token_ids: Ints | None = None
    positions: Ints | None = None
    documents: Ints | None = None
    sample_seeds: Ints | None = None
    labels: Ints | None = None


def flat_arrays(batch: SlotBatch) -> dict[str, Any]:
    """All arrays by name, as "token_ids", "image/rows", or "image/values/0", which is a list."""
    named = {name: value for name, value in vars(batch).items() if name != "items"}
    for item, arrays in batch.items.items():
        named |= {
            f"{item}/{name}": value for name, value in vars(arrays).items() if name != "values"
        }
        named |= {f"{item}/values/{number}": value for number, value in arrays.values.items()}
    return {name: value for name, value in named.items() if value is not None}


def of_flat_arrays(named: Mapping[str, Any]) -> SlotBatch:
    """The inverse of `flat_arrays`."""
    whole: dict[str, Any] = {"items": {}}
    of_items: dict[Item, dict[str, Any]] = {}
    for name, value in named.items():
        item, _, rest = name.rpartition("/") if "/values/" not in name else name.partition("/")
        if not item:
            whole[name] = value
        elif rest.startswith("values/"):
            fields = of_items.setdefault(item, {}).setdefault("values", {})
            fields[int(rest.removeprefix("values/"))] = value
        else:
            of_items.setdefault(item, {})[rest] = value
    whole["items"] = {item: ItemArrays(**fields) for item, fields in of_items.items()}
    return SlotBatch(**whole)
