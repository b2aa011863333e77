"""An encoder of curves: patches, n blocks of an MLP each, and a projector into the LLM's width."""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from disttrain_cli.models.architecture import Architecture, Joined
from disttrain_cli.models.building import LayerMaker
from disttrain_cli.models.configs.checks import ModuleConfig, refuse_unknown
from disttrain_cli.models.layer import Batch, PipelineLayer, TensorSpec
from disttrain_cli.spec.runfile import Run
from disttrain_cli.spec.runfile.model import ModuleSpec
from disttrain_curves.data import CurveInput

FIELDS = {"width": 32, "layers": 2, "points": 4, "longest": 64}


class CurveConfig(PretrainedConfig):
    """The published configuration."""

    model_type = "curve"

    def __init__(self, **fields: Any) -> None:
        super().__init__(**{name: fields.pop(name, value) for name, value in FIELDS.items()})


class CurveModel(PreTrainedModel):
    """The published model."""

    config_class = CurveConfig

    def __init__(self, config: CurveConfig) -> None:
        super().__init__(config)
        self.embed = nn.Linear(config.points, config.width)
        self.layers = nn.ModuleList(mlp(config.width) for _ in range(config.layers))
        self.post_init()


def mlp(width: int) -> nn.Sequential:
    return nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU())


class CurveLayer(PipelineLayer):
    """A layer whose items are curves."""

    reads: tuple[str, ...] = ("curve_hidden",)

    def __init__(self, module: str, name: str, kind: str, width: int) -> None:
        super().__init__()
        self.name, self.module, self.kind = f"{module}.{name}", module, kind
        self.writes = (TensorSpec("curve_hidden", "curve", "patches", (width,)),)

    def is_empty(self, state: dict[str, Tensor], batch: Batch) -> bool:
        return not batch.of("curve").grids


class Embed(CurveLayer):
    reads = ()
    needs = ("curve",)

    def __init__(self, module: str, config: CurveConfig) -> None:
        super().__init__(module, "embed", "embed", config.width)
        self.linear = nn.Linear(config.points, config.width)
        self.published = {"linear": "embed"}

    def compute(self, state: dict[str, Tensor], batch: Batch) -> dict[str, Tensor]:
        patches = [
            curves.unflatten(1, (-1, self.linear.in_features)).flatten(0, 1)
            for curves in batch.of("curve").values[0]
        ]
        return {"curve_hidden": self.linear(torch.cat(patches))}


class Block(CurveLayer):
    def __init__(self, module: str, number: int, config: CurveConfig) -> None:
        super().__init__(module, f"block.{number}", "block", config.width)
        self.mlp = mlp(config.width)
        self.published = {"mlp": f"layers.{number}"}

    def compute(self, state: dict[str, Tensor], batch: Batch) -> dict[str, Tensor]:
        hidden = state["curve_hidden"]
        return {"curve_hidden": hidden + self.mlp(hidden)}


class Projector(CurveLayer):
    def __init__(self, module: str, config: CurveConfig, merge: int, llm_width: int) -> None:
        super().__init__(module, "projector", "projector", config.width)
        self.writes = (TensorSpec("curve_embeds", "curve", "tokens", (llm_width,)),)
        self.linear, self.merge = nn.Linear(merge * config.width, llm_width), merge

    def compute(self, state: dict[str, Tensor], batch: Batch) -> dict[str, Tensor]:
        merged = state["curve_hidden"].unflatten(0, (-1, self.merge)).flatten(1)
        return {"curve_embeds": self.linear(merged)}


def read(
    name: str, architecture: str, spec: ModuleSpec, fields: dict[str, Any]
) -> tuple[CurveConfig, None]:
    refuse_unknown(name, architecture, spec.config, FIELDS, "config")
    return CurveConfig(**fields | spec.config), None


def make(joined: Joined) -> list[LayerMaker]:
    module, config = joined.module.name, joined.module.config
    return [
        LayerMaker(partial(Embed, module, config), None),
        *(LayerMaker(partial(Block, module, i, config), None) for i in range(config.layers)),
        LayerMaker(partial(Projector, module, config, joined.spec.merge, joined.llm_width), None),
    ]


def inputs(run: Run, module: ModuleConfig) -> CurveInput:
    config, merge = module.config, run.file.model.modules[module.name].merge
    return CurveInput(module=module.name, points=config.points, longest=config.longest, merge=merge)


CURVE = Architecture("encoder", "curve", "disttrain_curves.model:CurveModel", read, make, inputs)
