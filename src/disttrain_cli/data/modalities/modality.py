"""Interface of a modality's items."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from numpy.typing import NDArray

from disttrain_cli.data.modalities.media import Media
from disttrain_cli.spec.heads import Grid, Head, Numbers
from disttrain_cli.spec.library_images import Packed


class Modality(Protocol):
    """Conversion of items from files to arrays; stateless, called by several threads."""

    media: Media  # the type of their files

    def blank(self, head: Head, grid: Grid) -> NDArray[Any]:
        """Return a module's input for an item that cannot be decoded.

        Its shape and type are those of every item of this grid.
        """

    def decode(self, data: bytes, head: Head, grid: Grid, out: NDArray[Any]) -> None:
        """Write a module's input for an item to `out`, once nothing can fail any more.

        Raises:
            ValueError: the bytes are not as the item was indexed; the message has the reason.
        """

    def check(self, data: bytes, head: Head, grid: Grid) -> None:
        """Decode an item only to raise its errors."""

    def example(self, head: Head, grid: Grid) -> Callable[[], object] | None:
        """Return a call that takes about as long as preparing an item of this grid.

        It is measured if only sizes are known; None = nothing has to be decoded.
        """


class InParts(Modality, Protocol):
    """A modality whose specification may cut files into parts (`Head.cuts`)."""

    def decode_parts(
        self,
        data: bytes,
        head: Head,
        grid: Grid,
        parts: int,
        outs: Sequence[tuple[int, NDArray[Any]]],
    ) -> None:
        """Write a module's input for some of the `parts` of a file to `outs`.

        `outs` has pairs of a part's number and its array; arrays are written once nothing can fail
        any more.

        Raises:
            ValueError: as `decode`.
        """


class Packing(Modality, Protocol):
    """A modality whose specification may pack items (`Head.packed`)."""

    def pack(self, data: bytes, head: Head) -> Packed:
        """Return a module's input for an item.

        Raises:
            ValueError: as `decode`.
        """

    def blank_packed(self, head: Head, numbers: Numbers) -> Packed:
        """Return a module's input for an item of this size that cannot be decoded."""
