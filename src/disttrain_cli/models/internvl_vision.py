"""transformers' InternVL vision tower as pipeline layers: embed, block × n, projector.

A ViT whose blocks scale their residual branches per feature (layer scale, Touvron et al. 2021,
arXiv 2103.17239), with LayerNorm or RMSNorm, and in its largest form with a norm of queries and
keys over all heads at once (Chen et al. 2024, arXiv 2312.14238). Rows of an image: the class token,
then its patches in raster order.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor

from disttrain_cli.models import vit
from disttrain_cli.models.attention import attend
from disttrain_cli.models.building import LayerMaker
from disttrain_cli.models.configs.encoders import side_of
from disttrain_cli.models.division import colwise, rowwise
from disttrain_cli.models.fused import RmsNorm, with_own_norms
from disttrain_cli.models.group import Group
from disttrain_cli.models.layer import Batch, TensorSpec
from disttrain_cli.models.parallel import across, copy, reduce
from disttrain_cli.models.projectors import Joint, projector
from disttrain_cli.models.towers import ImageLayer, images_of

#: Deviation of a new projector's weights: that of published towers is 1e-10.
PROJECTOR_STD = 0.02


class Embed(vit.Embed):
    """Pixels → patches with class token and interpolated positions, under InternVL's names."""

    def embeddings_of(self, config: Any) -> Any:
        from transformers.models.internvl.modeling_internvl import InternVLVisionEmbeddings

        made = InternVLVisionEmbeddings(config)
        made.patch_size = side_of(config.patch_size)
        return made


class Block(ImageLayer):
    """transformers' InternVLVisionLayer."""

    kind = "block"
    extra = 1
    row_by_row = True
    reads = ("image_hidden",)
    division = colwise("q_proj", "k_proj", "v_proj", "fc1") | rowwise("projection_layer", "fc2")

    def __init__(self, module: str, number: int, config: Any) -> None:
        from transformers.models.internvl.modeling_internvl import InternVLVisionLayer

        super().__init__()
        self.name, self.module = f"{module}.block.{number}", module
        self.writes = (
            TensorSpec("image_hidden", "image", "patches", (config.hidden_size,), split=True),
        )
        self.layer = with_own_norms(InternVLVisionLayer(config))
        heads = config.num_attention_heads
        self.exchanged = (heads, heads, config.hidden_size // heads)
        self.starts = dict.fromkeys(("lambda_1", "lambda_2"), config.layer_scale_init_value)
        self.published = {"layer": f"encoder.layer.{number}"}

    def compute(self, state: dict[str, Tensor], batch: Batch) -> dict[str, Tensor]:
        layer, hidden = self.layer, state["image_hidden"]
        rows = self.rows(batch)
        attended = across(
            partial(self._attention, batch), layer.layernorm_before(hidden), rows, self.group
        )
        hidden = hidden + layer.lambda_1 * attended
        fed = across(layer.mlp, layer.layernorm_after(hidden), rows, self.group)
        return {"image_hidden": hidden + layer.lambda_2 * fed}

    def _attention(self, batch: Batch, normed_RD: Tensor) -> Tensor:
        attention = self.layer.attention
        query, key, value = (
            linear(normed_RD) for linear in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        if isinstance(attention.q_norm, RmsNorm):
            query = over_heads(attention.q_norm, query, self.group)
            key = over_heads(attention.k_norm, key, self.group)
        query, key, value = (
            rows.unflatten(-1, (-1, attention.head_dim)) for rows in (query, key, value)
        )
        made = attend(query, key, value, images_of(batch, 1, normed_RD, self.cp))
        projected: Tensor = attention.projection_layer(made.flatten(1))
        return projected


def over_heads(norm: RmsNorm, own_RD: Tensor, group: Group | None) -> Tensor:
    """Return a norm over the heads of all ranks from local heads: their squares are all-reduced."""
    width, own = len(norm.weight), own_RD.shape[-1]
    if own == width:
        made: Tensor = norm(own_RD)
        return made
    rank = 0 if group is None else group.rank
    exact = own_RD.float()
    squares = copy(reduce(exact.pow(2).sum(-1, keepdim=True), group), group)
    weight = norm.weight[rank * own : (rank + 1) * own]
    return (exact * (squares / width + norm.eps).rsqrt() * weight).to(own_RD.dtype)


def makers(module: str, config: Any, joint: Joint, final_norm: bool = True) -> list[LayerMaker]:
    """Return the layer factories of an image encoder in pipeline order.

    Without `final_norm` the LLM reads the last block's output unnormalised. The tower has a final
    norm only if its class does not expect mean pooling.
    """
    std = config.initializer_range
    norm = "layernorm" if final_norm and not config.use_mean_pooling else None
    return [
        LayerMaker(partial(Embed, module, config), std),
        *(
            LayerMaker(partial(Block, module, i, config), std)
            for i in range(config.num_hidden_layers)
        ),
        projector(module, config, norm, 1, joint, PROJECTOR_STD),
    ]
