"""Records of one rank's sends, receives and collectives, in the order in which they start."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

SEND, RECEIVE = "send", "receive"


@dataclass(frozen=True)
class Operation:
    """Message or collective, as one rank starts it."""

    kind: str  # SEND, RECEIVE, or the collective's name
    communicator: str
    shape: tuple[int, ...]
    dtype: str
    peer: int = -1  # the other rank of a message; the root of a collective, if any
    batch: int = 0  # operations with equal numbers start together
    # rows for and from each rank of the group, in an all-to-all of unequal parts
    gives: tuple[int, ...] = ()
    takes: tuple[int, ...] = ()

    @property
    def is_message(self) -> bool:
        return self.kind in (SEND, RECEIVE)

    def __str__(self) -> str:
        whom = {SEND: f" to rank {self.peer}", RECEIVE: f" from rank {self.peer}"}.get(
            self.kind, ""
        )
        return f"{self.kind} of {self.dtype} {list(self.shape)}{whom}"


@dataclass
class Record:
    """One rank's operations."""

    rank: int
    # ranks by communicator in use
    members: dict[str, tuple[int, ...]] = field(default_factory=dict)
    operations: list[Operation] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """Return the record as plain JSON."""
        return asdict(self)

    @classmethod
    def of_json(cls, known: Mapping[str, Any]) -> Record:
        """Return a record from the result of `to_json`, after it was written and read."""
        return cls(
            known["rank"],
            {name: tuple(ranks) for name, ranks in known["members"].items()},
            [_operation(one) for one in known["operations"]],
        )


def _operation(known: Mapping[str, Any]) -> Operation:
    fields: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in known.items()
    }
    return Operation(**fields)
