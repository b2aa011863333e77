"""Modules that a TP group does not divide: every rank holds their layers whole and computes other
items of its replica (`UnitPlan.module_tp`; vLLM's `mm_encoder_tp_mode="data"`).

Items are dealt out whole, levelled by their size. All ranks derive the same tables from the items'
grids, so no shape is sent, and every rank joins every message, whether it has items or not. What
such a module leaves is exchanged once, into the equal runs of rows that the TP ranks of any other
layer have (`division.own_rows`); gradients take the way back. The gradients of its weights are
partial sums, as those of undivided weights are (`tensor_parallel.join`).
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
    """Have a layer that its TP group does not divide train: each rank has the gradients of its own
    items only."""
    for parameter in layer.parameters():
        parameter.__dict__["partial_gradient"] = True


class Exchange:
    """Messages of a TP group at the two ends of such a module, in one slot.

    Args:
        reads: state tensors that its layers are given, which every rank has whole.
        writes: those that they leave, of each rank's own items.
    """

    def __init__(
        self, share: Share, group: Group, reads: Iterable[TensorSpec], writes: Iterable[TensorSpec]
    ) -> None:
        self.batch, self._share, self._group = share.batch, share, group
        self._reads = {spec.name: (self._own_rows(spec), self._all_rows(spec)) for spec in reads}
        self._writes = {spec.name: self._tables(spec) for spec in writes}

    def entering(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The rows of own items, of whole tensors that layers read."""
        return {
            name: state[name].index_select(0, _index(rows, state[name]))
            for name, (rows, _) in self._reads.items()
        }

    def leaving(self, written: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Rows of own items → an equal run of all rows on each rank."""
        return {
            name: regrouped(written[name].detach(), source, own, equal, self._group)
            for name, (source, own, equal) in self._writes.items()
        }

    def returned(self, gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Gradients of what `leaving` made → those of the rows of own items, as far as there are
        any."""
        return {
            name: regrouped(gradients[name], np.argsort(source), equal, own, self._group)
            for name, (source, own, equal) in self._writes.items()
            if name in gradients
        }

    def entered(self, own: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Gradients of the rows of own items → those of whole tensors, on every rank."""
        made = {}
        for name, gradient in own.items():
            rows, count = self._reads[name]
            whole = gradient.new_zeros(count, *gradient.shape[1:])
            whole.index_copy_(0, _index(rows, gradient), gradient)
            made[name] = all_reduced(whole, self._group)
        return made

    def _own_rows(self, spec: TensorSpec) -> Ints:
        """[R'] rows of own items, by their number among those of all."""
        owner_R = np.repeat(self._share.owner, self._share.counts(spec))
        return np.flatnonzero(owner_R == self._group.rank)

    def _all_rows(self, spec: TensorSpec) -> int:
        return int(self._share.counts(spec).sum())

    def _tables(self, spec: TensorSpec) -> tuple[Ints, Ints, Ints]:
        """Tables of a tensor that is left: where each row is among the ranks' rows, rank by rank;
        and where the rows of each rank begin, by items and in equal runs."""
        assert spec.split, spec.name
        owner_R = np.repeat(self._share.owner, self._share.counts(spec))
        source = np.empty(len(owner_R), dtype=np.int64)
        source[np.argsort(owner_R, kind="stable")] = np.arange(len(owner_R))
        own = np.cumsum(np.bincount(owner_R, minlength=self._group.size))
        return source, np.array([0, *own]), bounds_of(len(owner_R), self._group)


def _index(rows: Ints, like: Tensor) -> Tensor:
    return to_device(torch.from_numpy(rows), like.device)
