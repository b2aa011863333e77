"""Reduction of gradients over the replicas of a stage, parameter group by parameter group.

The last group of a stage is reduced first, because a backward computes its gradients first. All
replicas start the groups in that one order, whatever work each of them has, because NCCL pairs
collectives by their order alone. Where reduction overlaps the last pass of a step that computes
gradients, a group starts as soon as its gradients and those of the groups before it in that order
are available (`expect`); all others start when the pass has ended (`finish`).

Where ZeRO partitions a group, each rank receives the sum of its partition only: a reduce-scatter,
half the bytes of an all-reduce.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from disttrain_cli.models.torch_versions import reduce_scatter
from disttrain_cli.runtime.engine.partitions import Partition, views


class Reduction:
    """Reduction of the gradients of a stage, once per step.

    Args:
        groups: trained weights, by parameter group.
        partitions: of the groups where ZeRO partitions them, else none.
        replicas: by group, the ranks with the same weights; None where there is one.
        overlaps: True to start groups during the last pass.
    """

    def __init__(
        self,
        groups: Sequence[Sequence[nn.Parameter]],
        partitions: Sequence[Partition],
        replicas: Sequence[dist.ProcessGroup | None],
        overlaps: bool = False,
    ) -> None:
        self._groups, self._partitions, self._replicas = groups, partitions, replicas
        self._overlaps = overlaps and any(one is not None for one in replicas)
        self._left = len(groups)  # groups 0 … left - 1 have not started
        self._works: list[Any] = []
        self._group_of = {id(w): number for number, group in enumerate(groups) for w in group}
        self._to_come: Counter[int] | None = None  # outstanding gradients, in the last pass
        self._incomplete: Counter[int] = Counter()  # weights with outstanding gradients, by group
        if self._overlaps:
            for weight in (weight for group in groups for weight in group):
                weight.register_post_accumulate_grad_hook(self._made)

    def expect(self, weights: Iterable[nn.Parameter] | None = None) -> None:
        """Start the last pass of a step that computes gradients.

        Args:
            weights: trained weights, each once per gradient that the pass will compute for it; no
                others get any. None: every trained weight once.
        """
        if not self._overlaps:
            return
        every = (weight for group in self._groups for weight in group)
        self._to_come = Counter(id(w) for w in (every if weights is None else weights))
        self._incomplete = Counter(self._group_of[weight] for weight in self._to_come)
        self._begin_complete()

    def finish(self) -> None:
        """Start the remaining groups, and wait for all (on a GPU the device waits)."""
        self._to_come = None
        while self._left:
            self._begin_next()
        for work in self._works:
            work.wait()
        self._works.clear()
        self._left = len(self._groups)

    def _made(self, weight: Tensor) -> None:
        if self._to_come is None:
            return
        key = id(weight)
        assert self._to_come[key] > 0, "a gradient came after its group was taken for complete"
        self._to_come[key] -= 1
        if not self._to_come[key]:
            self._incomplete[self._group_of[key]] -= 1
            self._begin_complete()

    def _begin_complete(self) -> None:
        while self._left and not self._incomplete[self._left - 1]:
            self._begin_next()

    @torch.no_grad()
    def _begin_next(self) -> None:
        self._left -= 1
        weights, replicas = self._groups[self._left], self._replicas[self._left]
        if self._partitions:
            one = self._partitions[self._left]
            sums_N = _flat(weights, len(one.flat_N)) if one.sums_N is None else one.sums_N
            one.master_P.grad = own_P = one.own_of(sums_N)
            if replicas is not None:
                self._works.append(reduce_scatter(own_P, sums_N, replicas, begin=True))
        elif replicas is not None:
            sums_N = _flat(weights, sum(weight.numel() for weight in weights))
            for weight, of_weight in views(weights, sums_N):
                weight.grad = of_weight
            self._works.append(dist.all_reduce(sums_N, group=replicas, async_op=True))
        else:
            for weight in weights:
                weight.grad = torch.zeros_like(weight) if weight.grad is None else weight.grad


def _flat(weights: Sequence[nn.Parameter], numbers: int) -> Tensor:
    """Move the weights' gradients into one flat tensor [numbers], and clear them.

    Zeros stand for the gradients of layers without work in a replica (deepspeed trap 30), and fill
    the end.
    """
    flat_N = weights[0].new_zeros(numbers)
    for weight, of_weight in views(weights, flat_N):
        if weight.grad is not None:
            of_weight.copy_(weight.grad)
            weight.grad = None
    return flat_N
