"""Pruning of rows that cannot be part of any of the best layouts, by dominance.

A row is dominated by rows that are better in everything. A layout with such a row is preceded by as
many layouts as the row has dominators: substitute each of them. So the best `top` layouts,
including ties, are preserved when every row with `top` dominators is removed.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
#: Columns of equal length. A row dominates another if none of its first columns is higher and it
#: precedes it by the second: it is lower in the first of these columns in which the two differ.
Dearness = tuple[Sequence[NDArray[np.float64] | Ints], Sequence[Ints]]
BLOCK = 512  # rows compared with those before them at once
MOST = 256  # rows that others are compared with; of more, every second one


def undominated(worse: Sequence[Floats | Ints], simplicity: Sequence[Ints], top: int) -> Ints:
    """Return the indices of rows with fewer than `top` dominators.

    At most `MOST` rows are compared with, so that some dominated rows may remain.
    """
    order = np.lexsort(simplicity[::-1])
    rows, better = _rows(worse, simplicity)[:, order], np.zeros((len(worse) + len(simplicity), 0))
    kept = [order[:0]]
    for first in range(0, len(order), BLOCK):
        block = rows[:, first : first + BLOCK]
        count = _dominators(better, block, len(worse))
        inside = np.flatnonzero(count < top)
        block = block[:, inside]
        left = np.flatnonzero(count[inside] + _dominators(block, block, len(worse)) < top)
        kept.append(order[first + inside[left]])
        better = np.concatenate([better, block[:, left]], axis=1)
        better = better[:, ::2] if better.shape[1] > MOST else better
    return np.sort(np.concatenate(kept))


def few_dominators(rows: Dearness, others: Dearness, top: int) -> NDArray[np.bool_]:
    """Return a mask of rows with fewer than `top` dominators in `others`.

    At most `MOST` of those are compared with, so that some dominated rows may remain.
    """
    mine, better = _rows(*rows), _rows(*others)
    better = better[:, :: -(-better.shape[1] // MOST) or 1]
    blocks = range(0, mine.shape[1], BLOCK)
    return np.concatenate(
        [
            _dominators(better, mine[:, first : first + BLOCK], len(rows[0])) < top
            for first in blocks
        ]
    )


def _rows(worse: Sequence[Floats | Ints], simplicity: Sequence[Ints]) -> Floats:
    return np.stack([np.asarray(column, dtype=np.float64) for column in (*worse, *simplicity)])


def _dominators(better: Floats, rows: Floats, worse: int) -> Ints:
    """Return [B] how many columns of `better` [C, A] dominate each of `rows` [C, B].

    The first `worse` columns must not be higher; the rest rank simplicity.
    """
    before = np.zeros((better.shape[1], rows.shape[1]), dtype=bool)
    for low, high in zip(better[: worse - 1 : -1], rows[: worse - 1 : -1], strict=True):
        before = (low[:, None] < high) | ((low[:, None] == high) & before)
    for low, high in zip(better[:worse], rows[:worse], strict=True):
        before &= low[:, None] <= high
    return before.sum(axis=0)
