"""Positions of encoder rows among the tokens of the LLM."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Ints = NDArray[np.int64]
    Floats = NDArray[np.float32]

UNSEEN = -1  # position of a row that the LLM does not see


class Places(NamedTuple):
    """Token positions of R rows.

    One per row; or, as a token may be a weighted sum of several rows, the W positions to which each
    row contributes.
    """

    at: Ints  # [R], or [R, W]; `UNSEEN` for entries without a share
    shares: Floats | None = None  # [R, W] weights; None = each row is a token

    def moved(self, by: int) -> Places:
        """Return the positions shifted by `by` tokens."""
        import numpy as np

        return self._replace(at=np.where(self.at == UNSEEN, UNSEEN, self.at + by))

    @property
    def seen(self) -> Ints:
        """Tokens that these rows become, some of them several times."""
        return self.at[self.at != UNSEEN]


def together(places: Sequence[Places]) -> Places:
    """Concatenate the positions of consecutive rows, all of one form."""
    import numpy as np

    if not places:
        return Places(np.zeros(0, dtype=np.int64))
    shares = [one.shares for one in places if one.shares is not None]
    return Places(
        np.concatenate([one.at for one in places]), np.concatenate(shares) if shares else None
    )
