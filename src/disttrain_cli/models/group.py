"""TP, CP or EP group as seen by one of its ranks, and the messages between its ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from disttrain_cli.models.division import own_rows
from disttrain_cli.models.torch_versions import all_gather, reduce_scatter


@dataclass(frozen=True)
class Group:
    """TP, CP or EP group as seen by one of its ranks.

    Without `ranks` nothing is sent (meta device).
    """

    ranks: dist.ProcessGroup | None
    size: int
    rank: int  # rank in the group
    # messages overlap with GEMMs: in a TP group by chunks (`overlapped`), in an EP group by halves
    # of the rows (`experts`)
    overlap: bool = False
    symmetric: bool = False  # if possible through symmetric memory of its devices (`symmetric`)
    gathers: bool = False  # CP group: all-gathers keys and values for local queries (`gathered`)
    nodes: int = 1  # EP group: runs of equal length of its ranks, each in one node
    # context around every wait of its ranks for each other, except through symmetric memory
    exchanging: Callable[[], AbstractContextManager[None]] = nullcontext

    def local_rows(self, rows: int) -> slice:
        """Return this rank's rows."""
        return self.rows_of(rows, self.rank)

    def rows_of(self, rows: int, rank: int) -> slice:
        """Return another rank's rows; the rank is taken modulo the group's size."""
        return slice(*own_rows(rows, self.size, rank % self.size))

    def wire(self, tensor: Tensor) -> torch.device:
        """Return the device from which a tensor is sent."""
        return wire(tensor.device, self.ranks)

    def all_gather(self, whole: Tensor, local: Tensor) -> None:
        """Fill `whole` with the equal parts of all ranks."""
        if self.ranks is not None:
            with self.exchanging():
                all_gather(whole, local, self.ranks)

    def begin_all_gather(self, whole: Tensor, local: Tensor) -> Underway:
        """Begin to fill `whole` with the equal parts of all ranks."""
        if self.ranks is None:
            return Underway()
        work = all_gather(whole, local, self.ranks, begin=True)
        return Underway([work], (whole, local), exchanging=self.exchanging)

    def reduce_scatter(self, local: Tensor, partial: Tensor) -> None:
        """Fill `local` with this rank's part of the sum over all ranks."""
        if self.ranks is not None:
            with self.exchanging():
                reduce_scatter(local, partial, self.ranks)

    def all_to_all(self, taken: Tensor, given: Tensor) -> None:
        """Send every rank its equal part of `given`, and fill `taken` with their parts."""
        if self.ranks is not None:
            with self.exchanging():
                dist.all_to_all_single(taken, given, group=self.ranks)

    def exchanged(self, rows: Tensor, give: list[int], take: list[int]) -> Tensor:
        """Exchange rows all-to-all with these counts per rank; return the received rows."""
        sent = rows.to(self.wire(rows)).contiguous()
        taken = sent.new_empty(sum(take), *sent.shape[1:])
        if self.ranks is not None:
            with self.exchanging():
                dist.all_to_all_single(taken, sent, take, give, group=self.ranks)
        return taken.to(rows.device)

    def all_reduce(self, tensor: Tensor, op: Any) -> None:
        """Replace a tensor by its sum (or maximum) over the ranks."""
        if self.ranks is not None:
            with self.exchanging():
                dist.all_reduce(tensor, op=op, group=self.ranks)

    def pass_on(self, chunk: Tensor, into: Tensor) -> Underway:
        """Begin to send a chunk to the next rank and to fill `into` with that of the previous rank.

        The two messages are one NCCL group; empty chunks are not sent.
        """
        if self.ranks is None:
            return Underway()
        device = self.wire(chunk)
        sent, taken = chunk.to(device), into.to(device)
        after, before = (
            dist.get_global_rank(self.ranks, rank % self.size)
            for rank in (self.rank + 1, self.rank - 1)
        )
        messages = [
            dist.P2POp(begin, tensor, peer, self.ranks)
            for begin, tensor, peer in ((dist.isend, sent, after), (dist.irecv, taken, before))
            if tensor.numel()
        ]
        works = dist.batch_isend_irecv(messages) if messages else []
        arrived = None if taken is into else lambda: into.copy_(taken)
        return Underway(works, (sent, taken), arrived, self.exchanging)


class Underway:
    """Messages in flight while a device computes; their tensors must not change until then."""

    def __init__(
        self,
        works: Sequence[Any] = (),
        tensors: Sequence[Tensor] = (),
        arrived: Callable[[], object] | None = None,
        exchanging: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self._works, self._tensors, self._arrived = works, tensors, arrived
        self._exchanging = exchanging

    def wait(self) -> None:
        """Make subsequent computation wait for the messages; with NCCL the host does not block."""
        if self._works:
            with self._exchanging():
                for work in self._works:
                    work.wait()
        if self._arrived is not None:
            self._arrived()
        self._works, self._tensors, self._arrived = (), (), None


def wire(device: torch.device, ranks: dist.ProcessGroup | None = None) -> torch.device:
    """Return the device from which a device's tensors are sent: gloo reads host memory only."""
    if device.type == "meta":
        return device
    return torch.device("cpu") if dist.get_backend(ranks) == "gloo" else device


def all_gathered(local: Tensor, rows: int, group: Group) -> Tensor:
    """Return all rows from local ones, as a new tensor."""
    whole, sent = _to_gather(local, rows, group)
    group.all_gather(whole, sent)
    return whole[:rows].to(local.device)


def begin_all_gathered(local: Tensor, rows: int, group: Group) -> Callable[[], Tensor]:
    """Begin to gather all rows from local ones; the returned function waits for them."""
    whole, sent = _to_gather(local, rows, group)
    underway = group.begin_all_gather(whole, sent)

    def arrived() -> Tensor:
        underway.wait()
        return whole[:rows].to(local.device)

    return arrived


def reduce_scattered(partial: Tensor, group: Group) -> Tensor:
    """Return the local rows of the sum over the group, as a new tensor."""
    rows, wire = len(partial), group.wire(partial)
    local = partial.new_empty(-(-rows // group.size), *partial.shape[1:], device=wire)
    group.reduce_scatter(local, padded(partial, len(local) * group.size).to(wire))
    mine = group.local_rows(rows)
    return local[: mine.stop - mine.start].to(partial.device)


def _to_gather(local: Tensor, rows: int, group: Group) -> tuple[Tensor, Tensor]:
    most, wire = -(-rows // group.size), group.wire(local)
    whole = local.new_empty(group.size * most, *local.shape[1:], device=wire)
    return whole, padded(local, most).to(wire)


def padded(tensor: Tensor, rows: int) -> Tensor:
    """Return the tensor padded with zeros to `rows` rows."""
    if len(tensor) == rows:
        return tensor.contiguous()
    return torch.cat([tensor, tensor.new_zeros(rows - len(tensor), *tensor.shape[1:])])
