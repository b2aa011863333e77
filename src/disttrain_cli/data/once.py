"""A thread-safe cache in which the first thread that requests a key computes its value."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from typing import Generic, TypeVar

Value = TypeVar("Value")


class Once(Generic[Value]):
    """Cache of `compute` that keeps the `kept` most recently used values.

    Every value is computed once, by the first thread that requests it; a failure is not cached.
    Different keys are computed concurrently: a slow one does not block others.
    """

    def __init__(self, compute: Callable[[int], Value], kept: int) -> None:
        self._compute, self._kept = compute, kept
        self._lock = threading.Lock()
        self._values: OrderedDict[int, Future[Value]] = OrderedDict()

    def __call__(self, key: int) -> Value:
        with self._lock:
            known = self._values.get(key)
            value = self._values[key] = known or Future()
            self._values.move_to_end(key)
            while len(self._values) > self._kept:
                self._values.popitem(last=False)
        if known is None:
            self._fill(key, value)
        return value.result()

    def _fill(self, key: int, value: Future[Value]) -> None:
        try:
            value.set_result(self._compute(key))
        except BaseException as error:
            with self._lock:
                if self._values.get(key) is value:
                    del self._values[key]
            value.set_exception(error)
