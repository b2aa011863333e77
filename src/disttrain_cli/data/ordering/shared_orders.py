"""Orders computed in the background, one thread per step, so that slow ones do not block others."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

from disttrain_cli.data.ordering.orders import Orders, StepWork
from disttrain_cli.data.slots import Assignment
from disttrain_cli.spec.plan import Layout

if TYPE_CHECKING:
    from disttrain_cli.data.index.sample_index import Index

# threads, started when needed: as many as pending requests, of which gRPC holds fewer
AT_ONCE = 1024


class SharedOrders:
    """`Orders` that can be computed ahead; thread-safe."""

    def __init__(self, orders: Orders) -> None:
        self._orders = orders
        self._begun = -1  # the step that was started last
        self._threads = ThreadPoolExecutor(AT_ONCE, "order")

    @property
    def layout(self) -> Layout:
        return self._orders.layout

    @property
    def index(self) -> Index:
        return self._orders.index

    def begin(self, step: int) -> None:
        """Start to compute a step in the background."""
        if step != self._begun:
            self._begun = step
            self._threads.submit(self._orders.of, step)

    def of(self, step: int) -> StepWork:
        """Return the work of every replica in a step, and the global batch in stream order."""
        return self._orders.of(step)

    def assignment(self, step: int) -> Future[Assignment]:
        """Return the policy's assignment of a step."""
        return self._threads.submit(self._orders.assignment, step)

    def close(self) -> None:
        """End the threads."""
        self._threads.shutdown(wait=True, cancel_futures=True)
