"""Ranks of the tests of exchanges, each of which has its share of tokens."""

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from disttrain_cli.errors import SpecError
from disttrain_cli.models.attention import Rule, Segments, attend
from disttrain_cli.models.group import Group
from disttrain_cli.models.levelling import numbers_of, runs_of
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
#: The same with keys and values gathered: lengths, heads, window, whether it is causal.
GATHERED = {
    "gathered": ([3, 50, 1, 10], 8, 4, None, True),
    "gathered, one sample": ([96], 4, 1, None, True),
    "gathered, short samples": ([5, 3, 8, 2, 2, 4], 2, 2, None, True),
    "gathered, windows": ([3, 50, 1, 10], 8, 2, 6, True),
    "gathered, windows of one": ([24, 40], 2, 1, 1, True),
    "gathered, fewer heads than ranks": ([30, 34], 3, 1, 13, True),
    "gathered, not to be cut evenly": (LENGTHS, 8, 4, None, True),
    "gathered, images": (LENGTHS, 3, 3, None, False),
    "gathered, equal images": ([8, 8, 8], 4, 4, None, False),
    "gathered, ranks without rows": ([2, 3], 4, 4, None, False),
    "gathered, fewer rows than ranks": ([3], 4, 2, None, True),
}
#: Soft cap, sinks of every head, width of values, rule of the segments, rows per cut of a segment;
#: by heads and with keys and values gathered.
FEATURES: dict[str, tuple[float | None, bool, int, Rule, int | None]] = {
    "soft cap": (0.7, False, WIDTH, Rule(), None),
    "sinks": (None, True, WIDTH, Rule(), None),
    "values of another width": (None, False, 4, Rule(), None),
    "all but spans": (0.7, True, 12, Rule(True, 6), None),
    "chunks": (None, False, WIDTH, Rule(), 4),
    "spans": (None, True, WIDTH, Rule(True, 6, ((4, 9), (18, 27))), None),
}


def rows(heads: int, seed: int, count: int, width: int = WIDTH) -> Tensor:
    """The same numbers on every rank."""
    made = torch.randn(count, heads, width, generator=torch.Generator().manual_seed(seed))
    return made.requires_grad_()


def ranks(payload: dict[str, Any]) -> None:
    """Write, by name of a case, the largest difference from attention over all rows."""
    with joined("cpu", 60.0):
        group = Group(dist.group.WORLD, CP, int(os.environ["RANK"]))
        found = {name: difference(group, LENGTHS, *case) for name, case in CASES.items()}
        gathers = replace(group, gathers=True)
        for name, (lengths, *case) in GATHERED.items():
            found[name] = difference(gathers, lengths, *case)
        for name, feature in FEATURES.items():
            found[f"by heads, {name}"] = featured(group, LENGTHS, *feature)
            try:
                found[f"gathered, {name}"] = featured(gathers, [3, 50, 1, 10], *feature)
            except SpecError:
                found[f"gathered, {name}"] = -1.0
        Path(payload["out"], f"{group.rank}.json").write_text(json.dumps(found))


def featured(
    group: Group,
    lengths: list[int],
    softcap: float | None,
    sunk: bool,
    width: int,
    rule: Rule,
    chunk: int | None,
) -> float:
    """Of what attention makes of the own rows, and of their gradients; sinks' over all ranks."""
    count = sum(lengths)
    whole = [rows(8, 0, count), rows(4, 1, count), rows(4, 2, count, width)]
    sinks = rows(8, 3, 1)[0, :, 0].detach().requires_grad_() if sunk else None
    within, shared = (
        Segments(lengths, torch.device("cpu"), cp).under(rule, chunk) for cp in (None, group)
    )
    weight = rows(8, 9, count, width).detach()
    expected = attend(*whole, within, softcap=softcap, sinks_H=sinks)
    given = [*whole, sinks] if sinks is not None else whole
    gradients = list(torch.autograd.grad((expected * weight).sum(), given))
    mine = torch.from_numpy(numbers_of(runs_of(lengths, CP, group.gathers)[group.rank]))
    own = [tensor.detach()[mine].requires_grad_() for tensor in whole]
    made = attend(*own, shared, softcap=softcap, sinks_H=sinks)
    given = [*own, sinks] if sinks is not None else own
    found = list(torch.autograd.grad((made * weight[mine]).sum(), given))
    apart = [(expected[mine] - made).abs().max()]
    if sinks is not None:
        of_sinks = found.pop()
        dist.all_reduce(of_sinks)
        apart.append((of_sinks - gradients.pop()).abs().max() / 10.0)  # a sum over all rows
    apart += [(one[mine] - other).abs().max() for one, other in zip(gradients, found, strict=True)]
    return float(torch.stack(apart).max())


def difference(
    group: Group,
    lengths: list[int],
    query: int,
    key: int,
    window: int | None,
    causal: bool = True,
) -> float:
    """Of what attention makes of the own rows, and of their gradients."""
    whole = [rows(heads, seed, sum(lengths)) for seed, heads in enumerate((query, key, key))]
    within, shared = (Segments(lengths, torch.device("cpu"), cp) for cp in (None, group))
    weight = rows(query, 9, sum(lengths)).detach()
    expected = attend(*whole, within, causal=causal, window=window)
    gradients = torch.autograd.grad((expected * weight).sum(), whole)
    levelled = group.gathers and causal
    runs = runs_of(lengths, CP, levelled)[group.rank]
    mine = torch.from_numpy(numbers_of(runs))
    own = [tensor.detach()[mine].requires_grad_() for tensor in whole]
    made = attend(*own, shared, causal=causal, window=window)
    found = torch.autograd.grad((made * weight[mine]).sum(), own)
    pairs = [(expected, made), *zip(gradients, found, strict=True)]
    apart = [(one[mine] - other).abs().flatten() for one, other in pairs]
    return float(torch.cat([torch.zeros(1), *apart]).max())
