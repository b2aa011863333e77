"""Rotary embeddings of an image's tokens on three axes: number, row and column.

See Su et al. 2021, arXiv 2104.09864.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from disttrain_cli.models.host import constant

#: Base of the wavelengths.
THETA = 10_000.0

#: Positions on the three axes, of an image's conditioning and of its patch at (row, column):
#: "flux": 0 on all; (0, row, column). "lumina2": (its number, 0, 0); (number of conditioning
#: tokens, row, column). "qwen_image": its number, plus half of the longer side, on all; (0, row,
#: column) from the image's centre.
Numbering = Literal["flux", "lumina2", "qwen_image"]


def turns(
    context: int, grid: tuple[int, int], axes: tuple[int, ...], numbering: Numbering, like: Tensor
) -> tuple[Tensor, Tensor]:
    """Return cosines and sines of an image's tokens, preceded by its conditioning.

    Each is [context + patches, sum of axes] float32 on the device of `like`.

    Args:
        grid: rows and columns of patches.
        axes: values of a head that each axis rotates.
    """
    if like.is_meta:
        rows, columns = grid
        made = like.new_empty(context + rows * columns, sum(axes), dtype=torch.float32)
        return made, made
    cosines, sines = (
        constant(make, context, grid, axes, numbering, device=like.device)
        for make in (_cosines, _sines)
    )
    return cosines, sines


def _cosines(
    context: int, grid: tuple[int, int], axes: tuple[int, ...], numbering: Numbering
) -> Tensor:
    return _angles(context, grid, axes, numbering).cos().float().repeat_interleave(2, dim=1)


def _sines(
    context: int, grid: tuple[int, int], axes: tuple[int, ...], numbering: Numbering
) -> Tensor:
    return _angles(context, grid, axes, numbering).sin().float().repeat_interleave(2, dim=1)


def _angles(
    context: int, grid: tuple[int, int], axes: tuple[int, ...], numbering: Numbering
) -> Tensor:
    """Return angles [context + patches, sum of axes / 2], float64."""
    frequencies = [
        THETA ** -(torch.arange(0, axis, 2, dtype=torch.float64) / axis) for axis in axes
    ]
    return torch.cat(
        [
            torch.outer(at, own)
            for at, own in zip(_positions(context, grid, numbering), frequencies, strict=True)
        ],
        dim=1,
    )


def _positions(context: int, grid: tuple[int, int], numbering: Numbering) -> list[Tensor]:
    """Return the positions [context + patches] of all tokens on each axis, float64."""
    rows, columns = (torch.arange(side, dtype=torch.float64) for side in grid)
    numbers, none = torch.arange(context, dtype=torch.float64), torch.zeros(context).double()
    before, image = [none, none, none], 0
    if numbering == "lumina2":
        before, image = [numbers, none, none], context
    elif numbering == "qwen_image":
        before = [numbers + max(side // 2 for side in grid)] * 3
        rows, columns = (at - (len(at) - len(at) // 2) for at in (rows, columns))
    patches = (
        torch.full((len(rows) * len(columns),), image).double(),
        rows.repeat_interleave(len(columns)),
        columns.repeat(len(rows)),
    )
    return [torch.cat(pair) for pair in zip(before, patches, strict=True)]
