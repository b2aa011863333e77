"""transformers' CLIP vision tower as pipeline layers: embed, block × n, projector.

The LLM reads the patches; the pooled class token is not used. The patches of the last block pass
through the tower's final norm, which CLIP itself applies to its class token only; those of an inner
block (`feature_layer`) do not.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from disttrain_cli.models.building import LayerMaker
from disttrain_cli.models.projectors import Joint, projector
from disttrain_cli.models.towers import Block, PatchEmbed


def _block(module: str, number: int, config: Any) -> Block:
    from transformers.models.clip.modeling_clip import CLIPEncoderLayer

    return Block(module, number, config, CLIPEncoderLayer(config), extra=1)


def makers(module: str, config: Any, joint: Joint, final_norm: bool = True) -> list[LayerMaker]:
    """Return the layer factories of an image encoder in pipeline order.

    Without `final_norm` the LLM reads the last block's output unnormalised.
    """
    std = config.initializer_range
    norm = "post_layernorm" if final_norm else None
    return [
        LayerMaker(partial(PatchEmbed, module, config, class_token=True), std),
        *(
            LayerMaker(partial(_block, module, i, config), std)
            for i in range(config.num_hidden_layers)
        ),
        projector(module, config, norm, 1, joint, std),
    ]
