"""The two ranks of the parallel tests: every function and every layer, over a TP group and whole,
side by side."""

import json
import os
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from copy import copy
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from disttrain_cli.models.cross_entropy import cross_entropy
from disttrain_cli.models.division import piece, shard_of
from disttrain_cli.models.graph import build_layers, describe, layer_table, live_tensors
from disttrain_cli.models.group import Group
from disttrain_cli.models.layer import LOSS_PREFIX
from disttrain_cli.models.parallel import (
    across,
    embed,
    gather,
    once,
    reduce,
    scatter,
    share,
    split,
    sum_over,
)
from disttrain_cli.models.parallel import copy as copy_whole
from disttrain_cli.models.probe import probe_batch, state_at
from disttrain_cli.models.tensor_parallel import join
from disttrain_cli.models.weight_parts import WeightPart, add_weight_gradients, deferred
from disttrain_cli.models.weight_parts import split as split_backward
from disttrain_cli.runtime.launching.process import joined
from disttrain_cli.spec.runfile import read_run

TP = 2
SIZES: dict[str, dict[str, Any]] = {
    "even": {"image": [(4, 4), (2, 6)], "audio": 2, "documents": [[20, 20], [41]], "target": 2},
    "uneven": {"image": [(2, 2)], "audio": 1, "documents": [[23]], "target": 3},
    "none": {"image": [], "audio": 0, "documents": [[23]], "target": 0},
}


def random(*shape: int, seed: int) -> Tensor:
    """The same numbers on every rank."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def ranks(payload: dict[str, Any]) -> None:
    """Write, by name of a check, what differs ("" where nothing does)."""
    with joined("cpu", 60.0):
        group = Group(dist.group.WORLD, TP, int(os.environ["RANK"]))
        checks: dict[str, Callable[[], None]] = {
            f"{name} of {rows} rows": lambda check=check, rows=rows: check(group, rows)
            for name, check in FUNCTIONS.items()
            for rows in (1, 3, 8)
        }
        for path in payload["runs"]:
            checks |= layer_checks(Path(path), group)
        Path(payload["out"], f"{group.rank}.json").write_text(json.dumps(found(checks)))


def found(checks: dict[str, Callable[[], None]]) -> dict[str, str]:
    """By name of a check, what differs."""
    said = {}
    for name, check in checks.items():
        try:
            check()
            said[name] = ""
        except AssertionError as error:
            at = traceback.extract_tb(error.__traceback__)[-1]
            said[name] = str(error) or f"{at.name}: {at.line}"  # a plain assert says nothing
    return said


def _gather(group: Group, rows: int) -> None:
    whole, weights = random(rows, 6, seed=1), [random(rows, 6, seed=2 + r) for r in range(TP)]
    own = whole[group.local_rows(rows)].T.contiguous().T.requires_grad_()  # not contiguous
    made = gather(own, rows, group)
    (made * weights[group.rank]).sum().backward()
    same(made, whole)
    same(own.grad, sum(weights)[group.local_rows(rows)])


def _scatter(group: Group, rows: int) -> None:
    parts, weight = [random(6, rows, seed=1 + r).T for r in range(TP)], random(rows, 6, seed=9)
    own = parts[group.rank].requires_grad_()
    made = scatter(own, group)
    (made * weight[group.local_rows(rows)]).sum().backward()
    same(made, sum(parts)[group.local_rows(rows)])
    same(own.grad, weight)


def _reduce(group: Group, rows: int) -> None:
    parts, weight = [random(6, rows, seed=1 + r).T for r in range(TP)], random(rows, 6, seed=9)
    own = parts[group.rank].requires_grad_()
    made = reduce(own, group)
    (made * weight).sum().backward()
    same(made, sum(parts))
    same(own.grad, weight)


def _copy(group: Group, rows: int) -> None:
    whole, weights = (
        random(rows, 6, seed=1).requires_grad_(),
        [random(6, rows, seed=2 + r).T for r in range(TP)],
    )
    (copy_whole(whole, group) * weights[group.rank]).sum().backward()
    same(whole.grad, sum(weights))


def _split(group: Group, rows: int) -> None:
    whole, weight = random(rows, 6, seed=1).requires_grad_(), random(rows, 6, seed=2)
    made = split(whole, group)
    (made * weight[group.local_rows(rows)]).sum().backward()
    same(made, whole[group.local_rows(rows)])
    sum_over([whole.grad], group)
    same(whole.grad, weight)


def _share(group: Group, rows: int) -> None:
    whole, weight = random(rows, 6, seed=1).requires_grad_(), random(rows, 6, seed=2)
    made = share(whole, group)
    (made * weight).sum().backward()
    same(made, whole)
    sum_over([whole.grad], group)
    same(whole.grad, weight)


def _once(group: Group, rows: int) -> None:
    whole = random(rows, 6, seed=1).requires_grad_()
    made = once(whole.square().sum(), group)
    made.backward()
    same(whole.grad, 2 * whole)
    value = made.detach().clone()
    sum_over([value], group)
    same(value, whole.square().sum())


def _embed(group: Group, rows: int) -> None:
    table, ids, weight = (
        random(8, 6, seed=1).requires_grad_(),
        torch.arange(rows) * 5 % 8,
        random(rows, 6, seed=2),
    )
    own = table.detach()[4 * group.rank : 4 * group.rank + 4].clone().requires_grad_()
    made = scatter(embed(ids, own, 4 * group.rank), group)
    (made * weight[group.local_rows(rows)]).sum().backward()
    (table[ids] * weight).sum().backward()
    same(made, table[ids][group.local_rows(rows)])
    same(own.grad, table.grad[4 * group.rank : 4 * group.rank + 4])


def _cross_entropy(group: Group, rows: int) -> None:
    """Also with logits whose exponentials overflow, and with rows that are not trained."""
    logits = (random(rows, 8, seed=1) * 1000).requires_grad_()
    labels = torch.where(torch.arange(rows) % 3 == 1, -100, torch.arange(rows) * 5 % 8)
    own = logits.detach()[:, 4 * group.rank : 4 * group.rank + 4].clone().requires_grad_()
    made = cross_entropy(own, labels, 4 * group.rank, group)
    expected = torch.nn.functional.cross_entropy(logits, labels, ignore_index=-100, reduction="sum")
    (3 * made).backward()
    (3 * expected).backward()
    same(made, expected)
    same(own.grad, logits.grad[:, 4 * group.rank : 4 * group.rank + 4])


def _across(group: Group, rows: int) -> None:
    """The gathered rows are let go after the forward, and no gradient misses them."""
    whole, weight = random(rows, 6, seed=1).requires_grad_(), random(rows, 6, seed=2)
    up, down = random(6, 8, seed=3).requires_grad_(), random(8, 6, seed=4).requires_grad_()
    half = slice(4 * group.rank, 4 * group.rank + 4)
    own_up, own_down = (
        part.detach().clone().requires_grad_() for part in (up[:, half], down[half])
    )
    own = whole.detach()[group.local_rows(rows)].clone().requires_grad_()
    gathered = []

    def f(rows_RD: Tensor) -> Tensor:
        gathered.append(rows_RD.untyped_storage()._weak_ref())
        return (rows_RD @ own_up).relu() * (rows_RD.unflatten(0, (1, rows)) @ own_up) @ own_down

    made = across(f, own, rows, group)
    assert _expires(gathered[0]), "all rows are kept"
    (made * weight[group.local_rows(rows)]).sum().backward()
    expected = (whole @ up).relu() * (whole @ up) @ down
    (expected * weight).sum().backward()
    same(made, expected[group.local_rows(rows)])
    same(own.grad, whole.grad[group.local_rows(rows)])
    same(own_up.grad, up.grad[:, half])
    same(own_down.grad, down.grad[half])


def _expires(storage: Any, limit_s: float = 10.0) -> bool:
    """Whether a storage is let go; gloo's thread may hold it a moment longer than the message
    takes."""
    end_s = time.monotonic() + limit_s
    while not (expired := torch.UntypedStorage._expired(storage)) and time.monotonic() < end_s:
        time.sleep(0.01)
    return expired


FUNCTIONS = {
    "across": _across,
    "gather": _gather,
    "scatter": _scatter,
    "reduce": _reduce,
    "copy": _copy,
    "split": _split,
    "share": _share,
    "once": _once,
    "embed": _embed,
    "cross_entropy": _cross_entropy,
}


def layer_checks(
    path: Path, group: Group, how: tuple[str, ...] = ("",), overlapped: bool = False
) -> dict[str, Callable[[], None]]:
    """One check for each kind of layer of a run, each amount of items and each way to run it; with
    `overlapped` of the kinds that can."""
    run = read_run(path)
    kinds = {}
    for index, info in enumerate(layer_table(run)):
        if not overlapped or build_layers(run, index, index + 1, "meta")[0].row_by_row:
            kinds.setdefault((info.module, info.kind), index)
    return {
        f"{path.stem}/{module}.{kind}, {size}{one and ', '}{one}": partial(
            _layer, run, index, size, group, one
        )
        for (module, kind), index in kinds.items()
        for size in SIZES
        for one in how
    }


def _layer(run: Any, index: int, size: str, group: Group, how: str = "") -> None:
    """`how`: whether it is "recomputed", or the gradients of its weights are computed "later"."""
    table, inputs = layer_table(run), describe(run)
    batch = probe_batch(inputs, **SIZES[size])
    given = state_at(table, index, inputs, batch)
    (whole,) = build_layers(run, index, index + 1)
    (own,) = build_layers(run, index, index + 1, tp=group.size, tp_rank=group.rank)
    join(own, group)
    if how == "later":
        split_backward(own)
    split_names = {spec.name for spec in (*live_tensors(table, index), *whole.writes) if spec.split}

    def mine(name: str, tensor: Tensor) -> Tensor:
        return tensor[group.local_rows(len(tensor))] if name in split_names else tensor

    part = {
        name: mine(name, tensor.detach()).clone().requires_grad_() for name, tensor in given.items()
    }
    run_own = partial(checkpoint, own, use_reentrant=False) if how == "recomputed" else own
    expected, made = whole(dict(given), batch), run_own(dict(part), copy(batch))
    seeds = {
        name: torch.ones(()) if name.startswith(LOSS_PREFIX) else random(*tensor.shape, seed=3)
        for name, tensor in expected.items()
    }
    _backward(expected, seeds)
    parts: list[WeightPart] = []
    with deferred(parts) if how == "later" else nullcontext():
        _backward(made, {name: mine(name, seed) for name, seed in seeds.items()})
    add_weight_gradients(parts)
    for name, tensor in expected.items():
        if name.startswith(LOSS_PREFIX):
            dist.all_reduce(made[name].data, group=group.ranks)
        same(made[name], mine(name, tensor), name)
    for name, tensor in given.items():
        if tensor.grad is not None:
            same(part[name].grad, mine(name, tensor.grad), f"gradient of {name}")
    parameters = dict(own.named_parameters())
    zeros = {
        path: torch.zeros_like(p) if p.grad is None else p.grad for path, p in parameters.items()
    }
    sum_over([zeros[path] for path, p in parameters.items() if p.partial_gradient], group)
    for path, parameter in whole.named_parameters():
        shard = shard_of(parameters[path])
        same(parameters[path], piece(parameter, shard), path)
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        same(zeros[path], piece(gradient, shard), f"gradient of {path}")


def _backward(made: dict[str, Tensor], seeds: dict[str, Tensor]) -> None:
    trained = [name for name, tensor in made.items() if tensor.requires_grad]
    if trained:
        torch.autograd.backward([made[name] for name in trained], [seeds[name] for name in trained])


def same(made: Tensor | None, expected: Tensor, what: str = "") -> None:
    """Equal to 1e-5 of the largest value."""
    assert made is not None, what
    scale = max(1.0, float(expected.detach().abs().max())) if expected.numel() else 1.0
    torch.testing.assert_close(
        made, expected, rtol=1e-5, atol=1e-5 * scale, msg=lambda said: f"{what}: {said}"
    )


def names(runs: list[Path]) -> Iterator[str]:
    """All checks of `ranks`."""
    yield from (f"{name} of {rows} rows" for name in FUNCTIONS for rows in (1, 3, 8))
    for path in runs:
        yield from layer_checks(path, None)  # type: ignore[arg-type]


def before_fork(payload: dict[str, Any]) -> None:
    """Import the models' classes once."""
    for path in payload["runs"]:
        layer_table(read_run(Path(path)))
