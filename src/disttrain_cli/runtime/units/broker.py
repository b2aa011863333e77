"""Broker of activations and gradients between neighbouring stages of any DP, CP and TP sizes.

It does not depend on the engine. Sends are asynchronous; their buffers stay allocated until they
have been sent, over NCCL those of two slots at most, as in the memory model. Receives are posted
ahead where that cannot block (gloo), so that the rows of a slot are transferred while the previous
slot is computed; `receive` returns when they have arrived. Each direction of a cut has a separate
communicator (`communicators`), and all messages of two ranks over it in a slot are one batch at
both ends: NCCL pairs messages by their order, and messages that are grouped at one end only are
undefined. Rows are sent in canonical item order (`routes`). Of a replica's rows each rank moves its
own part; tensors that its layers need in full are gathered on arrival, over its TP group and then
over its CP group.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from disttrain_cli.costs.memory import SENT_SLOTS
from disttrain_cli.data.slots import Slot
from disttrain_cli.models.group import Group, wire
from disttrain_cli.models.layer import TensorSpec
from disttrain_cli.models.parallel import gather
from disttrain_cli.runtime.units import communicators
from disttrain_cli.runtime.units.routes import End, Route, local_rows, routes
from disttrain_cli.spec.stage_graph import RankCoords, Stage

#: Slots whose rows are in transfer while another is computed.
AHEAD = 1


@dataclass
class _Arriving:
    """Posted receives of one slot."""

    works: list[dist.Work]
    tensors: dict[str, Tensor]  # this rank's rows
    scattered: list[tuple[Tensor, Route, Tensor]]  # buffers to be copied to runs of a tensor
    bytes: int
    peer: int


@dataclass
class Broker:
    """Transfers of one rank across the cut between its stage and `neighbour`."""

    coords: RankCoords
    neighbour: Stage
    # sent tensors, in a fixed order: activations to a later stage, or gradients to an earlier one
    sends: Sequence[TensorSpec]
    receives: Sequence[TensorSpec]  # received tensors
    dtype: torch.dtype
    device: torch.device
    group: Group | None = None  # the rank's TP group
    cp: Group | None = None  # and its CP group
    leaving: dist.ProcessGroup | None = None  # for sends; None = the world
    coming: dist.ProcessGroup | None = None  # for receives; None = the world
    # unfinished sends, the oldest first
    pending: deque[tuple[list[dist.Work], list[Tensor]]] = field(default_factory=deque)
    #: Routes until `drain`, by the slot's id; the reference to the slot keeps the id unique.
    known: dict[tuple[int, str, str], tuple[Slot, list[Route]]] = field(default_factory=dict)
    expected: deque[Slot] = field(default_factory=deque)  # slots whose receives are not posted yet
    arriving: dict[int, _Arriving] = field(default_factory=dict)  # by the slot's id

    def __post_init__(self) -> None:
        self.wire = wire(self.device)  # device of message buffers
        self.here, self.there = End.of(self.coords), End.at(self.neighbour)
        # gloo pairs by tag: two ranks with several stages have several cuts between them
        here, there = self.coords.stage.number, self.neighbour.number
        self.send_tag, self.receive_tag = here << 15 | there, there << 15 | here

    def expect(self, slots: Sequence[Slot]) -> None:
        """Post receives ahead for the slots of a step, in the order of the `receive` calls.

        NCCL's are not posted: the device's streams would wait for rows that have yet to be
        computed.
        """
        if self.receives and not communicators.in_order():
            self.expected = deque(slots)
            self._post_ahead()

    def post(self, slot: Slot) -> None:
        """Post the receives of a slot, in the order of the messages, where `expect` does not."""
        if communicators.in_order():
            self.arriving[id(slot)] = self._post(slot)

    def send(self, slot: Slot, tensors: dict[str, Tensor]) -> tuple[int, int]:
        """Start sending the rows of `sends`; return (bytes, the peer's rank).

        The rank is -1 for several peers or none.
        """
        self._let_go(SENT_SLOTS - 1)
        operations, buffers, peers = [], [], set()
        for spec in self.sends:
            tensor = tensors[spec.name].detach()
            if not spec.split:
                tensor = tensor[slice(*self.here.place.own_rows(len(tensor)))]
            for route in self._routes(slot, spec):
                buffer = _gather(tensor, route).to(self.wire)
                peer = self.neighbour.rank(route.replica, route.tp_rank, route.cp_rank)
                operations.append(dist.P2POp(dist.isend, buffer, peer, self.leaving, self.send_tag))
                buffers.append(buffer)
                peers.add(peer)
        if operations:
            self.pending.append((dist.batch_isend_irecv(operations), buffers))
        return sum(b.numel() * b.element_size() for b in buffers), _only(peers)

    def receive(self, slot: Slot) -> tuple[dict[str, Tensor], int, int]:
        """Wait for the rows of `receives`, posted before or now.

        Return (tensors, bytes received, the peer's rank); the tensors' rows are in this replica's
        order.
        """
        self._let_go(SENT_SLOTS)
        arriving = self.arriving.pop(id(slot), None) or self._post(slot)
        self._post_ahead()
        for work in arriving.works:
            work.wait()
        for tensor, route, buffer in arriving.scattered:
            _scatter(tensor, route, buffer)
        tensors = {
            spec.name: arriving.tensors[spec.name]
            if spec.split
            else self._whole(arriving.tensors[spec.name], self._rows(slot, spec))
            for spec in self.receives
        }
        return tensors, arriving.bytes, arriving.peer

    def drain(self) -> bool:
        """Wait until all sends have finished; return True if there were any."""
        waited = bool(self.pending)
        for works, _ in self.pending:
            for work in works:
                work.wait()
        self.pending.clear()
        self.known.clear()
        return waited

    def _let_go(self, most: int) -> None:
        """Free the buffers of finished sends and, over NCCL, of all but `most` slots; never block.

        An NCCL work reports without waiting whether the device has finished it, and holds on to its
        tensors, in place of `record_stream`, until `wait` (torch's ProcessGroupNCCL,
        `stashed_for_allocator_safety_`); once it has finished, waiting costs nothing, and the
        memory may be reused on any stream. The host may be slots ahead of its device, though,
        so that nothing has finished: then the device, not the host, waits for the oldest before it
        continues, and its memory is reused after that. Gloo's works are known to have finished
        only after `wait`, which would block the host: there buffers, which are in host memory,
        stay until `drain`.
        """
        while self.pending and (
            all(work.is_completed() for work in self.pending[0][0])
            or (len(self.pending) > most and communicators.in_order())
        ):
            for work in self.pending.popleft()[0]:
                work.wait()

    def _post_ahead(self) -> None:
        while self.expected and len(self.arriving) < AHEAD:
            slot = self.expected.popleft()
            self.arriving[id(slot)] = self._post(slot)

    def _post(self, slot: Slot) -> _Arriving:
        operations, scattered, peers = [], [], set()
        tensors: dict[str, Tensor] = {}
        for spec in self.receives:
            start, stop = self.here.place.own_rows(self._rows(slot, spec))
            rows = stop - start
            tensor = torch.empty((rows, *spec.shape), dtype=self.dtype, device=self.device)
            tensors[spec.name] = tensor
            covered = 0
            for route in self._routes(slot, spec):
                covered += route.rows
                peer = self.neighbour.rank(route.replica, route.tp_rank, route.cp_rank)
                if len(route.runs) == 1 and self.wire == self.device:
                    start, length = route.runs[0]
                    buffer = tensor[start : start + length]
                else:
                    buffer = torch.empty(
                        (route.rows, *spec.shape), dtype=self.dtype, device=self.wire
                    )
                    scattered.append((tensor, route, buffer))
                operations.append(
                    dist.P2POp(dist.irecv, buffer, peer, self.coming, self.receive_tag)
                )
                peers.add(peer)
            if covered < rows:  # rows that no rank on the other side works on carry no gradient
                tensor.zero_()
        size = sum(op.tensor.numel() * op.tensor.element_size() for op in operations)
        works = dist.batch_isend_irecv(operations) if operations else []
        return _Arriving(works, tensors, scattered, size, _only(peers))

    def _whole(self, own: Tensor, rows: int) -> Tensor:
        """Gather all rows of the replica from the ranks' parts."""
        start, stop = self.here.place.of_group(rows)
        return gather(gather(own, stop - start, self.group), rows, self.cp)

    def _rows(self, slot: Slot, spec: TensorSpec) -> int:
        return local_rows(slot, spec.item, spec.rows, self.coords.unit.name, self.coords.replica)

    def _routes(self, slot: Slot, spec: TensorSpec) -> list[Route]:
        """Return the routes of a tensor's rows, cached per slot for all tensors with such rows.

        Both directions have the same routes.
        """
        key = (id(slot), spec.item, spec.rows)
        if key not in self.known:
            self.known[key] = slot, routes(slot, spec.item, spec.rows, self.here, self.there)
        return self.known[key][1]


class Brokers:
    """Brokers of a stage to several parallel stages on one side of it, used like one broker.

    The parallel stages are encoders or generators.
    """

    def __init__(self, brokers: Sequence[Broker]) -> None:
        self._brokers = brokers

    def expect(self, slots: Sequence[Slot]) -> None:
        """Post receives as `Broker.expect` does."""
        for broker in self._brokers:
            broker.expect(slots)

    def send(self, slot: Slot, tensors: dict[str, Tensor]) -> tuple[int, int]:
        """Start sending to each neighbour its tensors; return (bytes, the peer's rank, or -1)."""
        sent = [broker.send(slot, tensors) for broker in self._brokers]
        return sum(size for size, _ in sent), _only({peer for size, peer in sent if size})

    def receive(self, slot: Slot) -> tuple[dict[str, Tensor], int, int]:
        """Wait for the rows of all; return (tensors, bytes received, the peer's rank).

        The tensors' rows are in this replica's order. Tensors that several neighbours send under
        one name are gradients of the same tensor, which are added.
        """
        received = [broker.receive(slot) for broker in self._brokers]
        tensors: dict[str, Tensor] = {}
        for name, tensor in (item for arrived, _, _ in received for item in arrived.items()):
            tensors[name] = tensors[name] + tensor if name in tensors else tensor
        return (
            tensors,
            sum(size for _, size, _ in received),
            _only({peer for _, size, peer in received if size}),
        )

    def drain(self) -> bool:
        """Wait until all sends have finished; return True if there were any."""
        waited = [broker.drain() for broker in self._brokers]
        return any(waited)


def together(brokers: Sequence[Broker]) -> Broker | Brokers | None:
    """Return the brokers of one side of a stage as the engine takes them."""
    return None if not brokers else brokers[0] if len(brokers) == 1 else Brokers(brokers)


def _gather(tensor: Tensor, route: Route) -> Tensor:
    """Return the rows of a route as one contiguous buffer."""
    pieces = [tensor[start : start + length] for start, length in route.runs]
    return (pieces[0] if len(pieces) == 1 else torch.cat(pieces)).contiguous()


def _scatter(tensor: Tensor, route: Route, buffer: Tensor) -> None:
    """Copy the rows of a route into their runs of the tensor."""
    taken = 0
    for start, length in route.runs:
        tensor[start : start + length] = buffer[taken : taken + length]
        taken += length


def _only(peers: set[int]) -> int:
    return next(iter(peers)) if len(peers) == 1 else -1
