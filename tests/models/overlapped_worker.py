"""The four ranks of the tests of overlapped linears: groups of two, three and four of them, one
after the other."""

import json
import os
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from disttrain_cli.models import symmetric
from disttrain_cli.models.division import colwise, rowwise
from disttrain_cli.models.group import Group
from disttrain_cli.models.layer import Batch, PipelineLayer
from disttrain_cli.models.overlapped import ColumnLinear, RowLinear
from disttrain_cli.models.parallel import across, sum_over
from disttrain_cli.models.tensor_parallel import join, shard
from disttrain_cli.models.weight_parts import WeightPart, add_weight_gradients, deferred, split
from disttrain_cli.runtime.launching.process import joined
from tests.models import parallel_worker
from tests.models.parallel_worker import found, layer_checks, random
from tests.models.shared_memory import shared_in

SIZES, WIDTH = (2, 3, 4), 24
ROWS = (1, 2, 5, 12, 13)
HOW = ("trained", "recomputed", "later", "frozen", "first", "evaluated")
EXACT, ROUNDED = 1e-6, 0.05


class Toy(PipelineLayer):
    """Three column-parallel linears that read the same rows, one of which is narrower, and a
    row-parallel one."""

    name, by_rows, row_by_row = "toy", True, True
    division = colwise("query", "key", "gate") | rowwise("down")

    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.query, self.gate = (nn.Linear(WIDTH, 48, bias) for _ in range(2))
        self.key = nn.Linear(WIDTH, 12, bias=False)
        self.down = nn.Linear(48, WIDTH, bias)

    def is_empty(self, state: dict[str, Tensor], batch: Batch) -> bool:
        return False

    def compute(self, state: dict[str, Tensor], batch: Batch) -> dict[str, Tensor]:
        def f(rows_RD: Tensor) -> Tensor:
            whole = rows_RD[None]
            query, key, gate = self.query(whole), self.key(whole), self.gate(whole)
            return self.down(query.sigmoid() * gate + key.repeat_interleave(4, -1))

        return {"hidden": across(f, state["hidden"], len(batch.cache["rows"]), self.group)}


def ranks(payload: dict[str, Any]) -> None:
    """Write, by name of a check, what differs ("" where nothing does)."""
    files = payload["symmetric"] and Path(payload["out"])
    with joined("cpu", 60.0), shared_in(files) if files else nullcontext():
        rank = int(os.environ["RANK"])
        groups = {size: dist.new_group(list(range(size))) for size in SIZES}
        for size, ranks in groups.items():
            if rank >= size:
                continue
            group = Group(ranks, size, rank, overlap=True, symmetric=payload["symmetric"])
            checks = toy_checks(group)
            for path in payload["runs"] if size in payload["layers"] else ():
                checks |= layer_checks(Path(path), group, ("", "recomputed", "later"), True)
            Path(payload["out"], f"{size}-{rank}.json").write_text(json.dumps(found(checks)))


def toy_checks(
    group: Group, device: torch.device = torch.device("cpu")
) -> dict[str, Callable[[], None]]:
    """Every way to run a layer, over numbers of rows that divide by the group and others."""
    return {
        f"{rows} rows, {how}, {'with' if bias else 'without'} bias, {dtype}": partial(
            _toy, group, device, rows, how, bias, dtype
        )
        for rows, how, bias, dtype in product(
            ROWS, HOW, (True, False), (torch.float32, torch.bfloat16)
        )
    }


def _toy(
    group: Group, device: torch.device, rows: int, how: str, bias: bool, dtype: torch.dtype
) -> None:
    torch.manual_seed(7)
    whole = Toy(bias).to(device, dtype).requires_grad_(how != "frozen")
    given = random(rows, WIDTH, seed=1).to(device, dtype)
    seed = random(rows, WIDTH, seed=2).to(device, dtype)
    mine = group.local_rows(rows)
    found = []
    for overlap in (False, True):
        own = Toy(bias).to(device, dtype).requires_grad_(how != "frozen")
        own.load_state_dict(whole.state_dict())
        shard(own, tp=group.size, rank=group.rank)
        join(own, replace(group, overlap=overlap))
        assert isinstance(own.query, ColumnLinear) == isinstance(own.down, RowLinear) == overlap
        if how == "later":
            split(own)
        with patch.object(symmetric, "gathered", wraps=symmetric.gathered) as gathered:
            found.append(_run(own, given[mine], seed[mine], rows, how))
        assert gathered.called == (overlap and group.symmetric and rows % group.size == 0)
    plain, made = found
    partial_ = [name for name, p in own.named_parameters() if p.partial_gradient]
    exact = _run(whole, given, seed, rows, how)
    if exact["down.weight"] is not None:
        for one, name in product(found, partial_):
            one[name] = torch.zeros_like(whole.down.bias) if one[name] is None else one[name]
        sum_over([one[name] for one in found for name in partial_], group)
    near = EXACT if dtype == torch.float32 else ROUNDED
    assert plain.keys() == made.keys()
    for name, tensor in made.items():
        _same(tensor, plain[name], near, name)
        if name in partial_:
            _same(tensor, exact[name], near, name)
    for name in ("hidden", "given"):
        _same(made[name], None if exact[name] is None else exact[name][mine], near, name)


def _run(layer: Toy, given: Tensor, seed: Tensor, rows: int, how: str) -> dict[str, Tensor | None]:
    """What it makes of rows, and the gradients of these and of its weights."""
    given = given.clone().requires_grad_(how != "first")
    batch, parts = Batch(cache={"rows": range(rows)}), list[WeightPart]()
    with torch.set_grad_enabled(how != "evaluated"):
        state = {"hidden": given}
        made = (
            checkpoint(layer, state, batch, use_reentrant=False)
            if how == "recomputed"
            else layer(state, batch)
        )["hidden"]
    if how != "evaluated":
        with deferred(parts) if how == "later" else nullcontext():
            made.backward(seed)
        assert (len(parts) > 0) == (how == "later" and layer.group is not None)
        add_weight_gradients(parts)
    gradients = {name: weight.grad for name, weight in layer.named_parameters()}
    return {"hidden": made.detach(), "given": given.grad, **gradients}


def _same(made: Tensor | None, expected: Tensor | None, tolerance: float, what: str) -> None:
    """Equal to a part of the largest number."""
    assert (made is None) == (expected is None), what
    if made is None or expected is None:
        return
    assert made.dtype == expected.dtype and made.shape == expected.shape, what
    most = float(expected.float().abs().max()) if expected.numel() else 1.0
    torch.testing.assert_close(
        made.float(),
        expected.float(),
        rtol=0.0,
        atol=tolerance * max(most, 1e-3),
        msg=lambda said: f"{what}: {said}",
    )


def before_fork(payload: dict[str, Any]) -> None:
    """Import the models' classes once."""
    parallel_worker.before_fork(payload)


def names(payload: dict[str, Any], size: int) -> set[str]:
    """All checks of a group of this size."""
    nobody = Group(None, size, 0)
    found = set(toy_checks(nobody))
    if size in payload["layers"]:
        for path in payload["runs"]:
            found |= set(layer_checks(Path(path), nobody, ("", "recomputed", "later"), True))
    return found
