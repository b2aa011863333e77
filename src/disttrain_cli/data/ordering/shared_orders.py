"""Orders found in the background, each step on a thread of its own: a long one keeps no other
waiting."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor

from disttrain_cli.data.index import Index
from disttrain_cli.data.ordering.orders import Orders, StepWork
from disttrain_cli.data.slots import Assignment
from disttrain_cli.spec.plan import Layout

# threads, made when needed: as many as requests under way, of which gRPC holds fewer
AT_ONCE = 1024


class SharedOrders:
    """`Orders` that are begun before they are needed; any thread may ask."""

    def __init__(self, orders: Orders) -> None:
        self._orders = orders
        self._begun = -1  # the step that was begun last
        self._threads = ThreadPoolExecutor(AT_ONCE, "order")

    @property
    def layout(self) -> Layout:
        return self._orders.layout

    @property
    def index(self) -> Index:
        return self._orders.index

    def begin(self, step: int) -> None:
        """Have a step computed."""
        if step != self._begun:
            self._begun = step
            self._threads.submit(self._orders.of, step)

    def of(self, step: int) -> StepWork:
        """What every replica of every unit does in a step, and the global batch, in the order of
        the stream."""
        return self._orders.of(step)

    def assignment(self, step: int) -> Future[Assignment]:
        """What the policy decides for a step."""
        return self._threads.submit(self._orders.assignment, step)

    def close(self) -> None:
        """End the threads."""
        self._threads.shutdown(wait=True, cancel_futures=True)
