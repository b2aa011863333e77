"""diffusers' QwenImageTransformer2DModel as pipeline layers.

In order: projector, in, block × n, out with the image loss. Qwen-Image (Wu et al. 2025, arXiv
2508.02324, section 2.4): joint attention like SD3's (`sd3`) over patches of 2 × 2 latents like
Flux's (`flux`), without a pooled vector. Rows and columns are rotated from an image's centre, and
the conditioning follows it on the diagonal of all three axes (section 2.4, MSRoPE).
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache, partial
from typing import Any

from torch import Tensor

from disttrain_cli.models.building import LayerMaker
from disttrain_cli.models.configs.generators import whole_model
from disttrain_cli.models.division import colwise, per_head, rowwise
from disttrain_cli.models.flux import Out, Stream, packed
from disttrain_cli.models.fused import with_own_norms
from disttrain_cli.models.generator import (
    Canvas,
    GeneratorLayer,
    Projector,
    Start,
    even_sigmas,
)
from disttrain_cli.models.layer import Batch, PipelineLayer
from disttrain_cli.models.processors import with_own_attention
from disttrain_cli.models.rotary import turns

# Heads and FFNs of both streams are sharded; the timestep's modulation is replicated.
DIVISION = {
    **colwise("to_q", "to_k", "to_v", "add_q_proj", "add_k_proj", "add_v_proj"),
    **colwise("img_mlp.net.0.proj", "txt_mlp.net.0.proj"),
    **rowwise("to_out.0", "to_add_out", "img_mlp.net.2", "txt_mlp.net.2"),
    **per_head("norm_q", "norm_k", "norm_added_q", "norm_added_k"),
}


class In(Start):
    """Noisy latents → patches; timestep → modulation; projected conditioning."""

    def __init__(self, module: str, whole: Any, stream: Stream) -> None:
        super().__init__(module, stream.canvas)
        self.published = {
            name: name for name in ("img_in", "txt_norm", "txt_in", "time_text_embed")
        }
        self.reads = (*stream.canvas.reads, "conditioning")
        self.writes = (stream.patches, stream.time, stream.conditioning)
        self.patch = stream.patch
        self.img_in, self.txt_in, self.time_text_embed = (
            copy.deepcopy(getattr(whole, name)) for name in ("img_in", "txt_in", "time_text_embed")
        )
        self.txt_norm = copy.deepcopy(whole.txt_norm)
        with_own_norms(self)

    def sigmas(self, steps: int) -> list[float]:
        return even_sigmas(steps)

    def start(
        self, state: dict[str, Tensor], noisy_NCHW: Tensor, times_N: Tensor
    ) -> dict[str, Tensor]:
        patches = self.img_in(packed(noisy_NCHW.to(self.img_in.weight.dtype), self.patch))
        return {
            "patches": patches,
            "time_embedding": self.time_text_embed(times_N / self.canvas.noise.timesteps, patches),
            "conditioning": self.txt_in(self.txt_norm(state["conditioning"])),
        }


class Block(GeneratorLayer):
    """diffusers' QwenImageTransformerBlock."""

    reads = ("patches", "conditioning", "time_embedding")
    division = DIVISION

    def __init__(self, module: str, number: int, whole: Any, stream: Stream) -> None:
        super().__init__()
        self.stream, self.axes = stream, tuple(whole.config.axes_dims_rope)
        self.buckets = stream.canvas.buckets
        self.name, self.module = f"{module}.block.{number}", module
        # what the last block makes of the conditioning is not read
        last = number == len(whole.transformer_blocks) - 1
        self.kind = "block.last" if last else "block"
        self.writes = (stream.patches, *(() if last else (stream.conditioning,)))
        self.published = {"block": f"transformer_blocks.{number}"}
        self.block = with_own_norms(
            with_own_attention(copy.deepcopy(whole.transformer_blocks[number]))
        )

    def compute(self, state: dict[str, Tensor], batch: Batch) -> dict[str, Tensor]:
        patches, stream = state["patches"], self.stream
        conditioning_NKD = state["conditioning"].unflatten(0, (len(patches), -1))
        grid, context = stream.canvas.grid(batch, stream.patch), conditioning_NKD.shape[1]
        conditioning_NKD, patches = self.block(
            hidden_states=patches,
            encoder_hidden_states=conditioning_NKD,
            encoder_hidden_states_mask=None,
            temb=state["time_embedding"],
            image_rotary_emb=turns(context, grid, self.axes, "qwen_image", patches),
        )
        made = {"patches": patches, "conditioning": conditioning_NKD.flatten(0, 1)}
        return {spec.name: made[spec.name] for spec in self.writes}


def makers(
    module: str,
    config: dict[str, Any],
    canvas: Canvas,
    context_tokens: int,
    projector_hidden: int,
    llm_width: int,
    loss_weight: float,
) -> list[LayerMaker]:
    """Return the layer factories of Qwen-Image's transformer in pipeline order.

    Weights are initialised as in diffusers.

    Raises:
        SpecError: diffusers rejects the configuration.
    """
    whole = cache(partial(whole_model, module, "qwen_image", config))
    stream = Stream(whole().inner_dim, canvas, config["patch_size"])
    width = config["joint_attention_dim"]
    construct: list[Callable[[], PipelineLayer]] = [
        partial(Projector, module, llm_width, projector_hidden, width, context_tokens),
        lambda: In(module, whole(), stream),
        *(
            partial(Block, module, number, whole(), stream)
            for number in range(config["num_layers"])
        ),
        lambda: Out(module, whole(), stream, loss_weight),
    ]
    return [LayerMaker(make, None) for make in construct]
