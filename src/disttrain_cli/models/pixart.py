"""diffusers' PixArtTransformer2DModel as pipeline layers.

In order: projector, in, block × n, out with the image loss. A diffusion transformer (Peebles and
Xie 2023) with cross-attention and one shared modulation of all blocks by the timestep, adaLN-single
(Chen et al. 2023, arXiv 2310.00426, section 2.3). Rows of an image: its patches in raster order,
one row of shape [P, D]. If the model also predicts a variance, that half of its channels is not
trained.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from disttrain_cli.models.building import LayerMaker
from disttrain_cli.models.configs.generators import whole_model
from disttrain_cli.models.division import colwise, rowwise
from disttrain_cli.models.dropout import seeded
from disttrain_cli.models.generator import (
    Canvas,
    Finish,
    GeneratorLayer,
    Projector,
    Start,
    filled,
    from_patches,
)
from disttrain_cli.models.host import constant
from disttrain_cli.models.layer import Batch, PipelineLayer, TensorSpec
from disttrain_cli.models.processors import with_own_attention

# Heads and FFN of a block, whose first linear returns value and gate, or only a value.
PLAIN = {
    **colwise("to_q", "to_k", "to_v", "ff.net.0.proj"),
    **rowwise("to_out.0", "ff.net.2"),
}
GATED = PLAIN | colwise("ff.net.0.proj", packed=(1, 1))


class In(Start):
    """Noisy latents → patches with sinusoidal positions; timestep → modulation; conditioning.

    The conditioning is projected to the blocks' width.
    """

    def __init__(self, module: str, whole: Any, canvas: Canvas) -> None:
        super().__init__(module, canvas)
        self.published = {"proj": "pos_embed.proj"} | {
            n: n for n in ("adaln_single", "caption_projection")
        }
        width, self.patches_per_side = whole.inner_dim, whole.pos_embed.height
        self.interpolation = whole.pos_embed.interpolation_scale
        self.sees_size = whole.use_additional_conditions
        self.reads = (*canvas.reads, "conditioning")
        self.writes = (
            TensorSpec("patches", "target", "one", (self.patches_per_side**2, width)),
            TensorSpec("modulation", "target", "one", (6 * width,)),
            TensorSpec("time_embedding", "target", "one", (width,)),
        )
        self.proj, self.adaln_single = (
            copy.deepcopy(whole.pos_embed.proj),
            copy.deepcopy(whole.adaln_single),
        )
        self.caption_projection = copy.deepcopy(whole.caption_projection)
        if self.caption_projection is not None:
            self.writes += (TensorSpec("conditioning", "target", "tokens", (width,)),)

    def start(
        self, state: dict[str, Tensor], noisy_NCHW: Tensor, times_N: Tensor
    ) -> dict[str, Tensor]:
        dtype, count = self.proj.weight.dtype, len(noisy_NCHW)
        patches_NPD = self.proj(noisy_NCHW.to(dtype)).flatten(2).transpose(1, 2)
        size = None
        if self.sees_size:
            side = float(self.canvas.image_size)
            size = {
                "resolution": filled(count, (side, side), noisy_NCHW),
                "aspect_ratio": filled(count, (1.0,), noisy_NCHW),
            }
        modulation, embedding = self.adaln_single(
            times_N, size, batch_size=count, hidden_dtype=dtype
        )
        result = {
            "patches": patches_NPD + self._positions(patches_NPD),
            "modulation": modulation,
            "time_embedding": embedding,
        }
        if self.caption_projection is not None:
            result["conditioning"] = self.caption_projection(state["conditioning"])
        return result

    def _positions(self, patches_NPD: Tensor) -> Tensor:
        """Return sinusoids [P, D] in the dtype of the patches; they are not weights."""
        if patches_NPD.is_meta:
            return patches_NPD.new_empty(patches_NPD.shape[1:])
        return constant(
            _positions,
            patches_NPD.shape[-1],
            self.patches_per_side,
            self.interpolation,
            device=patches_NPD.device,
            dtype=patches_NPD.dtype,
        )


def _positions(width: int, side: int, interpolation: float) -> Tensor:
    from diffusers.models.embeddings import get_2d_sincos_pos_embed

    positions: Tensor = get_2d_sincos_pos_embed(
        width, side, base_size=side, interpolation_scale=interpolation, output_type="pt"
    )
    return positions.float()


class Block(GeneratorLayer):
    """diffusers' BasicTransformerBlock."""

    kind = "block"
    reads = ("patches", "modulation", "conditioning")

    def __init__(
        self,
        module: str,
        number: int,
        block: nn.Module,
        gated: bool,
        context_tokens: int,
        spec: TensorSpec,
    ) -> None:
        super().__init__()
        self.name, self.module, self.context_tokens = (
            f"{module}.block.{number}",
            module,
            context_tokens,
        )
        self.writes = (spec,)
        self.published = {"block": f"transformer_blocks.{number}"}
        self.block: Any = with_own_attention(copy.deepcopy(block))
        self.division = GATED if gated else PLAIN
        seeded(self)

    def compute(self, state: dict[str, Tensor], batch: Batch) -> dict[str, Tensor]:
        conditioning_NKD = state["conditioning"].unflatten(0, (-1, self.context_tokens))
        patches = self.block(
            state["patches"], encoder_hidden_states=conditioning_NKD, timestep=state["modulation"]
        )
        return {"patches": patches}


class Out(Finish):
    """Last norm, modulated by the timestep, and the patches' pixels."""

    def __init__(self, module: str, whole: Any, canvas: Canvas, weight: float) -> None:
        super().__init__(module, canvas, weight, ("patches", "time_embedding"))
        self.published = {name: name for name in ("scale_shift_table", "proj_out")}
        self.patch = whole.pos_embed.patch_size
        self.norm_out, self.proj_out = copy.deepcopy(whole.norm_out), copy.deepcopy(whole.proj_out)
        self.scale_shift_table = nn.Parameter(torch.empty_like(whole.scale_shift_table))

    def predict(self, state: dict[str, Tensor], batch: Batch) -> Tensor:
        shift, scale = (self.scale_shift_table[None] + state["time_embedding"][:, None]).chunk(
            2, dim=1
        )
        pixels = self.proj_out(self.norm_out(state["patches"]) * (1 + scale) + shift)
        # the other half, if there is one, is a variance
        grid = self.canvas.grid(batch, self.patch)
        return from_patches(pixels, self.patch, grid)[:, : self.canvas.shape[0]].float()


def makers(
    module: str,
    config: dict[str, Any],
    canvas: Canvas,
    context_tokens: int,
    projector_hidden: int,
    llm_width: int,
    loss_weight: float,
) -> list[LayerMaker]:
    """Return the layer factories of a diffusion transformer in pipeline order.

    Weights are initialised as in diffusers.

    Raises:
        SpecError: diffusers rejects the configuration.
    """
    whole = cache(partial(whole_model, module, "pixart", config))
    conditioning = config["caption_channels"] or config["cross_attention_dim"]
    spec = TensorSpec(
        "patches", "target", "one", (whole().pos_embed.height ** 2, whole().inner_dim)
    )
    construct: list[Callable[[], PipelineLayer]] = [
        partial(Projector, module, llm_width, projector_hidden, conditioning),
        lambda: In(module, whole(), canvas),
        *(
            partial(_block, whole, module, config, i, context_tokens, spec)
            for i in range(config["num_layers"])
        ),
        lambda: Out(module, whole(), canvas, loss_weight),
    ]
    return [LayerMaker(make, None) for make in construct]


def _block(
    whole: Callable[[], Any],
    module: str,
    config: dict[str, Any],
    number: int,
    context_tokens: int,
    spec: TensorSpec,
) -> Block:
    gated = config["activation_fn"] == "geglu"
    return Block(module, number, whole().transformer_blocks[number], gated, context_tokens, spec)
