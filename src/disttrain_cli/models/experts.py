"""Experts of a mixture: transformers' grouped products, countable on the meta device; EP groups.

On a GPU torch's grouped GEMM computes them in bf16; in other dtypes, and on the CPU with older
torch, transformers' loop over experts.

Without an EP group all experts are on every rank. With one, each of its ranks has an equal run of
the experts, in full (GShard, Lepikhin et al. 2020, arXiv 2006.16668, without capacities). A row
goes once to each rank with experts that it chose, with their indices and weights (dispatch); the
rank weights and sums their results, and one row returns (combine). Between nodes a row goes once to
each node, to the rank of the same local index, which forwards it inside the node and sums what
returns (as DeepSeek-V3's training, DeepSeek-AI 2024, arXiv 2412.19437). An EP group may have ranks
of several TP and CP groups and replicas (MoE parallel folding, Liu et al. 2025, arXiv 2504.14960):
ranks of a TP group have different rows here anyway (`parallel`), so that no row is sent twice.

A group that overlaps (`Group.overlap`) takes a rank's rows in two halves. On CUDA all of their
exchanges, with the copies around them, run in a stream of their own: the second half is dispatched
while the experts compute the first, whose results return while they compute the second. Autograd
runs each part of the backward in its forward's stream, in reverse order, and makes one stream wait
for another where a gradient passes between them, so that the backward overlaps likewise. The
gradients of the experts' weights are computed behind the last exchange of the layer's backward,
which only the gradients of rows wait for (`Deferral`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import replace
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from disttrain_cli.models.division import Shard
from disttrain_cli.models.group import Group
from disttrain_cli.models.host import read
from disttrain_cli.models.layer import PipelineLayer
from disttrain_cli.models.tensor_parallel import narrow

Ints = NDArray[np.int64]
_RECOMPUTING: ContextVar[bool] = ContextVar("recomputing", default=False)
_DEFERRAL: ContextVar[Deferral | None] = ContextVar("deferral", default=None)


@cache
def prepare() -> None:
    """Make transformers' experts use `_grouped`."""
    from transformers.integrations import moe

    library: Any = moe._grouped_mm

    def grouped(rows_SD: Tensor, weight_EDF: Tensor, offs: Tensor) -> Tensor:
        """Return each row's product with its expert's weight [S, F]; rows are sorted by expert."""
        if rows_SD.is_cuda and weight_EDF.dtype != torch.bfloat16:
            made: Tensor = torch.ops.transformers.grouped_mm_fallback(
                rows_SD.to(weight_EDF.dtype), weight_EDF, offs=offs
            )
            return made
        product = _evenly if rows_SD.is_meta else library
        deferral = _DEFERRAL.get()
        if deferral is None or (weight := deferral.weight_of(weight_EDF)) is None:
            return product(rows_SD, weight_EDF, offs)
        products: Tensor = _Product.apply(
            rows_SD.to(weight_EDF.dtype),
            deferral.anchor,
            weight_EDF.detach(),
            offs,
            weight,
            weight_EDF is not weight,
            deferral.operands,
            product,
        )
        return products

    moe._grouped_mm = grouped


def _evenly(rows_SD: Tensor, weight_EDF: Tensor, offs: Tensor) -> Tensor:
    """Return products as if experts had equal numbers of rows: work of the grouped GEMM."""
    experts, count = len(weight_EDF), len(rows_SD)
    each = -(-count // experts)
    padded = rows_SD.to(weight_EDF.dtype)
    if each * experts > count:
        padded = torch.cat([padded, padded.new_empty(each * experts - count, padded.shape[1])])
    return torch.bmm(padded.unflatten(0, (experts, each)), weight_EDF).flatten(0, 1)[:count]


class Operands(NamedTuple):
    """Operands of the gradient of a weight [E, F, D] or [E, D, F]; rows are sorted by expert."""

    weight: nn.Parameter
    left_SF: Tensor
    right_SD: Tensor
    offs: Tensor  # end of each expert's rows


class Deferral:
    """Gradients of a mixture's weights, computed once all gradients of rows are on their way.

    Grouped products under `active` only save operands in their backward. Autograd runs what is
    ready in reverse order of the forward: the node made here runs after the backward of all that
    follows, exchanges among it, and before that of what precedes it.
    """

    def __init__(self, part: nn.Module) -> None:
        trained = (weight for weight in part.parameters(recurse=False) if weight.requires_grad)
        self.weights = [weight for weight in trained if weight.dim() == 3]
        self.operands: list[Operands] = []
        self.anchor = _WeightGradients.apply(self.operands, *self.weights) if self.weights else None

    def weight_of(self, weight_EDF: Tensor) -> nn.Parameter | None:
        """Return the weight that this is, or that it is a transposed view of, if it is trained."""
        whole = weight_EDF if weight_EDF._base is None else weight_EDF._base
        return next((weight for weight in self.weights if weight is whole), None)

    @contextmanager
    def active(self) -> Iterator[None]:
        token = _DEFERRAL.set(self)
        try:
            yield
        finally:
            _DEFERRAL.reset(token)


class _WeightGradients(torch.autograd.Function):
    """Gradients of weights from the operands that grouped products saved in their backward."""

    @staticmethod
    def forward(ctx: Any, operands: list[Operands], *weights: nn.Parameter) -> Tensor:
        ctx.operands, ctx.weights = operands, weights
        return weights[0].new_empty(0)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:
        sums: dict[int, Tensor] = {}
        while ctx.operands:
            weight, left_SF, right_SD, offs = ctx.operands.pop()
            made = functional.grouped_mm(left_SF.t(), right_SD, offs=offs)
            del left_SF, right_SD
            known = sums.get(id(weight))
            sums[id(weight)] = made if known is None else known.add_(made)
        return None, *(sums.get(id(weight)) for weight in ctx.weights)


class _Product(torch.autograd.Function):
    """Grouped product whose weight's gradient is computed later (`Deferral`)."""

    @staticmethod
    def forward(
        ctx: Any,
        rows_SD: Tensor,
        anchor: Tensor,
        weight_EDF: Tensor,
        offs: Tensor,
        weight: nn.Parameter,
        transposed: bool,
        operands: list[Operands],
        product: Callable[[Tensor, Tensor, Tensor], Tensor],
    ) -> Tensor:
        ctx.save_for_backward(rows_SD, weight_EDF, offs)
        ctx.weight, ctx.transposed, ctx.operands, ctx.product = (
            weight,
            transposed,
            operands,
            product,
        )
        made_SF = product(rows_SD, weight_EDF, offs)
        # padded ones are views, to which the library could not add a bias in place
        return made_SF.clone() if made_SF._is_view() else made_SF

    @staticmethod
    def backward(ctx: Any, gradient_SF: Tensor) -> tuple[Tensor | None, ...]:
        rows_SD, weight_EDF, offs = ctx.saved_tensors
        gradient_SF = gradient_SF.contiguous()
        given, gradient = rows_SD.detach(), gradient_SF.detach()
        left, right = (gradient, given) if ctx.transposed else (given, gradient)
        ctx.operands.append(Operands(ctx.weight, left, right, offs))
        gradient_SD = ctx.product(gradient_SF, weight_EDF.transpose(1, 2), offs)
        # the anchor's gradient has a device, whose thread runs its node in order
        return gradient_SD, gradient_SF.new_empty(0), None, None, None, None, None, None


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
        part.forward = partial(_dispatched, part, part.forward, group)


def count_rows(layer: PipelineLayer, device: torch.device) -> Tensor | None:
    """Count the rows of this rank that choose each expert of a layer; return the counter [E].

    Every forward in training mode adds to it, recomputation apart: two small kernels per pass. E
    are the experts of all ranks of an EP group. None for a layer without them.
    """
    if layer.experts is None:
        return None
    rows_E = torch.zeros(layer.experts[0], dtype=torch.int64, device=device)

    def count(part: nn.Module, given: tuple[Tensor, ...]) -> None:
        if part.training and not _RECOMPUTING.get():
            chosen_S = given[1].flatten()
            rows_E.scatter_add_(0, chosen_S, torch.ones_like(chosen_S))

    for _, part in mixtures(layer):
        part.register_forward_pre_hook(count)
    return rows_E


@contextmanager
def recomputing() -> Iterator[None]:
    """Mark forwards of this thread as recomputations, which `count_rows` does not count."""
    token = _RECOMPUTING.set(True)
    try:
        yield
    finally:
        _RECOMPUTING.reset(token)


def _dispatched(
    part: Any,
    experts: Callable[[Tensor, Tensor, Tensor], Tensor],
    group: Group,
    rows_RD: Tensor,
    index_RK: Tensor,
    weights_RK: Tensor,
) -> Tensor:
    """Return the weighted sums [R, D] of the results of each row's K experts, on any rank.

    Every rank takes part in each exchange, also in the backward, with rows or without. The order of
    all sums depends on the layout and the routing alone, on a CPU with one thread (`index_put`).

    Args:
        part: the library's mixture, with local experts.
        experts: its own forward.
        index_RK: of all experts of the group.
    """
    rows, count = len(rows_RD), part.num_experts
    sizes = [rows // 2, rows - rows // 2] if group.overlap else [rows]
    tables = counts(index_RK.split(sizes), count, group)
    given = (rows_RD.split(sizes), weights_RK.float().split(sizes), index_RK.int().split(sizes))
    streams = group.overlap and rows_RD.is_cuda
    # of an exchange in a stream of its own, that which waits for it is recorded
    sending = replace(group, exchanging=nullcontext) if streams else group
    arriving, returning = [], []
    deferral = Deferral(part) if group.overlap and torch.is_grad_enabled() else None
    for table, *parts in zip(tables, *given, strict=True):
        with _exchange_stream(group, rows_RD.device) as wait:
            arriving.append((wait, _dispatch(tuple(parts), table, count, sending)))
    while arriving:
        wait, (rows_PD, arrived) = arriving.pop(0)
        wait(rows_PD, arrived.expert_P, arrived.weight_P)
        weight_P = arrived.weight_P.to(weights_RK.dtype)
        with nullcontext() if deferral is None else deferral.active():
            made_PD = experts(rows_PD, arrived.expert_P[:, None].long(), weight_P[:, None])
        del rows_PD
        with _exchange_stream(group, rows_RD.device, made_PD) as wait:
            returning.append((wait, _combine(made_PD, arrived, sending)))
        del made_PD
    for wait, result in returning:
        wait(result)
    results = [result for _, result in returning]
    return (results[0] if len(results) == 1 else _Joined.apply(*results)).to(rows_RD.dtype)


@contextmanager
def _exchange_stream(
    group: Group, device: torch.device, *given: Tensor
) -> Iterator[Callable[..., None]]:
    """Run work in the stream of an overlapping group's exchanges, after all that is queued.

    The function that is yielded makes the current stream wait for it. The allocator must know of
    tensors that are used in another stream than they were allocated in: `given` are used in this
    one, the function's arguments in the one that waits.
    """
    if not group.overlap or device.type != "cuda":
        yield lambda *made: None
        return
    stream, done = _stream(device), torch.cuda.Event()
    stream.wait_stream(torch.cuda.current_stream(device))
    for tensor in given:
        tensor.record_stream(stream)

    def wait(*made: Tensor) -> None:
        computing = torch.cuda.current_stream(device)
        with group.exchanging():
            computing.wait_event(done)
        for tensor in made:
            tensor.record_stream(computing)

    with torch.cuda.stream(stream):
        yield wait
        done.record()


@cache
def _stream(device: torch.device) -> Any:
    return torch.cuda.Stream(device)


class _Joined(torch.autograd.Function):
    """Results of both halves [R, D], in the stream that computes.

    Where activations are recomputed, this happens when the backward first reads a saved tensor, in
    the stream of whoever reads it: here, and not in that of the exchanges.
    """

    @staticmethod
    def forward(ctx: Any, *parts: Tensor) -> Tensor:
        ctx.sizes = [len(part) for part in parts]
        ctx.save_for_backward(parts[0].new_empty(0))
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, gradient_RD: Tensor) -> tuple[Tensor, ...]:
        assert len(ctx.saved_tensors) == 1
        return gradient_RD.split(ctx.sizes)


class _Arrived(NamedTuple):
    """Pairs of an arrived row and an expert of its rank, P, sorted by expert; the rows' way back.

    At least one pair, with a row of zeros, so that the experts' weights stay in the graph on ranks
    without rows.
    """

    expert_P: Tensor
    weight_P: Tensor
    row_P: Tensor  # among those that arrived, without the row of zeros
    rows: int  # that arrived
    back: list[tuple[Hop, Tensor, int]]  # by hop, the rows that were sent, of how many


def _dispatch(
    parts: tuple[Tensor, ...], table: Counts, count: int, group: Group
) -> tuple[Tensor, _Arrived]:
    """Send rows, weights and indices of experts to the ranks of these; return rows [P, D] there."""
    chosen, back = parts[2].shape[1], []
    for hop in hops(table, count, group):
        at_RK = _among(parts[2], hop.first, hop.experts, len(hop.members))
        chosen_MR = _any(at_RK, len(hop.members)).T
        order = chosen_MR.flatten().byte().sort(descending=True, stable=True).indices
        row_S = order[: sum(hop.give)] % len(at_RK)
        back.append((hop, row_S, len(at_RK)))
        parts = _Dispatch.apply(*parts, row_S, hop, group)
    rows_TD, weights_TK, index_TK = parts
    pairs = int(table.pairs_RR[:, group.rank].sum())
    local = _among(index_TK, group.rank * count, 1, count).flatten().sort(stable=True)
    expert_P, pair_P = (part[:pairs].clone() for part in local)
    row_P = pair_P // chosen
    rows_PD, weight_P = rows_TD[row_P], weights_TK.flatten()[pair_P]
    if not pairs:
        rows_PD = torch.cat([rows_PD, rows_PD.new_zeros(1, rows_PD.shape[1])])
        weight_P, expert_P = (torch.cat([one, one.new_zeros(1)]) for one in (weight_P, expert_P))
    return rows_PD, _Arrived(expert_P, weight_P, row_P, len(rows_TD), back)


def _combine(made_PD: Tensor, arrived: _Arrived, group: Group) -> Tensor:
    """Return the sums of the results of each row that was dispatched, on its rank."""
    made_PD = made_PD[: len(arrived.row_P)]
    summed_TD = made_PD.new_zeros(arrived.rows, made_PD.shape[1])
    summed_TD = summed_TD.index_put_((arrived.row_P,), made_PD, accumulate=True)
    for hop, row_S, size in reversed(arrived.back):
        summed_TD = _Combine.apply(summed_TD, row_S, size, hop, group)
    return summed_TD


class Counts(NamedTuple):
    """Rows of all R ranks of an EP group, on the host; N are its nodes."""

    pairs_RR: Ints  # pairs of a row and an expert, from each rank (first axis) for each rank
    rows_RR: Ints  # rows with experts on each rank
    rows_RN: Ints  # rows with experts in each node


def counts(parts_RK: Sequence[Tensor], count: int, group: Group) -> list[Counts]:
    """Exchange the numbers of rows of all ranks of a group, for each part of a rank's rows.

    The host waits for its device here, once.
    """
    ranks, nodes = group.size, group.nodes
    own = []
    for index_RK in parts_RK:
        at_RK = index_RK // count
        pairs = torch.zeros(ranks, dtype=torch.int64, device=index_RK.device)
        pairs.scatter_add_(0, at_RK.flatten(), torch.ones_like(at_RK).flatten())
        by_node = at_RK // (ranks // nodes)
        own += [pairs, _any(at_RK, ranks).sum(0), _any(by_node, nodes).sum(0)]
    row = torch.cat(own)
    each = [len(row)] * ranks
    values = read(group.exchanged(row.repeat(ranks), each, each))
    table = np.array([int(value) for value in values]).reshape(ranks, len(parts_RK), -1)
    return [
        Counts(*np.split(table[:, number], [ranks, 2 * ranks], axis=1))
        for number in range(len(parts_RK))
    ]


class Hop(NamedTuple):
    """One of the exchanges that bring rows to the ranks of their experts.

    A row goes once to each of the `members` of the group with experts that it chose, there or in
    the node that the member forwards to: member m stands for a run of `experts` of them.
    """

    members: range  # their indices in the group
    first: int  # number of the first member's run
    experts: int
    give: list[int]  # rows to each rank of the group
    take: list[int]


def hops(table: Counts, count: int, group: Group) -> list[Hop]:
    """Return the hops of a rank's rows with `count` experts per rank.

    Between nodes rows go to the rank of the same local index, and from there to the ranks.
    """
    per_node = group.size // group.nodes
    node, local_rank = divmod(group.rank, per_node)
    found = []
    if group.nodes > 1:
        alike = range(local_rank, group.size, per_node)
        rows = table.rows_RN[group.rank], table.rows_RN[alike, node]
        found.append(_hop(group, alike, 0, count * per_node, *rows))
    if per_node > 1:
        local = range(node * per_node, (node + 1) * per_node)
        arrived = table.rows_RR.reshape(group.nodes, per_node, -1).sum(0)  # at each forwarder
        rows = arrived[local_rank, local], arrived[:, group.rank]
        found.append(_hop(group, local, local[0], count, *rows))
    return found


def _hop(group: Group, members: range, first: int, experts: int, give_M: Ints, take_M: Ints) -> Hop:
    rows_2R = np.zeros((2, group.size), dtype=np.int64)
    rows_2R[:, members] = give_M, take_M
    give, take = rows_2R.tolist()
    return Hop(members, first, experts, give, take)


def _among(index: Tensor, first: int, experts: int, members: int) -> Tensor:
    """Return the number of the run of each expert, counted from `first`; `members` for others."""
    at = index // experts - first
    return at.where((at >= 0) & (at < members), members)


def _any(at_RK: Tensor, members: int) -> Tensor:
    """Return [R, M] which members a row has experts at; others than these are left out."""
    chosen = torch.zeros(len(at_RK), members + 1, dtype=torch.bool, device=at_RK.device)
    return chosen.scatter_(1, at_RK.long(), True)[:, :members]


class _Dispatch(torch.autograd.Function):
    """Rows, weights and indices of experts to the members of a hop; gradients return in sums."""

    @staticmethod
    def forward(
        ctx: Any,
        rows_RD: Tensor,
        weights_RK: Tensor,
        index_RK: Tensor,
        row_S: Tensor,
        hop: Hop,
        group: Group,
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(row_S)
        ctx.size, ctx.hop, ctx.group = len(rows_RD), hop, group
        parts = _sent((rows_RD, weights_RK, index_RK), row_S, hop, group)
        ctx.mark_non_differentiable(parts[2])
        return parts

    @staticmethod
    def backward(ctx: Any, rows_TD: Tensor, weights_TK: Tensor, _: Any) -> tuple[Any, ...]:
        (row_S,) = ctx.saved_tensors
        sums = _returned((rows_TD, weights_TK), row_S, ctx.size, ctx.hop, ctx.group)
        return *sums, None, None, None, None


class _Combine(torch.autograd.Function):
    """Sums of the results that return for each row of a hop; gradients go out as the rows did."""

    @staticmethod
    def forward(
        ctx: Any, made_TD: Tensor, row_S: Tensor, size: int, hop: Hop, group: Group
    ) -> Tensor:
        ctx.save_for_backward(row_S)
        ctx.hop, ctx.group = hop, group
        return _returned((made_TD,), row_S, size, hop, group)[0]

    @staticmethod
    def backward(ctx: Any, gradient_RD: Tensor) -> tuple[Any, ...]:
        (row_S,) = ctx.saved_tensors
        return _sent((gradient_RD,), row_S, ctx.hop, ctx.group)[0], None, None, None, None


def _sent(parts: tuple[Tensor, ...], row_S: Tensor, hop: Hop, group: Group) -> tuple[Tensor, ...]:
    """Send rows [S] of each part in one message; return the parts of the received rows [T]."""
    return _unpacked(group.exchanged(_packed(parts)[row_S], hop.give, hop.take), parts)


def _returned(
    parts: tuple[Tensor, ...], row_S: Tensor, size: int, hop: Hop, group: Group
) -> tuple[Tensor, ...]:
    """Return received rows [T] of each part; return their sums for each of `size` rows."""
    received = _unpacked(group.exchanged(_packed(parts), hop.take, hop.give), parts)
    return tuple(
        part.new_zeros(size, part.shape[1]).index_put_((row_S,), part, accumulate=True)
        for part in received
    )


def _packed(parts: tuple[Tensor, ...]) -> Tensor:
    """Return the parts of each row one after the other, as bytes; one part as it is."""
    if len(parts) == 1:
        return parts[0]
    return torch.cat([part.contiguous().view(torch.uint8) for part in parts], 1)


def _unpacked(rows: Tensor, parts: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Return the parts of packed rows, with the widths and types of `parts`."""
    if len(parts) == 1:
        return (rows,)
    widths = [part.shape[1] * part.element_size() for part in parts]
    return tuple(
        each.view(part.dtype) for each, part in zip(rows.split(widths, 1), parts, strict=True)
    )
