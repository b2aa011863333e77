"""Qwen2.5-VL's vision tower as pipeline layers.

In order: embed, block × n, merger, and a projector unless the merger's output has the LLM's width.
Images have any size in whole merge blocks; nothing is interpolated (Bai et al. 2025, arXiv
2502.13923, section 2.1). Rows of an image: its patches, window by window, so that a window is a run
of rows, and inside a window the m × m patches of one merge block after another, so that the merger
reads runs, too. Most blocks attend within windows, some (`kind` "block.global") over the entire
image. A temporal patch of two video frames is an image, too; a still image counts as two equal
frames.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from disttrain_cli.models.attention import Segments, attend, segments_of
from disttrain_cli.models.building import LayerMaker
from disttrain_cli.models.context_parallel import bounds_of, regrouped
from disttrain_cli.models.division import colwise, rowwise
from disttrain_cli.models.fused import gated_mlp, on_gpu, with_own_norms
from disttrain_cli.models.host import to_device
from disttrain_cli.models.kernels import turned
from disttrain_cli.models.layer import Batch, TensorSpec
from disttrain_cli.models.parallel import across, split
from disttrain_cli.models.towers import EMBEDS, ImageLayer, Ints, count, images_of, runs

#: A merger's output if a projector follows.
MERGED = "image_merged"


class Layout(NamedTuple):
    """Order of the rows of an image of some grid."""

    order: Tensor  # [P] raster indices of the patches, in the rows' order
    tokens: Tensor  # [P / m²] row index of each merge block, in raster order of the blocks
    windows: tuple[int, ...]  # patches of each window
    numbers: tuple[Ints, Ints]  # the first two as host arrays


@lru_cache(maxsize=4096)
def layout(rows: int, columns: int, merge: int, window: int) -> Layout:
    """Return the layout of an image of `rows` × `columns` patches.

    Windows have `window` patches per side; 0 = one window of any size.
    """
    from transformers.vision_utils import get_vision_window_index

    with torch.device("cpu"):
        grid = torch.tensor([[1, rows, columns]])
        blocks, bounds = (
            get_vision_window_index(
                grid, spatial_merge_size=merge, window_size=window, patch_size=1
            )
            if window
            else (torch.arange(rows * columns // merge**2), torch.tensor([0, rows * columns]))
        )
        patches = torch.arange(rows * columns).unflatten(
            0, (rows // merge, merge, columns // merge, merge)
        )
        order = patches.transpose(1, 2).flatten(2).flatten(0, 1)[blocks].flatten()
        tokens, windows = torch.argsort(blocks), tuple(torch.diff(bounds).tolist())
        return Layout(order, tokens, windows, (order.numpy(), tokens.numpy()))


class QwenLayer(ImageLayer):
    """Layer of the tower."""

    def __init__(self, module: str, name: str, config: Any) -> None:
        super().__init__()
        self.name, self.module = f"{module}.{name}", module
        self.writes = (
            TensorSpec("image_hidden", "image", "patches", (config.hidden_size,), split=True),
        )
        self.merge = config.spatial_merge_size
        self.window = getattr(config, "window_size", 0) // config.patch_size

    def seeded_rows(self, batch: Batch) -> tuple[Tensor | None, list[int]]:
        seeds, counts = super().seeded_rows(batch)
        merges = self.writes[0].rows == "tokens"
        return seeds, [rows // self.merge**2 for rows in counts] if merges else counts

    def layout(self, rows: int, columns: int) -> Layout:
        """Return the layout of an image."""
        return layout(rows, columns, self.merge, self.window)

    def blocks(self, rows_RD: Tensor, batch: Batch) -> Tensor:
        """Return the m × m patches of each merge block concatenated, [R / m², m²·D].

        In a CP group each rank has an even share of the blocks.
        """
        merged = self.merge**2
        if self.cp is not None:
            rows = count(batch.of("image").grids, extra=0)
            whole = bounds_of(rows // merged, self.cp) * merged
            rows_RD = regrouped(rows_RD, np.arange(rows), bounds_of(rows, self.cp), whole, self.cp)
        return rows_RD.unflatten(0, (-1, merged)).flatten(1)


class Embed(QwenLayer):
    """Pixels → a convolution of each patch, in the rows' order.

    Pixels are [N, C, H, W], or [N, 2 · C, H, W] of two frames.
    """

    kind = "embed"
    needs = ("image",)

    def __init__(self, module: str, config: Any) -> None:
        from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VisionPatchEmbed

        super().__init__(module, "embed", config)
        self.patch_embed = Qwen2_5_VisionPatchEmbed(
            config.patch_size, config.temporal_patch_size, config.in_channels, config.hidden_size
        )
        self.published = {"patch_embed": "patch_embed"}

    def compute(self, state: dict[str, Tensor], batch: Batch) -> dict[str, Tensor]:
        proj = self.patch_embed.proj
        runs_NCHW, hidden = self.pixels(batch), []
        kernel = self._kernel(runs_NCHW[0].shape[1])
        if self.cp is not None:
            own = self.own_embedded(batch, (kernel, proj.bias), self.table, self._order)
            return {"image_hidden": split(own, self.group)}
        for pixels in runs_NCHW:
            # [N, D, rows, columns]
            grid = functional.conv2d(pixels.to(kernel.dtype), kernel, proj.bias, kernel.shape[2:])
            order = to_device(self.layout(*grid.shape[2:]).order, grid.device)
            raster_NPD = self.placed(grid.flatten(2).transpose(1, 2), *grid.shape[2:])
            hidden.append(raster_NPD.index_select(1, order).flatten(0, 1))
        return {"image_hidden": split(torch.cat(hidden), self.group)}

    def _order(self, rows: int, columns: int) -> Ints:
        return self.layout(rows, columns).numbers[0]

    def _kernel(self, channels: int) -> Tensor:
        """Return [D, channels, p, p], for an image (constant in time) or for successive frames."""
        weight = self.patch_embed.proj.weight  # [D, C, T, p, p]
        return (
            weight.sum(2) if channels == weight.shape[1] else weight.transpose(1, 2).flatten(1, 2)
        )

    def placed(self, raster_NPD: Tensor, rows: int, columns: int) -> Tensor:
        """Return patches with positions added; here none, as rotary positions are applied later."""
        return raster_NPD

    @property
    def table(self) -> Callable[[int, int], Tensor] | None:
        """Function from a grid to its positions in the rows' order; None without learned ones."""
        return None


class Block(QwenLayer):
    """Qwen2_5_VLVisionBlock with the class's weights; attention runs over all windows at once."""

    kind = "block"
    row_by_row = True
    fused_heads = True
    reads = ("image_hidden",)
    division = (
        colwise("attn.qkv", packed=(1, 1, 1))
        | colwise("gate_proj", "up_proj")
        | rowwise("attn.proj", "down_proj")
    )

    def __init__(self, module: str, number: int, config: Any) -> None:
        super().__init__(module, f"block.{number}", config)
        self.all = not self.window or number in config.fullatt_block_indexes
        if self.window and self.all:
            self.kind = "block.global"
        self.layer, self._rotary = self.library(config)
        self.exchanged = (config.num_heads, config.num_heads, self.layer.attn.head_dim)
        self.published = {"layer": f"blocks.{number}"}

    def library(self, config: Any) -> tuple[nn.Module, Callable[[], nn.Module]]:
        """Return transformers' block and the factory of its rotary embedding.

        The embedding is never registered: a cast to bf16 would degrade it.
        """
        from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import (
            Qwen2_5_VLVisionBlock,
            Qwen2_5_VLVisionRotaryEmbedding,
        )

        block = with_own_norms(Qwen2_5_VLVisionBlock(config))
        return block, partial(Qwen2_5_VLVisionRotaryEmbedding, config)

    def feed(self, normed_RD: Tensor) -> Tensor:
        """Return the feed-forward's output."""
        return gated_mlp(self.layer.mlp, normed_RD)

    def compute(self, state: dict[str, Tensor], batch: Batch) -> dict[str, Tensor]:
        layer, hidden, rows = self.layer, state["image_hidden"], self.rows(batch)
        hidden = hidden + across(
            partial(self._attention, batch), layer.norm1(hidden), rows, self.group
        )
        hidden = hidden + across(self.feed, layer.norm2(hidden), rows, self.group)
        return {"image_hidden": hidden}

    def _attention(self, batch: Batch, hidden_RD: Tensor) -> Tensor:
        from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import apply_rotary_pos_emb_vision

        attention = self.layer.attn
        query, key, value = (
            attention.qkv(hidden_RD).unflatten(-1, (3, -1, attention.head_dim)).unbind(1)
        )
        positions = self._positions(batch, hidden_RD.device)
        query, key = (
            (turned(query, *positions), turned(key, *positions))
            if on_gpu(query)
            else apply_rotary_pos_emb_vision(query, key, *positions)
        )
        made = attend(query, key, value, self._segments(batch, query))
        return attention.proj(made.flatten(1))

    def _segments(self, batch: Batch, like: Tensor) -> Segments:
        """Return the rows of every window, or of every image."""
        if self.all:
            return images_of(batch, 0, like, self.cp)
        return segments_of(
            batch.cache,
            f"windows of {self.window}",
            lambda: [
                length
                for count, rows, columns in runs(batch.of("image").grids)
                for length in self.layout(rows, columns).windows * count
            ],
            like,
            self.cp,
        )

    def _positions(self, batch: Batch, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return cosines and sines [R, head width] of each local patch's row and column."""
        if "image cos" not in batch.cache:
            with torch.device("cpu"):
                positions = [
                    torch.stack([layout.order // columns, layout.order % columns], 1).repeat(
                        count, 1
                    )
                    for count, rows, columns in runs(batch.of("image").grids)
                    for layout in (self.layout(rows, columns),)
                ]
                own = torch.cat(positions)
                own = own[self.of_group(len(own))]
                cos, sin = self._rotary()(torch.empty(0), own)
            batch.cache["image cos"], batch.cache["image sin"] = (
                to_device(cos, device),
                to_device(sin, device),
            )
        return batch.cache["image cos"], batch.cache["image sin"]


class Merger(QwenLayer):
    """Qwen2_5_VLPatchMerger: the m × m patches of a merge block become one row.

    Rows are in raster order again.
    """

    kind = "merger"
    reads = ("image_hidden",)
    division = colwise("mlp.0") | rowwise("mlp.2")

    def __init__(self, module: str, config: Any, writes: str) -> None:
        from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLPatchMerger

        super().__init__(module, "merger", config)
        self.writes = (
            TensorSpec(writes, "image", "tokens", (config.out_hidden_size,), split=True),
        )
        self.joint = writes != MERGED
        self.merger = with_own_norms(
            Qwen2_5_VLPatchMerger(
                config.out_hidden_size, config.hidden_size, config.spatial_merge_size
            )
        )
        self.published = {"merger": "merger"}

    def compute(self, state: dict[str, Tensor], batch: Batch) -> dict[str, Tensor]:
        def merge(normed_RD: Tensor) -> Tensor:
            merged = self.merger.mlp(self.blocks(normed_RD, batch))
            if self.cp is not None:
                return in_raster_order(merged)
            start, parts = 0, []
            for images, rows, columns in runs(batch.of("image").grids):
                tokens = to_device(self.layout(rows, columns).tokens, merged.device)
                blocks = merged[start : start + images * len(tokens)].unflatten(
                    0, (images, len(tokens))
                )
                parts.append(blocks.index_select(1, tokens).flatten(0, 1))
                start += images * len(tokens)
            return torch.cat(parts)

        def in_raster_order(own: Tensor) -> Tensor:
            assert self.cp is not None
            tokens, start = [], 0
            for images, rows, columns in runs(batch.of("image").grids):
                one = self.layout(rows, columns).numbers[1]
                starts = start + len(one) * np.arange(images)
                tokens.append((starts[:, None] + one).ravel())
                start += images * len(one)
            bounds = bounds_of(start, self.cp)
            return regrouped(own, np.concatenate(tokens), bounds, bounds, self.cp)

        normed = self.merger.ln_q(state["image_hidden"])
        return {self.writes[0].name: across(merge, normed, self.rows(batch), self.group)}


class Projector(QwenLayer):
    """Two-layer MLP from the merger's rows to the LLM's width."""

    kind = "projector"
    row_by_row = True
    reads = (MERGED,)
    division = colwise("mlp.0") | rowwise("mlp.2")

    def __init__(self, module: str, config: Any, hidden: int, width: int) -> None:
        super().__init__(module, "projector", config)
        self.writes = (TensorSpec(EMBEDS, "image", "tokens", (width,), split=True),)
        self.mlp = nn.Sequential(
            nn.Linear(config.out_hidden_size, hidden), nn.GELU(), nn.Linear(hidden, width)
        )

    def compute(self, state: dict[str, Tensor], batch: Batch) -> dict[str, Tensor]:
        own = self.of_group(count(batch.of("image").grids, extra=0) // self.merge**2)
        return {EMBEDS: across(self.mlp, state[MERGED], own.stop - own.start, self.group)}


def makers(module: str, config: Any, *projector: int) -> list[LayerMaker]:
    """Return the layer factories of an image encoder in pipeline order.

    `projector`: its hidden and its output width, if there is one.
    """
    std = config.initializer_range
    return [
        LayerMaker(partial(Embed, module, config), std),
        *(LayerMaker(partial(Block, module, i, config), std) for i in range(config.depth)),
        LayerMaker(partial(Merger, module, config, MERGED if projector else EMBEDS), std),
        *(LayerMaker(partial(Projector, module, config, *projector), std) for _ in projector[:1]),
    ]
