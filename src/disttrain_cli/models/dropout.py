"""Dropout that depends only on the seed, the step, the sample and the layer (Srivastava et al.
2014).

An element's mask bit is a hash of its item's seed (`Batch`), the layer's name, the element's row in
its item and its position in the row. So the mask of an item is the same on every rank, for any DP,
TP or slots, and when activations are recomputed; no random generator is involved. Masks are applied
before a TP group sums its partial results of the same rows, where a mask of a sum is the sum of the
masked parts, or after it to local rows. A rank with a part of the features applies that part of
their mask.

Frozen layers drop nothing, and nothing is dropped in evaluation or sampling.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from disttrain_cli.models.division import own_rows
from disttrain_cli.models.host import to_device
from disttrain_cli.models.layer import PipelineLayer


class SeededDropout(nn.Module):
    """Replacement of nn.Dropout; `begin` must run before every forward of its layer.

    `divided`: the input of its first call per forward has a TP rank's shard of the features, taken
    alike from each of this many packed parts; 0: it has all features.
    """

    def __init__(self, p: float, key: int, divided: int) -> None:
        super().__init__()
        self.p, self.key, self.divided = p, key, divided
        self.rows: Tensor | None = None  # [R] hash of each row's item and index in it
        self.calls, self.tp, self.tp_rank = 0, 1, 0

    def begin(self, rows: Tensor | None, *, tp: int = 1, tp_rank: int = 0) -> None:
        """Set the row hashes of the coming forward, of all or of local rows; None: drop nothing."""
        self.rows, self.calls = rows, 0
        self.tp, self.tp_rank = tp, tp_rank

    def forward(self, hidden: Tensor) -> Tensor:
        """Zero a share `p` of the elements and scale the others by 1 / (1 − p)."""
        if not self.training or self.rows is None:
            return hidden
        self.calls += 1
        width, rows = hidden.shape[-1], self.rows
        if len(hidden) < len(rows):
            rows = rows[slice(*own_rows(len(rows), self.tp, self.tp_rank))]
        # indices over the dimensions between rows and features
        before = torch.arange(hidden.shape[1:-1].numel(), device=hidden.device)
        columns = torch.arange(width, device=hidden.device)
        if self.divided and self.calls == 1:
            share = width // self.divided
            columns = columns + (columns // share * (self.tp - 1) + self.tp_rank) * share
            width *= self.tp
        positions = (before[:, None] * width + columns).flatten()
        dropped = _dropped(rows ^ (self.key + self.calls), positions, self.p).view(hidden.shape)
        return hidden.masked_fill(dropped, 0.0) * (1.0 / (1.0 - self.p))


class OfAdapter(SeededDropout):
    """Dropout of an adapter's input: rows [R, D], whatever their leading dimensions.

    If items have several rows that the layer does not count, as in a U-Net: [N, …, D].
    """

    def forward(self, hidden: Tensor) -> Tensor:
        if not self.training or self.rows is None or not len(self.rows):
            return hidden
        rows_RD = hidden.reshape(-1, hidden.shape[-1])
        if len(rows_RD) > len(self.rows):
            rows_RD = rows_RD.unflatten(0, (len(self.rows), -1))
        return super().forward(rows_RD).view(hidden.shape)


def of_adapter(layer: PipelineLayer, path: str, p: float, divided: int) -> OfAdapter:
    """Return the dropout before the adapter of the linear at a path."""
    return OfAdapter(p, _key(f"{layer.name}/{path}.lora_dropout"), divided)


def seeded(layer: PipelineLayer) -> None:
    """Replace every active nn.Dropout of a layer by a seeded one (`announce`)."""
    dropouts = []
    for path, part in list(layer.named_modules()):
        if isinstance(part, nn.Dropout) and part.p:
            divided = any(
                path.endswith(end) for end in ("ff.net.1", "mlp.dropout", "inner_dropout")
            )
            dropouts.append(SeededDropout(part.p, _key(f"{layer.name}/{path}"), divided))
            owner, _, name = path.rpartition(".")
            setattr(layer.get_submodule(owner), name, dropouts[-1])
    announce(layer, dropouts)


def announce(layer: PipelineLayer, dropouts: Sequence[SeededDropout]) -> None:
    """Register dropouts with their layer, which updates them before each forward.

    The layer then requires the items' seeds of its batches.
    """
    if dropouts and not layer.dropouts:
        layer.needs = (*layer.needs, "dropout")
        layer.register_forward_pre_hook(begin)
    layer.dropouts = [*layer.dropouts, *dropouts]


def begin(layer: Any, given: tuple[Any, ...]) -> None:
    """Pass the rows of a batch to a layer's dropouts; a forward pre-hook on (state, batch)."""
    seeds_N, counts = layer.seeded_rows(given[1])
    rows = row_hashes(seeds_N, counts) if layer.trained and seeds_N is not None else None
    if rows is not None:
        rows = layer.own(rows, given[1])
    group = layer.group
    for dropout in layer.dropouts:
        shared = {} if group is None else {"tp": group.size, "tp_rank": group.rank}
        dropout.begin(rows, **shared)


def _key(name: str) -> int:
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:7], "big")


def row_hashes(seeds_N: Tensor, counts: list[int]) -> Tensor:
    """Return [R] int64: a hash for each row of each item."""
    repeats = np.asarray(counts, dtype=np.int64)
    # values that depend on the counts alone are computed on the host
    items = np.repeat(np.arange(len(counts)), repeats)
    numbers = np.arange(len(items)) - np.repeat(repeats.cumsum() - repeats, repeats)
    item_R, number_R = (
        to_device(torch.from_numpy(values), seeds_N.device) for values in (items, numbers)
    )
    return mix(mix(seeds_N).index_select(0, item_R) + number_R)


def _dropped(rows_R: Tensor, positions_W: Tensor, p: float) -> Tensor:
    """Return [R, W] bool, True for a share `p`.

    Rows and positions are hashed in 64 bits, their sums in 32 (lowbias32, Wellons 2018, up to the
    step that only changes lower bits): the mask of a long sequence is as large as its input.
    """
    drawn = _upper(mix(rows_R))[:, None] + _upper(mix(positions_W))
    drawn ^= (drawn >> 16) & 0xFFFF
    drawn *= 0x7FEB352D
    drawn ^= (drawn >> 15) & 0x1FFFF  # a logical shift
    drawn *= 0x846CA68B - (1 << 32)
    return drawn < int(p * (1 << 32)) - (1 << 31)


def _upper(values: Tensor) -> Tensor:
    """Return the upper half of int64 as int32."""
    return (values >> 32).to(torch.int32)


def mix(values: Tensor) -> Tensor:
    """Return SplitMix64's finaliser on int64; products wrap around as if unsigned."""
    values = values + _GOLDEN
    values = (values ^ _shifted(values, 30)) * _FIRST
    values = (values ^ _shifted(values, 27)) * _SECOND
    return values ^ _shifted(values, 31)


def _shifted(values: Tensor, bits: int) -> Tensor:
    """Return a logical shift to the right; torch's own preserves the sign."""
    return (values >> bits) & ((1 << (64 - bits)) - 1)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value


_GOLDEN, _FIRST, _SECOND = map(
    _signed, (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
)
