"""Experts of a mixture: transformers' grouped products, countable on the meta device; EP groups.

On a GPU torch's grouped GEMM computes them in bf16; in other dtypes, and on the CPU with older
torch, transformers' loop over experts.

Without an EP group all experts are on every rank. With one, each of its ranks has an equal run of
the experts, in full: a row goes to the ranks of its experts (dispatch), and their results return to
be weighted and summed as the library does it (combine; GShard, Lepikhin et al. 2020, arXiv
2006.16668, without capacities). An EP group may have ranks of several TP and CP groups and replicas
(MoE parallel folding, Liu et al. 2025, arXiv 2504.14960): ranks of a TP group have different rows
here anyway (`parallel`), so that no row is sent twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from disttrain_cli.models.division import Shard
from disttrain_cli.models.group import Group
from disttrain_cli.models.host import read
from disttrain_cli.models.layer import PipelineLayer
from disttrain_cli.models.tensor_parallel import narrow


@cache
def prepare() -> None:
    """Make transformers' experts use `_grouped`."""
    from transformers.integrations import moe

    library: Any = moe._grouped_mm

    def grouped(rows_SD: Tensor, weight_EDF: Tensor, offs: Tensor) -> Tensor:
        """Return each row's product with its expert's weight [S, F]; rows are sorted by expert."""
        if rows_SD.is_meta:
            return _evenly(rows_SD, weight_EDF)
        if rows_SD.is_cuda and weight_EDF.dtype != torch.bfloat16:
            made: Tensor = torch.ops.transformers.grouped_mm_fallback(
                rows_SD.to(weight_EDF.dtype), weight_EDF, offs=offs
            )
            return made
        products: Tensor = library(rows_SD, weight_EDF, offs)
        return products

    moe._grouped_mm = grouped


def _evenly(rows_SD: Tensor, weight_EDF: Tensor) -> Tensor:
    """Return products as if experts had equal numbers of rows: work of the grouped GEMM."""
    experts, count = len(weight_EDF), len(rows_SD)
    each = -(-count // experts)
    padded = rows_SD.to(weight_EDF.dtype)
    if each * experts > count:
        padded = torch.cat([padded, padded.new_empty(each * experts - count, padded.shape[1])])
    return torch.bmm(padded.unflatten(0, (experts, each)), weight_EDF).flatten(0, 1)[:count]


def mixtures(layer: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield paths and mixtures of a layer: modules behind transformers' experts interface."""
    for path, part in layer.named_modules():
        if hasattr(part, "_is_expert_parallel"):
            yield path, part


def expert_weights(layer: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the paths and weights of a layer that have an entry per expert.

    What the experts of a mixture share is not among them.
    """
    for path, part in mixtures(layer):
        for name, parameter in part.named_parameters(recurse=False):
            if len(parameter) == part.num_experts:
                yield f"{path}.{name}", parameter


def shard_experts(layer: PipelineLayer, *, ep: int, rank: int = 0) -> None:
    """Narrow a layer's mixtures in place to the experts of one rank of an EP group.

    `ep` must divide their numbers of experts. What experts share is replicated.
    """
    if ep == 1:
        return
    for path, _ in list(expert_weights(layer)):
        owner, _, name = path.rpartition(".")
        narrow(layer.get_submodule(owner), name, Shard(0, (1,), ep, rank, of_experts=True))
    for _, part in mixtures(layer):
        assert not part.num_experts % ep, (layer.name, part.num_experts, ep)
        part.num_experts //= ep


def join_experts(layer: PipelineLayer, group: Group | None) -> None:
    """Connect a layer whose mixtures were narrowed (`shard_experts`) to its EP group."""
    if group is None:
        return
    for _, part in mixtures(layer):
        part.forward = partial(_dispatched, part.forward, part.num_experts, group)


def count_rows(layer: PipelineLayer, device: torch.device) -> Tensor | None:
    """Count the rows of this rank that choose each expert of a layer; return the counter [E].

    Every forward in training mode adds to it, recomputation apart: two small kernels per pass. E
    are the experts of all ranks of an EP group. None for a layer without them.
    """
    if layer.experts is None:
        return None
    rows_E = torch.zeros(layer.experts[0], dtype=torch.int64, device=device)

    def count(part: nn.Module, given: tuple[Tensor, ...]) -> None:
        # inside a backward (task id) it is a recomputation
        if part.training and torch._C._current_graph_task_id() < 0:
            chosen_S = given[1].flatten()
            rows_E.scatter_add_(0, chosen_S, torch.ones_like(chosen_S))

    for _, part in mixtures(layer):
        part.register_forward_pre_hook(count)
    return rows_E


def _dispatched(
    experts: Callable[[Tensor, Tensor, Tensor], Tensor],
    count: int,
    group: Group,
    rows_RD: Tensor,
    index_RK: Tensor,
    weights_RK: Tensor,
) -> Tensor:
    """Return the weighted sums [R, D] of the results of each row's K experts, on any rank.

    Every rank takes part in each exchange, also in the backward, with rows or without. The order of
    all sums depends on the layout and the routing alone.

    Args:
        experts: the library's forward, with local experts.
        count: number of local experts.
        index_RK: of all experts of the group.
    """
    expert_S, order_S = index_RK.flatten().sort(stable=True)
    taken_E, give, take = counts(expert_S, count, group)
    arrived_TD = _Exchange.apply(rows_RD[order_S // index_RK.shape[1]], give, take, group)
    own_T = torch.arange(count, device=rows_RD.device).repeat(group.size)
    own_T = own_T.repeat_interleave(taken_E, output_size=sum(take))
    if not (total := len(own_T)):  # the experts' weights stay in the graph, as on ranks with rows
        arrived_TD = torch.cat([arrived_TD, arrived_TD.new_zeros(1, arrived_TD.shape[1])])
        own_T = own_T.new_zeros(1)
    made_TD = experts(arrived_TD, own_T[:, None], weights_RK.new_ones(len(own_T), 1))[:total]
    back_SD = _Exchange.apply(made_TD, take, give, group)
    weighted_SD = back_SD[order_S.argsort()] * weights_RK.reshape(-1, 1)
    return weighted_SD.view(*index_RK.shape, rows_RD.shape[1]).sum(1).to(rows_RD.dtype)


def counts(expert_S: Tensor, count: int, group: Group) -> tuple[Tensor, list[int], list[int]]:
    """Return the rows from each rank for each local expert, and the rows to and from each rank.

    The host waits for its device here, once.
    """
    sent_E = torch.zeros(group.size * count, dtype=torch.int64, device=expert_S.device)
    sent_E.scatter_add_(0, expert_S, torch.ones_like(expert_S))
    each = [count] * group.size
    taken_E = group.exchanged(sent_E, each, each)
    by_rank_2P = torch.stack([sent_E, taken_E]).unflatten(1, (group.size, count)).sum(2)
    rows = [int(value) for value in read(by_rank_2P.flatten())]
    return taken_E, rows[: group.size], rows[group.size :]


class _Exchange(torch.autograd.Function):
    """Rows to and from every rank, by their numbers; the gradient takes the reverse path."""

    @staticmethod
    def forward(
        ctx: Any, rows_SD: Tensor, give: list[int], take: list[int], group: Group
    ) -> Tensor:
        ctx.give, ctx.take, ctx.group = give, take, group
        return group.exchanged(rows_SD, give, take)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        return ctx.group.exchanged(gradient, ctx.take, ctx.give), None, None, None
