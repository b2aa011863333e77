"""Modules replicated over a TP group: every rank has all weights and processes other items.

Corresponds to `UnitPlan.module_tp` and to vLLM's `mm_encoder_tp_mode="data"`. Items are distributed
undivided, balanced by their size. All ranks derive the same tables from the items' grids, so no
shape is sent, and every rank joins every message, with items or without. The outputs of such a
module are exchanged once, into the equal runs of rows that the TP ranks of any other layer have
(`division.own_rows`); gradients take the reverse path. The gradients of its weights are partial
sums, like those of other replicated weights (`tensor_parallel.join`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from disttrain_cli.models.context_parallel import bounds_of, regrouped
from disttrain_cli.models.group import Group
from disttrain_cli.models.host import to_device
from disttrain_cli.models.layer import PipelineLayer, Share, TensorSpec
from disttrain_cli.models.parallel import all_reduced

Ints = NDArray[np.int64]


def replicate(layer: PipelineLayer) -> None:
    """Mark a replicated layer's gradients as partial: each rank has those of its own items only."""
    for parameter in layer.parameters():
        parameter.__dict__["partial_gradient"] = True


class Exchange:
    """Messages of a TP group at the two ends of a replicated module, in one slot.

    Args:
        reads: state tensors that its layers read, which every rank has in full.
        writes: state tensors that they write, for each rank's own items.
    """

    def __init__(
        self, share: Share, group: Group, reads: Iterable[TensorSpec], writes: Iterable[TensorSpec]
    ) -> None:
        self.batch, self._share, self._group = share.batch, share, group
        self._reads = {spec.name: (self._own_rows(spec), self._all_rows(spec)) for spec in reads}
        self._writes = {spec.name: self._tables(spec) for spec in writes}

    def entering(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the rows of the rank's own items, from full tensors that layers read."""
        return {
            name: state[name].index_select(0, _index(rows, state[name]))
            for name, (rows, _) in self._reads.items()
        }

    def leaving(self, written: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Redistribute rows of own items to an equal run of all rows on each rank."""
        return {
            name: regrouped(written[name].detach(), source, own, equal, self._group)
            for name, (source, own, equal) in self._writes.items()
        }

    def returned(self, gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the gradients of the rows of own items, from those of `leaving`'s results."""
        return {
            name: regrouped(gradients[name], np.argsort(source), equal, own, self._group)
            for name, (source, own, equal) in self._writes.items()
            if name in gradients
        }

    def entered(self, own: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the gradients of full tensors, on every rank, from those of own items' rows."""
        made = {}
        for name, gradient in own.items():
            rows, count = self._reads[name]
            whole = gradient.new_zeros(count, *gradient.shape[1:])
            whole.index_copy_(0, _index(rows, gradient), gradient)
            made[name] = all_reduced(whole, self._group)
        return made

    def _own_rows(self, spec: TensorSpec) -> Ints:
        """Return [R'] indices of the rows of own items among all rows."""
        owner_R = np.repeat(self._share.owner, self._share.counts(spec))
        return np.flatnonzero(owner_R == self._group.rank)

    def _all_rows(self, spec: TensorSpec) -> int:
        return int(self._share.counts(spec).sum())

    def _tables(self, spec: TensorSpec) -> tuple[Ints, Ints, Ints]:
        """Return the redistribution tables of a written tensor.

        They are: the index of each row among the ranks' rows, rank by rank; the first row of each
        rank, by items; and the first row of each rank, in equal runs.
        """
        assert spec.split, spec.name
        owner_R = np.repeat(self._share.owner, self._share.counts(spec))
        source = np.empty(len(owner_R), dtype=np.int64)
        source[np.argsort(owner_R, kind="stable")] = np.arange(len(owner_R))
        own = np.cumsum(np.bincount(owner_R, minlength=self._group.size))
        return source, np.array([0, *own]), bounds_of(len(owner_R), self._group)


def _index(rows: Ints, like: Tensor) -> Tensor:
    return to_device(torch.from_numpy(rows), like.device)
