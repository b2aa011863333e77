"""Bytes that a layer saves from its forward for its backward."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from disttrain_cli.models.layer import Batch, PipelineLayer


def saved_bytes(layer: PipelineLayer, state: Mapping[str, Tensor], batch: Batch) -> int:
    """Return the bytes that one forward of a layer saves for backward, each storage counted once.

    The layer's input counts if it is saved, its output only if the layer itself saves it, so a sum
    over layers counts every tensor about once. Weights, the batch and tensors that a stage prepares
    once per batch (masks) do not count. Needs a real device: attention uses another kernel on the
    meta device.
    """
    with torch.no_grad():
        layer(dict(state), batch)  # fills the batch's cache
    known = {_key(tensor) for tensor in (*layer.parameters(), *batch.tensors())}
    saved: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        if _key(tensor) not in known:
            saved[_key(tensor)] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        # held until the bytes are counted, so that no storage's address is reused
        results = layer(dict(state), batch)
    total = sum(saved.values())
    del results
    return total


def _key(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
