"""Experts of a mixture: transformers' grouped products, countable on the meta device.

All experts are on every rank. On a GPU torch's grouped GEMM computes them in bf16; in other dtypes,
and on the CPU with older torch, transformers' loop over experts.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor


@cache
def prepare() -> None:
    """Make transformers' experts use `_grouped`."""
    from transformers.integrations import moe

    library: Any = moe._grouped_mm

    def grouped(rows_SD: Tensor, weight_EDF: Tensor, offs: Tensor) -> Tensor:
        """Return each row's product with its expert's weight [S, F]; rows are sorted by expert."""
        if rows_SD.is_meta:
            return _evenly(rows_SD, weight_EDF)
        if rows_SD.is_cuda and weight_EDF.dtype != torch.bfloat16:
            made: Tensor = torch.ops.transformers.grouped_mm_fallback(
                rows_SD.to(weight_EDF.dtype), weight_EDF, offs=offs
            )
            return made
        products: Tensor = library(rows_SD, weight_EDF, offs)
        return products

    moe._grouped_mm = grouped


def _evenly(rows_SD: Tensor, weight_EDF: Tensor) -> Tensor:
    """Return products as if experts had equal numbers of rows: work of the grouped GEMM."""
    experts, count = len(weight_EDF), len(rows_SD)
    each = -(-count // experts)
    padded = rows_SD.to(weight_EDF.dtype)
    if each * experts > count:
        padded = torch.cat([padded, padded.new_empty(each * experts - count, padded.shape[1])])
    return torch.bmm(padded.unflatten(0, (experts, each)), weight_EDF).flatten(0, 1)[:count]
