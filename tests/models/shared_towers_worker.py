"""Ranks of the tests of towers whose rows a CP group shares, with and without TP groups."""

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from disttrain_cli.models.division import Place, piece, shard_of
from disttrain_cli.models.graph import build_layers, describe, layer_table
from disttrain_cli.models.group import Group
from disttrain_cli.models.layer import Batch, PipelineLayer
from disttrain_cli.models.parallel import all_reduced
from disttrain_cli.models.probe import probe_batch
from disttrain_cli.models.qwen_vision import MERGED
from disttrain_cli.models.tensor_parallel import join
from disttrain_cli.runtime.launching.process import joined
from disttrain_cli.spec.runfile import read_run
from tests.models.test_towers import GRIDS

RANKS = 4
#: By name: images, and their grids of patches. The smallest have fewer rows than there are ranks
#: once they are merged, and one row more than ranks before.
IMAGES = {"several": GRIDS, "one": [(6, 8)], "smallest": [(2, 2)]}
#: TP and CP sizes.
SIZES = {"cp4": (1, 4), "tp2 cp2": (2, 2)}


def ranks(payload: dict[str, Any]) -> None:
    """Write, by name of a case, the largest differences of outputs and gradients from those of a
    single process."""
    with joined("cpu", 120.0):
        rank, found = int(os.environ["RANK"]), {}
        for size, (tp, cp) in SIZES.items():
            groups: dict[str, Group] = {}
            for part in range(cp):
                group = dist.new_group(list(range(part * tp, (part + 1) * tp)))
                if rank // tp == part and tp > 1:
                    groups["tp"] = Group(group, tp, rank % tp)
            for part in range(tp):
                group = dist.new_group(list(range(part, RANKS, tp)))
                if rank % tp == part:
                    groups["cp"] = Group(group, cp, rank // tp)
            for architecture, path in payload["runs"].items():
                for images, grids in IMAGES.items():
                    name = f"{architecture}, {images}, {size}"
                    found[name] = difference(Path(path), grids, groups)
        Path(payload["out"], f"{rank}.json").write_text(json.dumps(found))


def difference(path: Path, grids: list[tuple[int, int]], groups: dict[str, Group]) -> list[float]:
    """Of outputs, and of gradients, over the largest of them."""
    run, tp, cp = read_run(path), groups.get("tp"), groups["cp"]
    count = sum(info.module == "eye" for info in layer_table(run))
    batch = probe_batch(describe(run), image=grids)
    shard = {} if tp is None else {"tp": tp.size, "tp_rank": tp.rank}
    whole, own = build_layers(run, 0, count), build_layers(run, 0, count, **shard)
    for layer in own:
        join(layer, tp, cp)
    place = Place(*((1, 0) if tp is None else (tp.size, tp.rank)), cp.size, cp.rank)
    rows: dict[str, int] = {}
    expected, made = outputs(whole, batch, rows, Place()), outputs(own, batch, rows, place)
    differences = []
    for name, tensor in made.items():
        right = expected[name][slice(*place.own_rows(rows[name]))]
        assert right.shape == tensor.shape
        differences.append(_over(expected[name], right - tensor))
    of_gradients = []
    for one, two in zip(parameters(whole), parameters(own), strict=True):
        assert one.grad is not None
        found = torch.zeros_like(two) if two.grad is None else two.grad
        found = all_reduced(found, cp)
        if tp is not None and shard_of(two) is None:
            found = all_reduced(found, tp)
        of_gradients.append(_over(one.grad, piece(one.grad, shard_of(two)) - found))
    return [max(differences), max(of_gradients)]


def _over(whole: Tensor, difference: Tensor) -> float:
    most = float(whole.detach().abs().max())
    return float(difference.detach().abs().max()) / max(most, 1e-3) if len(difference) else 0.0


def parameters(layers: list[PipelineLayer]) -> list[Parameter]:
    return [parameter for layer in layers for parameter in layer.parameters()]


def outputs(
    layers: list[PipelineLayer], batch: Batch, rows: dict[str, int], place: Place
) -> dict[str, Tensor]:
    """What a rank leaves for the LLM, after its products with some numbers were differentiated."""
    state: dict[str, Tensor] = {}
    batch = replace(batch, cache={})  # what layers make of it is of their ranks
    for layer in layers:
        state.update(layer(state, batch))
    del state["image_hidden"]
    state.pop(MERGED, None)
    total = torch.zeros(())
    for name, tensor in state.items():
        count = rows.setdefault(name, len(tensor))
        numbers = torch.randn(
            count, tensor.shape[1], generator=torch.Generator().manual_seed(len(name))
        )
        total = total + (tensor * numbers[slice(*place.own_rows(count))]).sum()
    total.backward()
    return state
