"""The broker: moves activations and gradients between neighbouring stages, whatever their DP, CP
and TP sizes.

It knows nothing of the engine. Sends are asynchronous; their buffers are kept until they have left,
over NCCL those of two slots at most, as the memory model counts. Receives are posted ahead where
that cannot block (gloo), so that the rows of a slot travel while the slot before is computed;
`receive` returns when they have arrived. Each direction of a cut has a communicator of its own
(`communicators`), and what two ranks exchange over it in a slot is one batch at both ends: NCCL
pairs messages by their order, and leaves undefined what is grouped at one end only. Rows travel in
canonical item order (`routes`). Of a replica's rows each rank moves its own part; tensors that its
layers need whole are gathered on arrival, over its TP group and then over its CP group.
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

#: Slots whose rows are on their way while another is computed.
AHEAD = 1


@dataclass
class _Arriving:
    """Receives of one slot that have been posted."""

    works: list[dist.Work]
    tensors: dict[str, Tensor]  # own rows
    scattered: list[tuple[Tensor, Route, Tensor]]  # buffers whose rows belong in several places
    bytes: int
    peer: int


@dataclass
class Broker:
    """Transfers of one rank across the cut between its stage and `neighbour`."""

    coords: RankCoords
    neighbour: Stage
    # what leaves here: activations downstream, or gradients upstream, in a fixed order
    sends: Sequence[TensorSpec]
    receives: Sequence[TensorSpec]  # what comes back
    dtype: torch.dtype
    device: torch.device
    group: Group | None = None  # the rank's TP group
    cp: Group | None = None  # and its CP group
    leaving: dist.ProcessGroup | None = None  # over which rows leave; None is the world
    coming: dist.ProcessGroup | None = None  # over which they come
    # sends, the oldest first
    pending: deque[tuple[list[dist.Work], list[Tensor]]] = field(default_factory=deque)
    #: Routes until `drain`, by the slot's id, with the slot, so that no other one gets its id
    #: meanwhile.
    known: dict[tuple[int, str, str], tuple[Slot, list[Route]]] = field(default_factory=dict)
    expected: deque[Slot] = field(default_factory=deque)  # slots whose receives are not posted yet
    arriving: dict[int, _Arriving] = field(default_factory=dict)  # by the slot's id

    def __post_init__(self) -> None:
        self.wire = wire(self.device)  # where messages lie
        self.here, self.there = End.of(self.coords), End.at(self.neighbour)

    def expect(self, slots: Sequence[Slot]) -> None:
        """Post receives ahead for the slots of a step, which will be asked for in this order.

        NCCL's are not posted: the device's streams would wait for rows that have yet to be
        computed.
        """
        if self.receives and not communicators.in_order():
            self.expected = deque(slots)
            self._post_ahead()

    def send(self, slot: Slot, tensors: dict[str, Tensor]) -> tuple[int, int]:
        """Start sending the rows of `sends`; returns (bytes, the peer's rank, or -1 for several or
        none)."""
        self._let_go(SENT_SLOTS - 1)
        operations, buffers, peers = [], [], set()
        for spec in self.sends:
            tensor = tensors[spec.name].detach()
            if not spec.split:
                tensor = tensor[slice(*self.here.place.own_rows(len(tensor)))]
            for route in self._routes(slot, spec):
                buffer = _gather(tensor, route).to(self.wire)
                peer = self.neighbour.rank(route.replica, route.tp_rank, route.cp_rank)
                operations.append(dist.P2POp(dist.isend, buffer, peer, self.leaving))
                buffers.append(buffer)
                peers.add(peer)
        if operations:
            self.pending.append((dist.batch_isend_irecv(operations), buffers))
        return sum(b.numel() * b.element_size() for b in buffers), _only(peers)

    def receive(self, slot: Slot) -> tuple[dict[str, Tensor], int, int]:
        """Wait for the rows of `receives`; returns (tensors in this replica's order, bytes
        received, peer)."""
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
        """Wait until everything sent has left; returns whether there was anything to wait for."""
        waited = bool(self.pending)
        for works, _ in self.pending:
            for work in works:
                work.wait()
        self.pending.clear()
        self.known.clear()
        return waited

    def _let_go(self, most: int) -> None:
        """Drop the buffers of sends that have finished, and no host waits; of others keep those of
        `most` slots.

        An NCCL work says without waiting whether the device has done it, and holds on to its
        tensors, in place of `record_stream`, until it is waited for (torch's ProcessGroupNCCL,
        `stashed_for_allocator_safety_`); once it has finished, waiting costs nothing, and the
        memory may be used again on any stream. The host may be slots ahead of its device, though,
        so that nothing has finished: then the device, not the host, waits for the oldest before it
        goes on, and its memory is used again after that. Gloo's works learn that they have finished
        only by being waited for, which would block the host: there buffers, which lie on the host,
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
                operations.append(dist.P2POp(dist.irecv, buffer, peer, self.coming))
                peers.add(peer)
            if covered < rows:  # rows that nobody on the other side works on carry no gradient
                tensor.zero_()
        size = sum(op.tensor.numel() * op.tensor.element_size() for op in operations)
        works = dist.batch_isend_irecv(operations) if operations else []
        return _Arriving(works, tensors, scattered, size, _only(peers))

    def _whole(self, own: Tensor, rows: int) -> Tensor:
        """All rows of own ones."""
        start, stop = self.here.place.of_group(rows)
        return gather(gather(own, stop - start, self.group), rows, self.cp)

    def _rows(self, slot: Slot, spec: TensorSpec) -> int:
        return local_rows(slot, spec.item, spec.rows, self.coords.unit.name, self.coords.replica)

    def _routes(self, slot: Slot, spec: TensorSpec) -> list[Route]:
        """Routes of a tensor's rows; those of a slot serve all tensors with such rows, and the way
        back."""
        key = (id(slot), spec.item, spec.rows)
        if key not in self.known:
            self.known[key] = slot, routes(slot, spec.item, spec.rows, self.here, self.there)
        return self.known[key][1]


class Brokers:
    """The brokers of a stage to several stages on one side of it (encoders or generators side by
    side), as one."""

    def __init__(self, brokers: Sequence[Broker]) -> None:
        self._brokers = brokers

    def expect(self, slots: Sequence[Slot]) -> None:
        """As `Broker.expect`."""
        for broker in self._brokers:
            broker.expect(slots)

    def send(self, slot: Slot, tensors: dict[str, Tensor]) -> tuple[int, int]:
        """Start sending to each what it takes; returns (bytes, the peer's rank, or -1)."""
        sent = [broker.send(slot, tensors) for broker in self._brokers]
        return sum(size for size, _ in sent), _only({peer for size, peer in sent if size})

    def receive(self, slot: Slot) -> tuple[dict[str, Tensor], int, int]:
        """Wait for the rows of all; returns (tensors in this replica's order, bytes received,
        peer).

        What several send under one name are gradients of one tensor, which are added.
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
        """Wait until everything sent has left; returns whether there was anything to wait for."""
        waited = [broker.drain() for broker in self._brokers]
        return any(waited)


def together(brokers: Sequence[Broker]) -> Broker | Brokers | None:
    """The brokers of one side of a stage as the engine takes them."""
    return None if not brokers else brokers[0] if len(brokers) == 1 else Brokers(brokers)


def _gather(tensor: Tensor, route: Route) -> Tensor:
    """Rows of a route as one contiguous buffer."""
    pieces = [tensor[start : start + length] for start, length in route.runs]
    return (pieces[0] if len(pieces) == 1 else torch.cat(pieces)).contiguous()


def _scatter(tensor: Tensor, route: Route, buffer: Tensor) -> None:
    """Put the rows of a route back in their places."""
    taken = 0
    for start, length in route.runs:
        tensor[start : start + length] = buffer[taken : taken + length]
        taken += length


def _only(peers: set[int]) -> int:
    return next(iter(peers)) if len(peers) == 1 else -1
