"""Orders for many threads: one thread computes them, and a step that is known is answered at once."""

from __future__ import annotations

import threading
from concurrent.futures import Future, ThreadPoolExecutor

from disttrain_cli.data.index import Index
from disttrain_cli.data.ordering.orders import KEPT, Orders
from disttrain_cli.data.packing import Packing
from disttrain_cli.data.slots import Assignment, StepOrder
from disttrain_cli.spec.plan import Layout

StepWork = tuple[StepOrder, Packing]


class SharedOrders:
    """`Orders` that any thread may ask."""

    def __init__(self, orders: Orders) -> None:
        self._orders, self._lock = orders, threading.Lock()
        self._planner = ThreadPoolExecutor(1, "order")
        self._steps: dict[int, Future[StepWork]] = {}

    @property
    def layout(self) -> Layout:
        return self._orders.layout

    @property
    def index(self) -> Index:
        return self._orders.index

    def begin(self, step: int) -> Future[StepWork]:
        """Have a step computed; the steps begun last are remembered."""
        with self._lock:
            if step not in self._steps:
                self._steps[step] = self._planner.submit(self._orders.of, step)
                for old in list(self._steps)[: -KEPT - 1]:
                    del self._steps[old]
            return self._steps[step]

    def of(self, step: int) -> StepWork:
        """What every replica of every unit does in a step, and the global batch, in the order of the stream."""
        return self.begin(step).result()

    def assignment(self, step: int) -> Future[Assignment]:
        """What the policy decides for a step."""
        return self._planner.submit(self._orders.assignment, step)

    def close(self) -> None:
        """End the thread."""
        self._planner.shutdown(wait=True, cancel_futures=True)
