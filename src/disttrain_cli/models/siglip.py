"""transformers' SigLIP vision tower as pipeline layers: embed, block × n, projector into the LLM's
width.

The LLM reads the patches; the tower's pooling head is not used. There is no class token.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from disttrain_cli.models.building import LayerMaker
from disttrain_cli.models.towers import Block, PatchEmbed, Projector

#: Deviation of initial weights; SigLIP's configuration has no field for it.
STD = 0.02


def _block(module: str, number: int, config: Any) -> Block:
    from transformers.models.siglip.modeling_siglip import SiglipEncoderLayer

    return Block(module, number, config, SiglipEncoderLayer(config), extra=0)


def makers(
    module: str,
    config: Any,
    merge: int,
    projector_hidden: int,
    llm_width: int,
    final_norm: bool = True,
) -> list[LayerMaker]:
    """The layers of an image encoder in pipeline order; without `final_norm` the LLM reads a block
    as it is."""
    norm = "post_layernorm" if final_norm else None
    return [
        LayerMaker(partial(PatchEmbed, module, config, class_token=False), STD),
        *(
            LayerMaker(partial(_block, module, i, config), STD)
            for i in range(config.num_hidden_layers)
        ),
        LayerMaker(
            partial(Projector, module, config, norm, 0, merge, projector_hidden, llm_width), STD
        ),
    ]
