"""Data access of a training rank: the order of a step, and the prepared inputs of a slot.

A *source* prepares one slot: in this process (`preparing.Preparer`), or on other machines
(`serving.client.Workers`). The loader keeps the next `preprocess.prefetch_slots` slots in
preparation with either source.

Threads alternate at Python's global lock, for milliseconds at a time: preparation of the next slots
must not begin while a rank still converts this one into tensors. So `fetch` and `prefetch` are two
calls, and training makes the second afterwards.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Protocol

from disttrain_cli.data.checking import Broken, allowed_broken, check_broken
from disttrain_cli.data.ordering.orders import Orders
from disttrain_cli.data.ordering.shared_orders import SharedOrders
from disttrain_cli.data.packing import Packing
from disttrain_cli.data.preparing import Prepared, Preparer, Request
from disttrain_cli.data.slots import SlotBatch, StepOrder
from disttrain_cli.data.sources import Skipped
from disttrain_cli.spec.runfile import Run


class Source(Protocol):
    """Source of prepared inputs, local or remote; called by several threads at a time."""

    def prepare(self, request: Request) -> Prepared:
        """Prepare the inputs of one replica for one slot: the same bytes from every source."""
        ...

    def close(self) -> None:
        """Abandon pending requests."""
        ...


class Loader:
    """Inputs of one replica of one unit, slot by slot; use as a context manager.

    `fields` are those of `data.preparing.Request`. A sample with an image or clip that cannot be
    decoded is left out of the losses: it has no labels, and its images to generate have weight 0.
    All such files are listed in `skipped`, once each. Without `source`, this process prepares the
    data.
    """

    def __init__(
        self,
        run: Run,
        orders: Orders,
        *,
        unit: str,
        replica: int,
        fields: frozenset[str] | set[str],
        first_step: int = 0,
        source: Source | None = None,
    ) -> None:
        self.skipped: list[Skipped] = []
        self._run = run.file
        self._unit, self._replica, self._fields = unit, replica, frozenset(fields)
        self._orders = SharedOrders(orders)
        self._source = source or Preparer(run, self._orders)
        self._slots: dict[int, Future[Prepared]] = {}
        self._broken: set[int] = set()
        self._allowed = allowed_broken(run.file, orders.index)
        self._fetching = ThreadPoolExecutor(run.file.preprocess.prefetch_slots + 1, "fetch")
        self.prefetch(first_step, 0)

    def __enter__(self) -> Loader:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._fetching.shutdown(wait=False, cancel_futures=True)
        self._source.close()
        self._orders.close()
        self._fetching.shutdown(wait=True)

    def order(self, step: int) -> StepOrder:
        """Return the work of every replica of every unit in a step."""
        return self._orders.of(step)[0]

    def batch(self, step: int) -> Packing:
        """Return a step's global batch, in the order of the data."""
        return self._orders.of(step)[1]

    def fetch(self, step: int, slot: int) -> SlotBatch:
        """Return the inputs of this replica for one slot.

        Raises:
            DataError: a shard is gone or changed, or more images and clips are broken than
                `data.max_bad_fraction` allows.
            DisttrainError: any other error of the source.
        """
        at = self._number(step, slot)
        self._begin(at)
        prepared = self._slots.pop(at).result()
        self._note(prepared.broken)
        return prepared.batch

    def prefetch(self, step: int, slot: int) -> None:
        """Start preparing this slot, those after it and the next step's order.

        The work is done in the background.
        """
        at = self._number(step, slot)
        self._slots = {number: kept for number, kept in self._slots.items() if number >= at}
        for number in range(at, at + self._run.preprocess.prefetch_slots):
            self._begin(number)
        self._orders.begin(step + 1)

    def _number(self, step: int, slot: int) -> int:
        return step * self._orders.layout.microbatches + slot

    def _begin(self, number: int) -> None:
        if number not in self._slots:
            step, slot = divmod(number, self._orders.layout.microbatches)
            request = Request(step, slot, self._unit, self._replica, self._fields)
            self._slots[number] = self._fetching.submit(self._source.prepare, request)

    def _note(self, broken: list[Broken]) -> None:
        for segment, what in broken:
            if segment not in self._broken:
                self._broken.add(segment)
                self.skipped.append(what)
        check_broken(self._run, self.skipped, self._allowed)
