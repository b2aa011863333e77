"""Emulated links: real messages, which count as arrived after the profile's transfer time.

Every message carries the time at which its device had finished; it arrives the link's time after
that, or when it has really arrived, whichever is later.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from disttrain_cli.data.slots import Slot
from disttrain_cli.models.layer import TensorSpec
from disttrain_cli.runtime.rehearsal.device import Device
from disttrain_cli.runtime.units.broker import Broker


@dataclass(kw_only=True)
class EmulatedBroker(Broker):
    """Broker whose links take `transfer_s()` seconds of the cluster per slot."""

    clock: Device
    transfer_s: Callable[[], float]
    full: Mapping[str, TensorSpec]  # the model's tensors by name, whose size the trace records

    def expect(self, slots: Sequence[Slot]) -> None:
        """Do nothing: receives are not posted ahead, as arrivals depend on the rows of a slot."""

    def send(self, slot: Slot, tensors: dict[str, Tensor]) -> tuple[int, int]:
        """Start sending; return (bytes of the model's own tensors, the peer's rank)."""
        _, peer = super().send(slot, tensors)
        stamp = torch.tensor([self.clock.free_s], dtype=torch.float64)
        for rank in self._peers(slot, self.sends):
            self.pending.append(([dist.isend(stamp, rank, tag=self.send_tag)], [stamp]))
        return self._full_bytes(slot, self.sends), peer

    def receive(self, slot: Slot) -> tuple[dict[str, Tensor], int, int]:
        """Wait for the rows and for their time of arrival."""
        called_s = time.monotonic()
        tensors, _, peer = super().receive(slot)
        stamps = [
            (rank, torch.empty(1, dtype=torch.float64)) for rank in self._peers(slot, self.receives)
        ]
        for work in [dist.irecv(stamp, rank, tag=self.receive_tag) for rank, stamp in stamps]:
            work.wait()
        if stamps:
            arrival_s = (
                max(float(stamp) for _, stamp in stamps) + self.transfer_s() * self.clock.time_scale
            )
            late_s = max(0.0, time.monotonic() - max(called_s, arrival_s))
            self.clock.arrive(arrival_s, late_s)
        return tensors, self._full_bytes(slot, self.receives), peer

    def _peers(self, slot: Slot, specs: Sequence[TensorSpec]) -> list[int]:
        """Return the ranks with which any row of these tensors is exchanged."""
        replicas = {route.replica for spec in specs for route in self._routes(slot, spec)}
        return [self.neighbour.rank(replica) for replica in sorted(replicas)]

    def _full_bytes(self, slot: Slot, specs: Sequence[TensorSpec]) -> int:
        values = sum(
            route.rows * int(np.prod(self.full[spec.name].shape))
            for spec in specs
            for route in self._routes(slot, spec)
        )
        return values * self.dtype.itemsize
