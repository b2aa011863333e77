"""Ranks without processes: places, layers and optimizers as `runtime.checkpoints` sees them."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from disttrain_cli.models.division import Shard, piece
from disttrain_cli.models.layer import PipelineLayer
from disttrain_cli.spec.plan import Layout
from disttrain_cli.spec.stage_graph import stage_graph
from tests.runtime.factory import unit

SHAPES = {"matrix": (8, 6), "fused": (8, 3), "kernel": (4, 3, 2, 2), "vector": (5,), "number": ()}
DIVIDED = {"matrix": (1, (1,)), "fused": (0, (1, 1))}  # (dim, packed)


class Weights(PipelineLayer):
    """A layer with weights of every shape, or one TP rank's part of it."""

    def __init__(self, name: str, module: str, seed: int, tp: int = 1, tp_rank: int = 0) -> None:
        super().__init__()
        self.name, self.module, self.kind = name, module, "llm"
        random = torch.Generator().manual_seed(seed)
        for key, shape in SHAPES.items():
            whole = torch.randn(shape, generator=random)
            shard = Shard(*DIVIDED[key], tp, tp_rank) if tp > 1 and key in DIVIDED else None
            parameter = nn.Parameter(piece(whole, shard).clone())
            if shard is not None:
                parameter.__dict__["shard"] = shard
            setattr(self, key, parameter)


def engine_of(
    seed: int = 0,
    *,
    dp: int = 1,
    replica: int = 0,
    tp: int = 1,
    tp_rank: int = 0,
    zero: bool = False,
    trained: bool = True,
) -> Any:
    """A rank's engine as far as a checkpoint looks at it: two layers, AdamW after one step, ZeRO-1
    if `zero`."""
    layout = Layout(
        global_batch_size=dp,
        microbatch_size=1,
        microbatches=1,
        gpus_used=dp * tp,
        units=[unit("llm", ["llm"], [2], dp, tp)],
    )
    coords = stage_graph(layout, "llm").coords(tp_rank + tp * replica)
    layers = [Weights(f"layer{number}", "llm", seed + number, tp, tp_rank) for number in range(2)]
    parameters = [p for layer in layers for p in layer.parameters()]
    if not trained:
        for parameter in parameters:
            parameter.requires_grad_(False)
    flat = _partition(parameters, dp, replica) if zero else []
    basic = (
        torch.optim.AdamW([{"params": flat or parameters, "module": "llm"}], lr=1e-2)
        if trained
        else None
    )
    for parameter in (flat or parameters) if trained else []:
        parameter.grad = torch.sin(parameter.detach())  # the same wherever a value lies
    if basic is not None:
        basic.step()
    if zero:
        for parameter, (start, values) in zip(
            parameters, _fragments(parameters, dp, replica, flat[0]), strict=True
        ):
            if len(values):
                parameter.data.view(-1)[start : start + len(values)] = values
    return SimpleNamespace(
        module=SimpleNamespace(layers=layers),
        coords=coords,
        basic_optimizer=basic,
        device=torch.device("cpu"),
        skipped_steps=0,
        updates={"llm": 1} if trained else {},
        settle=lambda: None,
    )


def _partition(parameters: list[nn.Parameter], dp: int, replica: int) -> list[nn.Parameter]:
    """One replica's flat part of all parameters, padded so that parts are equal, and its place in
    each of them."""
    whole = torch.cat([p.detach().reshape(-1) for p in parameters])
    size = -(-len(whole) // dp)
    padded = torch.cat([whole, torch.zeros(size * dp - len(whole))])
    own = nn.Parameter(padded[replica * size : (replica + 1) * size].clone())
    for parameter, (start, values) in zip(
        parameters, _fragments(parameters, dp, replica, own), strict=True
    ):
        parameter._hp_mapping = (
            None
            if not len(values)
            else SimpleNamespace(  # type: ignore[attr-defined]
                lp_fragment_address=SimpleNamespace(start=start, numel=len(values)),
                hp_fragment=values,
                hp_fragment_address=SimpleNamespace(
                    start=values.storage_offset(), numel=len(values)
                ),
                param_group_index=0,
            )
        )
    return [own]


def _fragments(
    parameters: list[nn.Parameter], dp: int, replica: int, own: nn.Parameter
) -> Iterator[tuple[int, torch.Tensor]]:
    """(Start in the parameter, view of the partition) of every parameter."""
    low, at = replica * len(own), 0
    for parameter in parameters:
        start, stop = max(low, at), min(low + len(own), at + parameter.numel())
        yield max(0, start - at), own.detach()[start - low : max(start, stop) - low]
        at += parameter.numel()


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """A world of one rank, in this process."""
    dist.init_process_group(
        "gloo", store=dist.FileStore(str(folder / "store"), 1), rank=0, world_size=1
    )
    try:
        yield
    finally:
        dist.destroy_process_group()
