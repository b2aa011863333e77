"""Qwen3-VL's vision tower as pipeline layers.

In order: embed, block × n with a DeepStack merger after some, merger, and a projector unless the
merger's output has the LLM's width. Images have any size in whole merge blocks; a learned grid of
positions is interpolated to it (Bai et al. 2025, arXiv 2511.21631, section 2). Rows of an image:
the m × m patches of one merge block after another, blocks in raster order, so that mergers read
runs of rows. Every block attends over the entire image. The outputs of DeepStack's mergers are sent
to the LLM together with the tower's last rows, and are added after its first blocks
(`decoder.DeepBlock`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn

from disttrain_cli.models import qwen_vision
from disttrain_cli.models.building import LayerMaker
from disttrain_cli.models.division import colwise, rowwise
from disttrain_cli.models.host import to_device
from disttrain_cli.models.layer import Batch, TensorSpec, features_name
from disttrain_cli.models.parallel import across
from disttrain_cli.models.qwen_vision import MERGED, Projector, QwenLayer
from disttrain_cli.models.towers import EMBEDS, positions


class Embed(qwen_vision.Embed):
    """Pixels → a convolution of each patch and its position, in the rows' order.

    Pixels are [N, C, H, W], or [N, 2 · C, H, W] of two frames.
    """

    def __init__(self, module: str, config: Any) -> None:
        from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionPatchEmbed

        QwenLayer.__init__(self, module, "embed", config)
        self.patch_embed = Qwen3VLVisionPatchEmbed(config)
        self.pos_embed = nn.Embedding(config.num_position_embeddings, config.hidden_size)
        self.published = {name: name for name in ("patch_embed", "pos_embed")}

    def placed(self, raster_NPD: Tensor, rows: int, columns: int) -> Tensor:
        return raster_NPD + self._learned(rows, columns)

    @property
    def table(self) -> Callable[[int, int], Tensor]:
        return lambda rows, columns: self._learned(rows, columns).index_select(
            0, to_device(self.layout(rows, columns).order, self.pos_embed.weight.device)
        )

    def _learned(self, rows: int, columns: int) -> Tensor:
        """Return the positions of a grid's patches, in raster order."""
        return positions(self.pos_embed.weight, rows, columns, "bilinear")


class Block(qwen_vision.Block):
    """Qwen3VLVisionBlock with the class's weights; attention runs over all images at once."""

    division = (
        colwise("attn.qkv", packed=(1, 1, 1))
        | colwise("linear_fc1")
        | rowwise("attn.proj", "linear_fc2")
    )

    def library(self, config: Any) -> tuple[nn.Module, Callable[[], nn.Module]]:
        from transformers.models.qwen3_vl.modeling_qwen3_vl import (
            Qwen3VLVisionBlock,
            Qwen3VLVisionRotaryEmbedding,
        )

        return Qwen3VLVisionBlock(config), partial(Qwen3VLVisionRotaryEmbedding, config)

    def feed(self, normed_RD: Tensor) -> Tensor:
        made: Tensor = self.layer.mlp(normed_RD)
        return made


class Merger(QwenLayer):
    """Qwen3VLVisionPatchMerger: the m × m patches of a merge block become one row.

    The tower's last merger normalises patches, those of inner blocks (DeepStack) whole merge
    blocks.
    """

    kind = "merger"
    reads = ("image_hidden",)
    division = colwise("linear_fc1") | rowwise("linear_fc2")

    def __init__(self, module: str, config: Any, writes: str, level: int | None = None) -> None:
        from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionPatchMerger

        inner = level is not None
        super().__init__(module, f"deepstack.{level}" if inner else "merger", config)
        self.writes = (
            TensorSpec(writes, "image", "tokens", (config.out_hidden_size,), split=True),
        )
        self.joint = writes != MERGED
        self.merger = Qwen3VLVisionPatchMerger(config, use_postshuffle_norm=inner)
        self.published = {"merger": f"deepstack_merger_list.{level}" if inner else "merger"}
        if inner:
            self.kind = "deepstack"

    def compute(self, state: dict[str, Tensor], batch: Batch) -> dict[str, Tensor]:
        merger, hidden = self.merger, state["image_hidden"]

        def merge(rows_RD: Tensor) -> Tensor:
            blocks = self.blocks(rows_RD, batch)
            # every rank normalises all blocks: local rows may end inside one
            normed = merger.norm(blocks) if merger.use_postshuffle_norm else blocks
            made: Tensor = merger.linear_fc2(merger.act_fn(merger.linear_fc1(normed)))
            return made

        own = hidden if merger.use_postshuffle_norm else merger.norm(hidden)
        return {self.writes[0].name: across(merge, own, self.rows(batch), self.group)}


def makers(module: str, config: Any, *projector: int) -> list[LayerMaker]:
    """Return the layer factories of an image encoder in pipeline order.

    `projector`: its hidden and its output width, if there is one.
    """
    std = config.initializer_range
    made = [LayerMaker(partial(Embed, module, config), std)]
    for number in range(config.depth):
        made.append(LayerMaker(partial(Block, module, number, config), std))
        if number in config.deepstack_visual_indexes:
            level = list(config.deepstack_visual_indexes).index(number)
            merger = partial(Merger, module, config, features_name(level), level)
            made.append(LayerMaker(merger, std))
    last = partial(Merger, module, config, MERGED if projector else EMBEDS)
    return [
        *made,
        LayerMaker(last, std),
        *(LayerMaker(partial(Projector, module, config, *projector), std) for _ in projector[:1]),
    ]
