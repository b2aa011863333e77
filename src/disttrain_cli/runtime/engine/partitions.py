"""ZeRO-1 partitions of parameter groups: stepping of fp32 masters and gathering of weights.

A group's weights are one flat tensor, of which each replica owns a part: it steps the part's fp32
master and sends the result to the others. The optimizer steps one group after the other, and the
weights of each are gathered as soon as they have changed. Where the gathering overlaps the next
step, a layer waits for its weights when it is called.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from disttrain_cli.models.torch_versions import all_gather
from disttrain_cli.runtime.engine.optimizer import groups_of, splits, torch_optimizer


@dataclass(frozen=True)
class Partition:
    """Parameter group of ZeRO-1: N numbers, padded to a multiple of the P that a replica owns."""

    weights: Sequence[nn.Parameter]  # views of `flat_N`
    flat_N: Tensor
    own_P: Tensor  # this replica's part, a view of `flat_N`
    master_P: Tensor  # fp32
    sums_N: Tensor | None  # bf16: fp32 sums of gradients, allocated across steps

    @property
    def sums(self) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """The weights, each with its part of `sums_N`; none where there are no sums."""
        return iter(()) if self.sums_N is None else views(self.weights, self.sums_N)

    def own_of(self, gradients_N: Tensor) -> Tensor:
        """Return the part of a flat tensor that this rank owns."""
        return gradients_N.narrow(
            0, self.own_P.storage_offset() - self.flat_N.storage_offset(), len(self.own_P)
        )


def partitions_of(optimizer: Any, replicas: Sequence[int]) -> list[Partition]:
    """Return the partitions of one of DeepSpeed's optimizers, by group; none for torch's.

    Args:
        replicas: by group, this rank's index among those with the same weights.
    """
    if optimizer is None or not splits(optimizer):
        return []
    if hasattr(optimizer, "fp32_groups_gradients_flat"):
        weights, flat, parts, masters, sums = (
            optimizer.bf16_groups,
            optimizer.bf16_groups_flat,
            optimizer.bf16_partitioned_groups,
            optimizer.fp32_groups_flat_partition,
            optimizer.fp32_groups_gradients_flat,
        )
    else:
        weights, flat, parts, masters, sums = (
            optimizer.bit16_groups,
            optimizer.bit16_groups_flat,
            optimizer.parallel_partitioned_bit16_groups,
            optimizer.single_partition_of_fp32_groups,
            [None] * len(optimizer.bit16_groups),
        )
    return [
        Partition(weights[i], flat[i], parts[i][replicas[i]], masters[i], sums[i])
        for i in range(len(weights))
    ]


def own_values(weights: Sequence[nn.Parameter], replicas: int, replica: int) -> Tensor:
    """Return the P fp32 numbers of a group's weights that a replica holds masters of.

    For DeepSpeed's bf16 optimizers, which pad the group to an even number per replica.
    """
    total = sum(weight.numel() for weight in weights)
    size = 2 * -(-total // (2 * replicas))
    begin, at = size * replica, 0
    values_P = torch.zeros(size, device=weights[0].device)
    for weight in weights:
        first, last = max(at, begin), min(at + weight.numel(), begin + size)
        if first < last:
            own = weight.detach().flatten()[first - at : last - at]
            values_P[first - begin : last - begin] = own
        at += weight.numel()
    return values_P


def add_at_once(weights: Iterable[tuple[nn.Parameter, Tensor]]) -> None:
    """Add a weight's gradient to its fp32 sum as soon as it is computed, and free it (bf16).

    DeepSpeed holds the gradients of all weights to the end of a backward, when most activations
    are held too.

    Args:
        weights: trained weights with their sums.
    """

    def add(weight: Tensor, total: Tensor) -> None:
        assert weight.grad is not None
        total.add_(weight.grad)
        weight.grad = None

    for weight, total in weights:
        weight.register_post_accumulate_grad_hook(partial(add, total=total))


def views(weights: Sequence[nn.Parameter], flat_N: Tensor) -> Iterator[tuple[nn.Parameter, Tensor]]:
    """Yield the weights of a group, each with its view of a flat tensor of the same layout."""
    at = 0
    for weight in weights:
        yield weight, flat_N[at : at + weight.numel()].view_as(weight)
        at += weight.numel()


def step_by_group(optimizer: Any, partitions: Sequence[Partition], gathering: Gathering) -> None:
    """Replace the step of DeepSpeed's optimizers: one group after the other.

    The gradients are those of the masters. DeepSpeed's step computes a norm, for which the host
    would wait (the engine has computed it already, and it is finite), and gathers when all groups
    are done.
    """
    stepping, groups = torch_optimizer(optimizer), groups_of(optimizer)
    with torch.no_grad():
        for index, (group, one) in enumerate(zip(groups, partitions, strict=True)):
            stepping.param_groups = [group]
            stepping.step()
            one.master_P.grad = None
            one.own_P.copy_(one.master_P)
            gathering.begin(index)
    stepping.param_groups = groups
    gathering.end()


class Gathering:
    """All-gather of updated weights over the replicas, group by group.

    Args:
        replicas: by group, the ranks with the same weights; None where there is one.
        ahead: layers that wait for their weights when they are called; none: `end` waits.
    """

    def __init__(
        self,
        partitions: Sequence[Partition],
        replicas: Sequence[dist.ProcessGroup | None],
        ahead: Iterable[nn.Module] = (),
    ) -> None:
        self._partitions, self._replicas = partitions, replicas
        self._under_way: dict[int, Any] = {}
        group_of = {id(p): index for index, one in enumerate(partitions) for p in one.weights}
        self._ahead = False
        for layer in ahead:
            if own := sorted({group_of[id(p)] for p in layer.parameters() if id(p) in group_of}):
                self._ahead = True
                layer.register_forward_pre_hook(partial(self._before, own))

    def begin(self, index: int) -> None:
        """Start gathering the weights of a group, whose local part has changed."""
        if (replicas := self._replicas[index]) is not None:
            one = self._partitions[index]
            self._under_way[index] = all_gather(one.flat_N, one.own_P, replicas, begin=True)

    def end(self) -> None:
        """Finish a step after its last group: wait for the weights, unless layers wait for them."""
        if not self._ahead:
            self.settle()

    def settle(self) -> None:
        """Wait until all weights are updated by the last step."""
        self._wait(list(self._under_way))

    def _before(self, groups: Sequence[int], *_: Any) -> None:
        self._wait([index for index in groups if index in self._under_way])

    def _wait(self, groups: Iterable[int]) -> None:
        for index in groups:
            self._under_way.pop(index).wait()
