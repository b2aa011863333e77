"""Counts of a step's device work, operator by operator: kernels, messages, and storages."""

from __future__ import annotations

from collections import Counter
from typing import Any

from disttrain_cli.models import symmetric
from disttrain_cli.runtime.dryrun.refusing import refuse
from disttrain_cli.runtime.dryrun.storages import Storages, on_cuda, tensors_in

#: Operators that start no kernel, apart from views.
IDLE = {
    "empty",
    "empty_like",
    "empty_strided",
    "new_empty",
    "new_empty_strided",
    "_unsafe_view",
    "set_",
    "resize_",
    "detach",
    "lift_fresh",
    "_local_scalar_dense",
    "record_stream",
}


class Observer(Storages):
    """Counter of the operators that are dispatched while it is active."""

    def __init__(self) -> None:
        super().__init__()
        #: Kernels, host operators, sends, receives, collectives, and the bytes of the last three
        #: ("sends_bytes").
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        refuse(func, args, kwargs)
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if func.namespace == "c10d":
            self._count_message(func._schema.name.removeprefix("c10d::"), args)
        elif moved := symmetric.whole_bytes(func, args, result):
            self.counts["kernels"] += 1
            self.counts["collectives"] += 1
            self.counts["collectives_bytes"] += moved
        elif not func.is_view and func._opname not in IDLE:
            made = next(tensors_in(result), None)
            if made is not None:
                self.counts["kernels" if on_cuda(made) else "host_operators"] += 1
        return result

    def _count_message(self, name: str, args: Any) -> None:
        kind = {"send": "sends", "recv_": "receives"}.get(name, "collectives")
        sizes = [tensor.numel() * tensor.element_size() for tensor in tensors_in(args)]
        self.counts[kind] += 1
        # the output of a gather, the input of a scatter
        self.counts[f"{kind}_bytes"] += max(sizes, default=0)
