"""transformers' SigLIP vision tower as pipeline layers: embed, block × n, projector.

The LLM reads the patches; the tower's pooling head is not used. There is no class token.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from disttrain_cli.models.building import LayerMaker
from disttrain_cli.models.projectors import Joint, projector
from disttrain_cli.models.towers import Block, PatchEmbed

#: Deviation of initial weights; SigLIP's configuration has no field for it.
STD = 0.02


def _block(module: str, number: int, config: Any) -> Block:
    from transformers.models.siglip.modeling_siglip import SiglipEncoderLayer

    return Block(module, number, config, SiglipEncoderLayer(config), extra=0)


def makers(module: str, config: Any, joint: Joint, final_norm: bool = True) -> list[LayerMaker]:
    """Return the layer factories of an image encoder in pipeline order.

    Without `final_norm` the LLM reads the last block's output unnormalised.
    """
    norm = "post_layernorm" if final_norm else None
    return [
        LayerMaker(partial(PatchEmbed, module, config, class_token=False), STD),
        *(
            LayerMaker(partial(_block, module, i, config), STD)
            for i in range(config.num_hidden_layers)
        ),
        projector(module, config, norm, 0, joint, STD),
    ]
