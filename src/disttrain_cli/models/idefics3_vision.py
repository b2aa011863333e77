"""transformers' Idefics3 vision tower, also SmolVLM's, as pipeline layers.

It is SigLIP's except for its positions: a patch of an image of any grid uses the learned position
of its location in a square; nothing is interpolated (NaViT, Dehghani et al. 2023, arXiv
2307.06304).
"""

from __future__ import annotations

from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from disttrain_cli.models.building import LayerMaker
from disttrain_cli.models.host import to_device
from disttrain_cli.models.projectors import Joint, projector
from disttrain_cli.models.towers import Block, PatchEmbed


class Embed(PatchEmbed):
    """Pixels [N, C, H, W] → a convolution of each patch, plus the position of its location."""

    def placed(self, table_PD: Tensor, rows: int, columns: int) -> Tensor:
        side = round(len(table_PD) ** 0.5)
        return table_PD.index_select(0, to_device(places(rows, columns, side), table_PD.device))


@lru_cache(maxsize=1024)
def places(rows: int, columns: int, side: int) -> Tensor:
    """Return [rows · columns] position indices in a square of `side` × `side`.

    Uses the operations of Idefics3VisionEmbeddings, so that they round alike.
    """
    with torch.device("cpu"):
        bounds = torch.arange(1 / side, 1.0, 1 / side)
        down, across = (
            torch.bucketize(
                torch.clamp(
                    torch.arange(length, dtype=torch.float32) * (1.0 / torch.tensor(length)),
                    max=1.0 - 1e-6,
                ),
                bounds,
                right=True,
            )
            for length in (rows, columns)
        )
        return (down[:, None] * side + across).flatten()


def _block(module: str, number: int, config: Any) -> Block:
    from transformers.models.idefics3.modeling_idefics3 import Idefics3EncoderLayer

    return Block(module, number, config, Idefics3EncoderLayer(config), extra=0)


def makers(module: str, config: Any, joint: Joint, final_norm: bool = True) -> list[LayerMaker]:
    """Return the layer factories of an image encoder in pipeline order.

    Without `final_norm` the LLM reads the last block's output unnormalised.
    """
    std = config.initializer_range
    norm = "post_layernorm" if final_norm else None
    return [
        LayerMaker(partial(Embed, module, config, class_token=False), std),
        *(
            LayerMaker(partial(_block, module, i, config), std)
            for i in range(config.num_hidden_layers)
        ),
        projector(module, config, norm, 0, joint, std),
    ]
