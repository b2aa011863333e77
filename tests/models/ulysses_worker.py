"""Ranks of the tests of exchanges, each of which has its share of tokens."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from disttrain_cli.models.attention import Segments, attend
from disttrain_cli.models.group import Group
from disttrain_cli.runtime.launching.process import joined

#: Together 29 rows: three ranks have eight, the last one five.
CP, LENGTHS, WIDTH = 4, [3, 14, 1, 11], 8
#: Heads of queries, of keys and values, and how many tokens a row sees.
CASES = {
    "as many heads": (8, 8, None),
    "as many ranks as keys": (8, 4, None),
    "more ranks than keys": (8, 2, None),
    "one key for all": (4, 1, 5),
    "window": (8, 4, 6),
}


def rows(heads: int, seed: int) -> Tensor:
    """The same numbers on every rank."""
    made = torch.randn(sum(LENGTHS), heads, WIDTH, generator=torch.Generator().manual_seed(seed))
    return made.requires_grad_()


def ranks(payload: dict[str, Any]) -> None:
    """Write, by name of a case, the largest difference from attention over all rows."""
    with joined("cpu", 60.0):
        group = Group(dist.group.WORLD, CP, int(os.environ["RANK"]))
        found = {name: difference(group, *case) for name, case in CASES.items()}
        Path(payload["out"], f"{group.rank}.json").write_text(json.dumps(found))


def difference(group: Group, query: int, key: int, window: int | None) -> float:
    """Of what attention makes of the own rows, and of their gradients."""
    whole = [rows(heads, seed) for seed, heads in enumerate((query, key, key))]
    within, shared = (Segments(LENGTHS, torch.device("cpu"), cp) for cp in (None, group))
    weight = rows(query, 9).detach()
    expected = attend(*whole, within, causal=True, window=window)
    gradients = torch.autograd.grad((expected * weight).sum(), whole)
    mine = group.local_rows(sum(LENGTHS))
    own = [tensor.detach()[mine].requires_grad_() for tensor in whole]
    made = attend(*own, shared, causal=True, window=window)
    found = torch.autograd.grad((made * weight[mine]).sum(), own)
    pairs = [(expected, made), *zip(gradients, found, strict=True)]
    return max(float((one[mine] - other).abs().max()) for one, other in pairs)
