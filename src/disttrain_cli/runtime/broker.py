"""The broker: moves activations and gradients between neighbouring stages, whatever their DP sizes.

It knows nothing of the engine. Sends are asynchronous (their buffers are kept until they have left); receives
return when the rows have arrived. Rows travel in canonical item order (`routes`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from disttrain_cli.data.slots import Slot
from disttrain_cli.models.layer import TensorSpec
from disttrain_cli.runtime.routes import Route, local_rows, routes
from disttrain_cli.runtime.topology import Place, Stage


@dataclass
class Broker:
    """Transfers of one rank across the cut between its stage and `neighbour`."""

    place: Place
    neighbour: Stage
    specs: Sequence[TensorSpec]  # tensors live at the cut, in a fixed order
    dtype: torch.dtype
    device: torch.device
    pending: list[tuple[list[dist.Work], list[Tensor]]] = field(default_factory=list)
    known: dict[tuple[int, str, str], list[Route]] = field(default_factory=dict)  # routes of this step

    def send(self, slot: Slot, tensors: dict[str, Tensor]) -> tuple[int, int]:
        """Start sending the rows of every spec; returns (bytes, the peer's rank, or -1 for several or none)."""
        operations, buffers, peers = [], [], set()
        for spec in self.specs:
            for route in self._routes(slot, spec):
                buffer = _gather(tensors[spec.name].detach(), route)
                peer = self.neighbour.ranks[route.replica]
                operations.append(dist.P2POp(dist.isend, buffer, peer))
                buffers.append(buffer)
                peers.add(peer)
        if operations:
            self.pending.append((dist.batch_isend_irecv(operations), buffers))
        return sum(b.numel() * b.element_size() for b in buffers), _only(peers)

    def receive(self, slot: Slot) -> tuple[dict[str, Tensor], int, int]:
        """Wait for the rows of every spec; returns (tensors [R, *shape] in this replica's order, bytes, peer)."""
        operations, scattered, peers = [], [], set()
        tensors: dict[str, Tensor] = {}
        for spec in self.specs:
            rows = local_rows(slot, spec.item, spec.rows, self.place.unit.name, self.place.replica)
            tensor = torch.empty((rows, *spec.shape), dtype=self.dtype, device=self.device)
            tensors[spec.name] = tensor
            covered = 0
            for route in self._routes(slot, spec):
                covered += route.rows
                peer = self.neighbour.ranks[route.replica]
                if len(route.runs) == 1:
                    start, length = route.runs[0]
                    buffer = tensor[start:start + length]
                else:
                    buffer = torch.empty((route.rows, *spec.shape), dtype=self.dtype, device=self.device)
                    scattered.append((tensor, route, buffer))
                operations.append(dist.P2POp(dist.irecv, buffer, peer))
                peers.add(peer)
            if covered < rows:  # rows that nobody on the other side works on carry no gradient
                tensor.zero_()
        for work in dist.batch_isend_irecv(operations) if operations else []:
            work.wait()
        for tensor, route, buffer in scattered:
            _scatter(tensor, route, buffer)
        return tensors, sum(op.tensor.numel() * op.tensor.element_size() for op in operations), _only(peers)

    def drain(self) -> bool:
        """Wait until everything sent has left; returns whether there was anything to wait for."""
        waited = bool(self.pending)
        for works, _ in self.pending:
            for work in works:
                work.wait()
        self.pending.clear()
        self.known.clear()
        return waited

    def _routes(self, slot: Slot, spec: TensorSpec) -> list[Route]:
        """Routes of a tensor's rows; those of a slot serve all tensors with such rows, and the way back."""
        key = (id(slot), spec.item, spec.rows)  # the engine holds the slots of a step until it drains
        if key not in self.known:
            self.known[key] = routes(slot, spec.item, spec.rows, (self.place.unit.name, self.place.replica),
                                     self.neighbour.unit.name)
        return self.known[key]


def _gather(tensor: Tensor, route: Route) -> Tensor:
    """Rows of a route as one contiguous buffer."""
    pieces = [tensor[start:start + length] for start, length in route.runs]
    return (pieces[0] if len(pieces) == 1 else torch.cat(pieces)).contiguous()


def _scatter(tensor: Tensor, route: Route, buffer: Tensor) -> None:
    """Put the rows of a route back in their places."""
    taken = 0
    for start, length in route.runs:
        tensor[start:start + length] = buffer[taken:taken + length]
        taken += length


def _only(peers: set[int]) -> int:
    return next(iter(peers)) if len(peers) == 1 else -1
