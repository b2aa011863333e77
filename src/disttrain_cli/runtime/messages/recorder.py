"""Recorder of a running rank's sends, receives and collectives, over any backend."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.utils._python_dispatch import TorchDispatchMode

from disttrain_cli.models import symmetric
from disttrain_cli.runtime.messages.records import RECEIVE, SEND, Operation, Record

#: Dispatched names of point-to-point messages.
MESSAGES = {"send": SEND, "recv_": RECEIVE}
#: All-to-all, and the positions of its arguments with the rows from and for each rank: empty
#: where all parts are equal.
EXCHANGE, TAKES, GIVES = "alltoall_base_", 3, 4
#: Dispatched names of collectives with a root, and the position of that argument.
ROOTED = {"broadcast_": 2, "reduce_": 3, "scatter_": 3, "gather_": 3}


class Recorder(TorchDispatchMode):
    """Recorder of every torch.distributed operation that this rank starts, DeepSpeed's too.

    They run unchanged, except messages over torch's fake backend, which would do nothing: these
    complete at once, so that their buffers are freed.
    """

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.record = Record(rank)
        self._number = 0  # number of the batch
        self._together = False
        self._names: dict[Any, str] = {}

    def __enter__(self) -> Recorder:
        self._stock, dist.batch_isend_irecv = dist.batch_isend_irecv, self._batch
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        dist.batch_isend_irecv = self._stock

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function.namespace == "c10d":
            self._note(function._schema.name.removeprefix("c10d::"), args)
        elif function._schema.name in (symmetric.GATHER, symmetric.SCATTER):
            # it blocks this rank until it ends: a collective like others
            self._note(
                function._opname, (args[0], distributed_c10d._resolve_process_group(args[2]))
            )
        return function(*args, **(kwargs or {}))

    def _batch(self, operations: list[dist.P2POp]) -> list[dist.Work]:
        self._number += 1
        if dist.get_backend(operations[0].group) == "fake":
            for one in operations:
                kind = SEND if one.op is dist.isend else RECEIVE
                self._add(kind, one.group, one.tensor, one.peer)
            return []
        self._together = True
        try:
            return self._stock(operations)
        finally:
            self._together = False

    def _note(self, name: str, args: Sequence[Any]) -> None:
        group = next((one for value in args if (one := _group(value)) is not None), None)
        if group is None:
            return
        tensor = next((one for value in args if (one := _tensor(value)) is not None), None)
        peer = args[2] if name in MESSAGES else args[ROOTED[name]] if name in ROOTED else -1
        self._number += not self._together
        self._add(
            MESSAGES.get(name, name.strip("_")),
            group,
            None if name == "barrier" else tensor,
            self._known(group)[peer] if peer >= 0 else -1,
            *(tuple(args[place]) if name == EXCHANGE else () for place in (GIVES, TAKES)),
        )

    def _add(
        self,
        kind: str,
        group: dist.ProcessGroup,
        tensor: Tensor | None,
        peer: int,
        gives: tuple[int, ...] = (),
        takes: tuple[int, ...] = (),
    ) -> None:
        self._known(group)
        shape = () if tensor is None else tuple(tensor.shape)
        dtype = "" if tensor is None else str(tensor.dtype).removeprefix("torch.")
        self.record.operations.append(
            Operation(kind, self._names[group], shape, dtype, peer, self._number, gives, takes)
        )

    def _known(self, group: dist.ProcessGroup) -> tuple[int, ...]:
        """Return the ranks of a group, and name it at first use."""
        if group not in self._names:
            described = (
                group.group_desc
                if group.group_desc not in ("", "undefined", "default_pg")
                else "world"
            )
            self._names[group] = f"{described} ({group.group_name})"
            self.record.members[self._names[group]] = tuple(dist.get_process_group_ranks(group))
        return self.record.members[self._names[group]]


def _group(value: Any) -> dist.ProcessGroup | None:
    if isinstance(value, dist.ProcessGroup):
        return value
    if isinstance(value, torch.ScriptObject) and "ProcessGroup" in str(value._type()):
        return dist.ProcessGroup.unbox(value)
    return None


def _tensor(value: Any) -> Tensor | None:
    while isinstance(value, (list, tuple)) and value:
        value = value[0]
    return value if isinstance(value, Tensor) else None
