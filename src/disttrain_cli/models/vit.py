"""transformers' ViT as pipeline layers: embed, block × n, projector into the LLM's width.

Images keep their own grid (`towers`). Rows of an image: the class token, then its patches in raster
order.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from disttrain_cli.models.attention import not_empty
from disttrain_cli.models.building import LayerMaker
from disttrain_cli.models.division import colwise, rowwise
from disttrain_cli.models.dropout import seeded
from disttrain_cli.models.layer import Batch, TensorSpec
from disttrain_cli.models.parallel import across, split
from disttrain_cli.models.projectors import Joint, projector
from disttrain_cli.models.towers import ImageLayer, images_of, positions


class Embed(ImageLayer):
    """Pixels → patches with class token and interpolated positions.

    See Dosovitskiy et al. 2021, section 3.1.
    """

    kind = "embed"
    extra = 1
    needs = ("image",)

    def __init__(self, module: str, config: Any) -> None:
        super().__init__()
        self.name, self.module = f"{module}.embed", module
        self.writes = (
            TensorSpec("image_hidden", "image", "patches", (config.hidden_size,), split=True),
        )
        self.embeddings = self.embeddings_of(config)
        self.dropout, self.embeddings.dropout = (
            self.embeddings.dropout,
            nn.Identity(),
        )  # applied to the rows of all images
        seeded(self)
        self.published = {"embeddings": "embeddings"}

    def embeddings_of(self, config: Any) -> Any:
        """Return the library's embeddings."""
        from transformers.models.vit.modeling_vit import ViTEmbeddings

        return ViTEmbeddings(config)

    def compute(self, state: dict[str, Tensor], batch: Batch) -> dict[str, Tensor]:
        if self.cp is None:
            hidden = torch.cat([self._embed(pixels).flatten(0, 1) for pixels in self.pixels(batch)])
        else:
            conv = self.embeddings.patch_embeddings.projection
            hidden = self.own_embedded(batch, (conv.weight, conv.bias), self._table)
        return {"image_hidden": split(self.dropout(hidden), self.group)}

    def _table(self, rows: int, columns: int) -> Tensor:
        """Return the values added to an image's rows, including the class token's row."""
        table_PD = self.embeddings.position_embeddings.squeeze(0)
        first_1D = self.embeddings.cls_token.squeeze(0) + table_PD[:1]
        return torch.cat([first_1D, positions(table_PD[1:], rows, columns)])

    def _embed(self, pixels: Tensor) -> Tensor:
        """Return [N, P + 1, D]."""
        table_PD, side = self.embeddings.position_embeddings.squeeze(0), self.embeddings.patch_size
        patches_NPD = self.embeddings.patch_embeddings(pixels.to(table_PD.dtype))
        first = (self.embeddings.cls_token + table_PD[0]).expand(len(pixels), -1, -1)
        table = positions(table_PD[1:], pixels.shape[2] // side, pixels.shape[3] // side)
        return torch.cat([first, patches_NPD + table], dim=1)


class Block(ImageLayer):
    """transformers' ViTLayer."""

    kind = "block"
    extra = 1
    row_by_row = True
    reads = ("image_hidden",)
    division = colwise("q_proj", "k_proj", "v_proj", "fc1") | rowwise("o_proj", "fc2")

    def __init__(self, module: str, number: int, config: Any) -> None:
        from transformers.models.vit.modeling_vit import ViTLayer

        super().__init__()
        self.name, self.module = f"{module}.block.{number}", module
        self.writes = (
            TensorSpec("image_hidden", "image", "patches", (config.hidden_size,), split=True),
        )
        self.layer = ViTLayer(config)
        heads = config.num_attention_heads
        self.exchanged = (heads, heads, config.hidden_size // heads)
        seeded(self)
        self.published = {"layer": f"layers.{number}"}

    def compute(self, state: dict[str, Tensor], batch: Batch) -> dict[str, Tensor]:
        layer, hidden, rows = self.layer, state["image_hidden"], self.rows(batch)
        images = images_of(batch, 1, hidden, self.cp)

        def attention(normed_RD: Tensor) -> Tensor:
            return layer.attention(normed_RD[None], images)[0].flatten(0, 1)

        def attend(normed_RD: Tensor) -> Tensor:
            return layer.dropout(not_empty(attention, normed_RD))

        def feed(normed_RD: Tensor) -> Tensor:
            return layer.dropout(layer.mlp(normed_RD))

        hidden = hidden + across(attend, layer.layernorm_before(hidden), rows, self.group)
        hidden = hidden + across(feed, layer.layernorm_after(hidden), rows, self.group)
        return {"image_hidden": hidden}


def makers(module: str, config: Any, joint: Joint, final_norm: bool = True) -> list[LayerMaker]:
    """Return the layer factories of an image encoder in pipeline order.

    Without `final_norm` the LLM reads the last block's output unnormalised.
    """
    std = config.initializer_range
    norm = "layernorm" if final_norm else None
    return [
        LayerMaker(partial(Embed, module, config), std),
        *(
            LayerMaker(partial(Block, module, i, config), std)
            for i in range(config.num_hidden_layers)
        ),
        projector(module, config, norm, 1, joint, std),
    ]
