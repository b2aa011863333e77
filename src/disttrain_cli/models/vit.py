"""transformers' ViT as pipeline layers: embed, block × n, projector into the LLM's width.

Images keep their own grid: position embeddings are interpolated to it, and images of equal grid (which are
adjacent) run as one batch. Rows of an image: the class token, then its patches in raster order.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn

from disttrain_cli.models.building import LayerMaker
from disttrain_cli.models.division import Division
from disttrain_cli.models.layer import Batch, PipelineLayer, TensorSpec


def runs(grids: list[tuple[int, int]]) -> Iterator[tuple[int, int, int]]:
    """Runs of equal grids as (images, patch rows, patch columns)."""
    for (rows, columns), group in groupby(grids):
        yield sum(1 for _ in group), rows, columns


def by_grid(rows_RD: Tensor, grids: list[tuple[int, int]], extra: int) -> Iterator[Tensor]:
    """Views [N, P + extra, D] of rows [R, D], one per run of equal grids."""
    start = 0
    for images, rows, columns in runs(grids):
        length = rows * columns + extra
        yield rows_RD[start : start + images * length].unflatten(0, (images, length))
        start += images * length
    assert start == len(rows_RD), "rows do not match the grids"


class VitLayer(PipelineLayer):
    """A layer whose items are the images read."""

    def is_empty(self, state: dict[str, Tensor], batch: Batch) -> bool:
        return not batch.image_grids


class Embed(VitLayer):
    """Pixels → patches with class token and interpolated positions (Dosovitskiy et al. 2021, section 3.1)."""

    kind = "embed"
    needs = ("pixels",)

    def __init__(self, module: str, config: Any) -> None:
        from transformers.models.vit.modeling_vit import ViTEmbeddings

        super().__init__()
        self.name, self.module = f"{module}.embed", module
        self.writes = (TensorSpec("image_hidden", "image", "patches", (config.hidden_size,)),)
        self.embeddings = ViTEmbeddings(config)

    def compute(self, state: dict[str, Tensor], batch: Batch) -> dict[str, Tensor]:
        assert batch.pixels is not None
        dtype = self.embeddings.cls_token.dtype
        hidden = [
            self.embeddings(pixels.to(dtype), interpolate_pos_encoding=True).flatten(0, 1) for pixels in batch.pixels
        ]
        return {"image_hidden": torch.cat(hidden)}


class Block(VitLayer):
    """One transformers ViTLayer."""

    kind = "block"
    reads = ("image_hidden",)
    division = Division(column=("q_proj", "k_proj", "v_proj", "fc1"), row=("o_proj", "fc2"))

    def __init__(self, module: str, number: int, config: Any) -> None:
        from transformers.models.vit.modeling_vit import ViTLayer

        super().__init__()
        self.name, self.module = f"{module}.block.{number}", module
        self.writes = (TensorSpec("image_hidden", "image", "patches", (config.hidden_size,)),)
        self.layer = ViTLayer(config)

    def compute(self, state: dict[str, Tensor], batch: Batch) -> dict[str, Tensor]:
        views = by_grid(state["image_hidden"], batch.image_grids, extra=1)
        return {"image_hidden": torch.cat([self.layer(view).flatten(0, 1) for view in views])}


class Projector(VitLayer):
    """Final norm, class token dropped, m × m neighbouring patches merged, two-layer MLP to the LLM's width."""

    kind = "projector"
    reads = ("image_hidden",)
    division = Division(column=("mlp.0",), row=("mlp.2",))

    def __init__(self, module: str, config: Any, merge: int, hidden: int, width: int) -> None:
        super().__init__()
        self.name, self.module, self.merge = f"{module}.projector", module, merge
        self.writes = (TensorSpec("image_embeds", "image", "tokens", (width,)),)
        self.norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.mlp = nn.Sequential(
            nn.Linear(merge * merge * config.hidden_size, hidden), nn.GELU(), nn.Linear(hidden, width)
        )

    def compute(self, state: dict[str, Tensor], batch: Batch) -> dict[str, Tensor]:
        m = self.merge
        blocks = []
        views = by_grid(state["image_hidden"], batch.image_grids, extra=1)
        for view, (_, rows, columns) in zip(views, runs(batch.image_grids), strict=True):
            grid = self.norm(view[:, 1:]).unflatten(1, (rows // m, m, columns // m, m))  # [N, h, m, w, m, D]
            blocks.append(grid.transpose(2, 3).flatten(3, 5).flatten(0, 2))  # [N·h·w, m·m·D]
        return {"image_embeds": self.mlp(torch.cat(blocks))}


def makers(module: str, config: Any, merge: int, projector_hidden: int, llm_width: int) -> list[LayerMaker]:
    """The layers of an image encoder in pipeline order."""
    std = config.initializer_range
    return [
        LayerMaker(partial(Embed, module, config), std),
        *(LayerMaker(partial(Block, module, i, config), std) for i in range(config.num_hidden_layers)),
        LayerMaker(partial(Projector, module, config, merge, projector_hidden, llm_width), std),
    ]
