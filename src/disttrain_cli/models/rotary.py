"""Rotary embeddings of an image's tokens on three axes: number, row and column.

See Su et al. 2021, arXiv 2104.09864.
"""

from __future__ import annotations

import torch
from torch import Tensor

from disttrain_cli.models.host import constant

#: Base of the wavelengths.
THETA = 10_000.0


def turns(
    context: int, grid: tuple[int, int], axes: tuple[int, ...], counted: bool, like: Tensor
) -> tuple[Tensor, Tensor]:
    """Return cosines and sines of an image's tokens, preceded by its conditioning.

    Each is [context + patches, sum of axes] float32 on the device of `like`.

    Args:
        grid: rows and columns of patches.
        axes: values of a head that each axis rotates.
        counted: tokens of the conditioning are numbered on the first axis, and the image has the
            next number; else all have 0.
    """
    if like.is_meta:
        rows, columns = grid
        made = like.new_empty(context + rows * columns, sum(axes), dtype=torch.float32)
        return made, made
    cosines, sines = (
        constant(make, context, grid, axes, counted, device=like.device)
        for make in (_cosines, _sines)
    )
    return cosines, sines


def _cosines(context: int, grid: tuple[int, int], axes: tuple[int, ...], counted: bool) -> Tensor:
    return _angles(context, grid, axes, counted).cos().float().repeat_interleave(2, dim=1)


def _sines(context: int, grid: tuple[int, int], axes: tuple[int, ...], counted: bool) -> Tensor:
    return _angles(context, grid, axes, counted).sin().float().repeat_interleave(2, dim=1)


def _angles(context: int, grid: tuple[int, int], axes: tuple[int, ...], counted: bool) -> Tensor:
    """Return angles [context + patches, sum of axes / 2], float64."""
    rows, columns = (torch.arange(side, dtype=torch.float64) for side in grid)
    before = torch.zeros(context, dtype=torch.float64)
    patches = len(rows) * len(columns)
    numbers = torch.arange(context + 1, dtype=torch.float64) * counted
    places = (
        torch.cat([numbers[:context], numbers[context:].expand(patches)]),
        torch.cat([before, rows.repeat_interleave(len(columns))]),
        torch.cat([before, columns.repeat(len(rows))]),
    )
    frequencies = [
        THETA ** -(torch.arange(0, axis, 2, dtype=torch.float64) / axis) for axis in axes
    ]
    return torch.cat(
        [torch.outer(at, own) for at, own in zip(places, frequencies, strict=True)], dim=1
    )
