"""Vision towers of CLIP, SigLIP, Idefics3 and SmolVLM as layers: embed, block × n, projector.

The LLM reads the patches. Not used are CLIP's pooled class token and SigLIP's pooling head. The
patches of the last block pass through the tower's final norm, which CLIP itself applies to its
class token only; those of an inner block (`feature_layer`) do not.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from disttrain_cli.models.building import LayerMaker
from disttrain_cli.models.host import to_device
from disttrain_cli.models.projectors import Joint, projector
from disttrain_cli.models.towers import Block, PatchEmbed

#: Deviation of initial weights where the configuration has no field for it (SigLIP's).
STD = 0.02


class SquareEmbed(PatchEmbed):
    """Pixels [N, C, H, W] → a convolution of each patch, plus the position of its location.

    Idefics3's: a patch of an image of any grid uses the learned position of its location in a
    square; nothing is interpolated (NaViT, Dehghani et al. 2023, arXiv 2307.06304).
    """

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


def _clip_layer(config: Any) -> nn.Module:
    from transformers.models.clip.modeling_clip import CLIPEncoderLayer

    return CLIPEncoderLayer(config)


def _siglip_layer(config: Any) -> nn.Module:
    from transformers.models.siglip.modeling_siglip import SiglipEncoderLayer

    return SiglipEncoderLayer(config)


def _idefics3_layer(config: Any) -> nn.Module:
    from transformers.models.idefics3.modeling_idefics3 import Idefics3EncoderLayer

    return Idefics3EncoderLayer(config)


class Tower(NamedTuple):
    """Difference of a family's tower from the others."""

    layer: Callable[[Any], nn.Module]  # the library's encoder layer of a configuration
    embed: type[PatchEmbed] = PatchEmbed
    class_token: bool = False


CLIP = Tower(_clip_layer, class_token=True)
SIGLIP = Tower(_siglip_layer)
IDEFICS3 = Tower(_idefics3_layer, SquareEmbed)


def _block(tower: Tower, module: str, number: int, config: Any) -> Block:
    return Block(module, number, config, tower.layer(config), int(tower.class_token))


def makers(
    tower: Tower, module: str, config: Any, joint: Joint, final_norm: bool = True
) -> list[LayerMaker]:
    """Return the layer factories of an image encoder in pipeline order.

    Without `final_norm` the LLM reads the last block's output unnormalised.
    """
    std, extra = getattr(config, "initializer_range", STD), int(tower.class_token)

    return [
        LayerMaker(partial(tower.embed, module, config, tower.class_token), std),
        *(
            LayerMaker(partial(_block, tower, module, number, config), std)
            for number in range(config.num_hidden_layers)
        ),
        projector(module, config, "post_layernorm" if final_norm else None, extra, joint, std),
    ]
