"""diffusers' FluxTransformer2DModel as pipeline layers.

In order: projector, in, double block × n, single block × m, out with the image loss. A flow like
SD3 (`sd3`), but its patches are 2 × 2 latents, its positions are rotations of queries and keys by
an image's rows and columns (`rotary`), and its last blocks have one set of weights for image and
conditioning together, with attention and FFN in parallel. A model that is distilled to a guidance
scale (`guidance_embeds`) receives `GUIDANCE`, in training and in sampling.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache, partial
from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from disttrain_cli.models.building import LayerMaker
from disttrain_cli.models.configs.generators import FLUX_PATCH, whole_model
from disttrain_cli.models.division import colwise, per_head, rowwise
from disttrain_cli.models.fused import with_own_norms
from disttrain_cli.models.generator import (
    Canvas,
    Finish,
    GeneratorLayer,
    Projector,
    Start,
    even_sigmas,
    filled,
)
from disttrain_cli.models.layer import Batch, PipelineLayer, TensorSpec
from disttrain_cli.models.processors import with_own_attention
from disttrain_cli.models.rotary import turns
from disttrain_cli.models.sd3 import DIVISION

#: Guidance scale with which diffusers trains guidance-distilled models.
GUIDANCE = 3.5
#: Times and guidance are embedded in thousandths.
SCALE = 1000.0

SINGLE = {
    **colwise("to_q", "to_k", "to_v"),
    **colwise("proj_mlp", packed=(1,) * 4),  # the features of a parallel FFN
    **rowwise("proj_out", packed=(1,) * 5),  # an attention's features and the FFN's four
    **per_head("norm_q", "norm_k"),
}


def packed(image_NCHW: Tensor, patch: int) -> Tensor:
    """Return square patches in raster order [N, P, C · patch · patch]."""
    return functional.pixel_unshuffle(image_NCHW, patch).flatten(2).transpose(1, 2)


def unpacked(patches_NPV: Tensor, patch: int, grid: tuple[int, int]) -> Tensor:
    """Return images [N, C, H, W]; the inverse of `packed`."""
    return functional.pixel_shuffle(patches_NPV.transpose(1, 2).unflatten(2, grid), patch)


class Stream:
    """Tensors passed from block to block."""

    def __init__(self, width: int, canvas: Canvas, patch: int = FLUX_PATCH) -> None:
        self.canvas, self.patch = canvas, patch
        self.patches = canvas.patches((canvas.shape[1] // patch) ** 2, width)
        self.conditioning = TensorSpec("conditioning", "target", "tokens", (width,))
        self.time = TensorSpec("time_embedding", "target", "one", (width,))


class In(Start):
    """Noisy latents → patches; timestep and pooled context → modulation; projected conditioning."""

    def __init__(self, module: str, whole: Any, canvas: Canvas, stream: Stream) -> None:
        super().__init__(module, canvas)
        self.published = {
            name: name for name in ("x_embedder", "time_text_embed", "context_embedder")
        }
        self.reads = (*canvas.reads, "conditioning", "pooled")
        self.writes = (stream.patches, stream.time, stream.conditioning)
        self.x_embedder, self.time_text_embed, self.context_embedder = (
            copy.deepcopy(getattr(whole, name)) for name in self.published
        )
        self.guided = bool(whole.config.guidance_embeds)

    def sigmas(self, steps: int) -> list[float]:
        return even_sigmas(steps)

    def start(
        self, state: dict[str, Tensor], noisy_NCHW: Tensor, times_N: Tensor
    ) -> dict[str, Tensor]:
        dtype, times = self.x_embedder.weight.dtype, times_N * (SCALE / self.canvas.noise.timesteps)
        conditions = [times]
        if self.guided:
            guidance = filled(len(noisy_NCHW), (GUIDANCE * SCALE,), noisy_NCHW)
            conditions.append(guidance.flatten())
        return {
            "patches": self.x_embedder(packed(noisy_NCHW.to(dtype), FLUX_PATCH)),
            "time_embedding": self.time_text_embed(*conditions, state["pooled"]),
            "conditioning": self.context_embedder(state["conditioning"]),
        }


class Block(GeneratorLayer):
    """diffusers' FluxTransformerBlock or FluxSingleTransformerBlock."""

    reads = ("patches", "conditioning", "time_embedding")

    def __init__(
        self,
        module: str,
        kind: str,
        number: int,
        block: nn.Module,
        config: dict[str, Any],
        context_tokens: int,
        stream: Stream,
    ) -> None:
        super().__init__()
        self.canvas, self.buckets = stream.canvas, stream.canvas.buckets
        self.name, self.module, self.kind = f"{module}.{kind}.{number}", module, kind
        self.context_tokens, self.axes = context_tokens, tuple(config["axes_dims_rope"])
        self.division = DIVISION if kind == "double" else SINGLE
        self.writes = (stream.patches, stream.conditioning)
        path = "transformer_blocks" if kind == "double" else "single_transformer_blocks"
        self.published = {"block": f"{path}.{number}"}
        self.block = with_own_norms(with_own_attention(copy.deepcopy(block)))

    def compute(self, state: dict[str, Tensor], batch: Batch) -> dict[str, Tensor]:
        patches, grid = state["patches"], self.canvas.grid(batch, FLUX_PATCH)
        conditioning, patches = self.block(
            hidden_states=patches,
            encoder_hidden_states=state["conditioning"].unflatten(0, (-1, self.context_tokens)),
            temb=state["time_embedding"],
            image_rotary_emb=turns(self.context_tokens, grid, self.axes, "flux", patches),
        )
        return {"patches": patches, "conditioning": conditioning.flatten(0, 1)}


class Out(Finish):
    """Last norm, modulated by the timestep, and the patches' latents."""

    def __init__(self, module: str, whole: Any, stream: Stream, weight: float) -> None:
        super().__init__(module, stream.canvas, weight, ("patches", "time_embedding"))
        self.patch = stream.patch
        self.published = {name: name for name in ("norm_out", "proj_out")}
        self.norm_out, self.proj_out = copy.deepcopy(whole.norm_out), copy.deepcopy(whole.proj_out)

    def predict(self, state: dict[str, Tensor], batch: Batch) -> Tensor:
        packed_NPV = self.proj_out(self.norm_out(state["patches"], state["time_embedding"]))
        return unpacked(packed_NPV, self.patch, self.canvas.grid(batch, self.patch)).float()


def makers(
    module: str,
    config: dict[str, Any],
    canvas: Canvas,
    context_tokens: int,
    projector_hidden: int,
    llm_width: int,
    loss_weight: float,
) -> list[LayerMaker]:
    """Return the layer factories of Flux's transformer in pipeline order.

    Weights are initialised as in diffusers.

    Raises:
        SpecError: diffusers rejects the configuration.
    """
    whole = cache(partial(whole_model, module, "flux", config))
    stream = Stream(whole().inner_dim, canvas)
    construct: list[Callable[[], PipelineLayer]] = [
        partial(
            Projector,
            module,
            llm_width,
            projector_hidden,
            config["joint_attention_dim"],
            context_tokens,
            config["pooled_projection_dim"],
        ),
        lambda: In(module, whole(), canvas, stream),
    ]
    for kind, blocks in (
        ("double", whole().transformer_blocks),
        ("single", whole().single_transformer_blocks),
    ):
        construct += [
            partial(Block, module, kind, number, block, config, context_tokens, stream)
            for number, block in enumerate(blocks)
        ]
    construct.append(lambda: Out(module, whole(), stream, loss_weight))
    return [LayerMaker(make, None) for make in construct]
