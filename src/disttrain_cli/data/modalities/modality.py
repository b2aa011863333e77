"""What a modality says of its items."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from numpy.typing import NDArray

from disttrain_cli.data.modalities.media import Media
from disttrain_cli.spec.heads import Grid, Head


class Modality(Protocol):
    """How items get from files to arrays; stateless, called by several threads."""

    media: Media  # the type of files that they come in

    def blank(self, head: Head, grid: Grid) -> NDArray[Any]:
        """What a module reads of an item that cannot be decoded; its shape and type are those of
        every item of this grid."""

    def decode(self, data: bytes, head: Head, grid: Grid, out: NDArray[Any]) -> None:
        """Write what a module reads of an item into `out`, once nothing can fail any more.

        Raises:
            ValueError: the bytes are not what the item was indexed as, and why.
        """

    def check(self, data: bytes, head: Head, grid: Grid) -> None:
        """The same for its errors alone."""

    def example(self, head: Head, grid: Grid) -> Callable[[], object] | None:
        """A call that takes about as long as preparing an item of this grid, to measure by where
        only sizes are known; None = nothing has to be decoded."""


class InParts(Modality, Protocol):
    """A modality some of whose heads cut files into parts (`Head.cuts`)."""

    def decode_parts(
        self,
        data: bytes,
        head: Head,
        grid: Grid,
        parts: int,
        outs: Sequence[tuple[int, NDArray[Any]]],
    ) -> None:
        """Write what a module reads of some of the `parts` of a file into `outs`, each beside the
        number of its part, once nothing can fail any more.

        Raises:
            ValueError: as `decode`.
        """
