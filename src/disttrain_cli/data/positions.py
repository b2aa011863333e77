"""Positions of a sample's tokens for the LLM's rotary embeddings.

In one dimension a token's position is its index in the sample. M-RoPE (Wang et al. 2024, arXiv
2409.12191, section 2.1) has three: time, row and column. A text's tokens have three equal,
consecutive numbers; the tokens of an image or a video have their coordinates in its grid, all added
to the number after the previous tokens; the next tokens begin after the largest side of the grid.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from disttrain_cli.data.slots import Ints
from disttrain_cli.spec.inputs import Positions


def sample_positions(
    scheme: Positions, length: int, grids: Iterable[tuple[int, Ints, *tuple[int, ...]]] = ()
) -> Ints:
    """Return the positions of a sample of `length` tokens: [length], or [3, length] with M-RoPE.

    Args:
        grids: of each image or video in order, the index of its first token, its tokens' positions
            in its grid (`grid_positions`) and, where it is not the number after the largest row or
            column, the position of the next token in it.
    """
    counted = np.arange(length)
    if scheme == "1d":
        return counted
    positions = np.tile(counted, (3, 1))
    for place, inside, *following in grids:
        first, stop = int(positions[0, place]), place + inside.shape[1]
        positions[:, place:stop] = first + inside
        after = following[0] if following else 1 + int(inside[1:].max())
        positions[:, stop:] = first + after + np.arange(length - stop)
    return positions


def joined_in_time(
    grids: Iterable[tuple[int, Ints, int | None]],
) -> list[tuple[int, Ints, *tuple[int, ...]]]:
    """Join the parts of a video that follow each other without a text between them.

    Args:
        grids: index of the first token, positions in the grid and, of a later part of a video, its
            time after the first part.

    Returns:
        (index of the first token, positions) of each joined grid.
    """
    runs = list[tuple[int, Ints, *tuple[int, ...]]]()
    for place, inside, time in grids:
        later = inside if time is None else inside + np.array([[time], [0], [0]])
        if time is not None and runs and runs[-1][0] + runs[-1][1].shape[1] == place:
            runs[-1] = runs[-1][0], np.concatenate([runs[-1][1], later], axis=1)
        else:
            runs.append((place, later))
    return runs


def grid_positions(grid: tuple[int, int, int], every: float = 1.0) -> Ints:
    """Return [3, tokens]: time, row and column of the tokens of a grid of (frames, rows, columns).

    Args:
        every: time between two frames: of Qwen2.5-VL `tokens_per_second` times the seconds between
            them. Qwen3-VL has one frame in a grid, and texts between grids that state the time.
    """
    time, *place = np.indices(grid).reshape(3, -1)
    return np.stack([(time * every).astype(np.int64), *place])
