"""Where rows that an encoder left go among the tokens of the LLM."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Ints = NDArray[np.int64]
    Floats = NDArray[np.float32]

UNSEEN = -1  # the place of a row that the LLM does not see


class Places(NamedTuple):
    """The places of R rows: one each; or of each row the W places in which it has shares, as a
    token may be a sum of shares of several rows."""

    at: Ints  # [R], or [R, W]; `UNSEEN` in those without a share
    shares: Floats | None = None  # [R, W]; None = each row is a token

    def moved(self, by: int) -> Places:
        """The same behind so many other tokens."""
        import numpy as np

        return self._replace(at=np.where(self.at == UNSEEN, UNSEEN, self.at + by))

    @property
    def seen(self) -> Ints:
        """The tokens that these rows become, some of them several times."""
        return self.at[self.at != UNSEEN]


def together(places: Sequence[Places]) -> Places:
    """The places of rows one after the other, all alike."""
    import numpy as np

    if not places:
        return Places(np.zeros(0, dtype=np.int64))
    shares = [one.shares for one in places if one.shares is not None]
    return Places(
        np.concatenate([one.at for one in places]), np.concatenate(shares) if shares else None
    )
