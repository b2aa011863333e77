"""diffusers' SD3Transformer2DModel as pipeline layers.

In order: projector, in, joint block × n, out with the image loss. A diffusion transformer with one
attention over image and conditioning, each with weights of its own (MMDiT, Esser et al. 2024, arXiv
2403.03206, section 4): Stable Diffusion 3, and 3.5 with normalised queries and keys and, in
`dual_attention_layers`, a second attention of the image alone. The vector per image that the paper
pools from its text encoders is the mean of the context rows through a linear layer
(`generator.Projector`). Rows of an image: its patches in raster order, one row of shape [P, D].
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
from disttrain_cli.models.division import colwise, per_head, rowwise
from disttrain_cli.models.fused import with_own_norms
from disttrain_cli.models.generator import (
    Canvas,
    Finish,
    GeneratorLayer,
    Projector,
    Start,
    from_patches,
)
from disttrain_cli.models.layer import Batch, PipelineLayer, TensorSpec
from disttrain_cli.models.processors import with_own_attention

# Heads and FFNs of both streams are sharded; the timestep's modulation is replicated.
DIVISION = {
    **colwise("to_q", "to_k", "to_v", "add_q_proj", "add_k_proj", "add_v_proj"),
    **colwise("ff.net.0.proj", "ff_context.net.0.proj"),
    **rowwise("to_out.0", "to_add_out", "ff.net.2", "ff_context.net.2"),
    **per_head("norm_q", "norm_k", "norm_added_q", "norm_added_k"),
}


class Patches(nn.Module):
    """Patches of latents, with positions from the centre of a grid of the largest image.

    The grid is saved with the weights and never trained.
    """

    def __init__(self, whole: Any) -> None:
        super().__init__()
        self.side, self.most = whole.height, whole.pos_embed_max_size
        self.proj = copy.deepcopy(whole.proj)
        self.pos_embed = nn.Parameter(torch.empty_like(whole.pos_embed), requires_grad=False)

    def reset_parameters(self) -> None:
        """Set the grid to sinusoids, as diffusers does."""
        from diffusers.models.embeddings import get_2d_sincos_pos_embed

        sinusoids = get_2d_sincos_pos_embed(
            self.pos_embed.shape[-1], self.most, base_size=self.side, output_type="pt"
        )
        self.pos_embed.copy_(sinusoids[None])

    def forward(self, latents_NCHW: Tensor) -> Tensor:
        """Return patches [N, P, D]."""
        patches_NDHW = self.proj(latents_NCHW)
        depth, rows, columns = patches_NDHW.shape[1:]
        if patches_NDHW.is_meta:  # probed sizes may exceed the grid of positions
            grid = self.pos_embed.new_empty(1, columns, rows, depth).transpose(1, 2)
        else:
            whole = self.pos_embed.unflatten(1, (self.most, self.most))
            grid = whole[:, self._middle(rows), self._middle(columns)]
        return patches_NDHW.flatten(2).transpose(1, 2) + grid.flatten(1, 2)

    def _middle(self, patches: int) -> slice:
        first = (self.most - patches) // 2
        return slice(first, first + patches)


class In(Start):
    """Noisy latents → patches; timestep, pooled context → modulation; projected conditioning."""

    def __init__(self, module: str, whole: Any, canvas: Canvas, stream: Stream) -> None:
        super().__init__(module, canvas)
        self.published = {
            name: name for name in ("pos_embed", "time_text_embed", "context_embedder")
        }
        self.reads = (*canvas.reads, "conditioning", "pooled")
        self.writes = (stream.patches, stream.time, stream.conditioning)
        self.pos_embed = Patches(whole.pos_embed)
        self.time_text_embed = copy.deepcopy(whole.time_text_embed)
        self.context_embedder = copy.deepcopy(whole.context_embedder)

    def trains(self, path: str) -> bool:
        return path != "pos_embed.pos_embed" and super().trains(path)

    def start(
        self, state: dict[str, Tensor], noisy_NCHW: Tensor, times_N: Tensor
    ) -> dict[str, Tensor]:
        return {
            "patches": self.pos_embed(noisy_NCHW.to(self.context_embedder.weight.dtype)),
            "time_embedding": self.time_text_embed(times_N, state["pooled"]),
            "conditioning": self.context_embedder(state["conditioning"]),
        }


class Block(GeneratorLayer):
    """diffusers' JointTransformerBlock."""

    reads = ("patches", "conditioning", "time_embedding")
    division = DIVISION

    def __init__(
        self, module: str, number: int, block: Any, context_tokens: int, stream: Stream
    ) -> None:
        super().__init__()
        self.buckets = stream.buckets
        self.name, self.module, self.context_tokens = (
            f"{module}.block.{number}",
            module,
            context_tokens,
        )
        # the last block does not write the conditioning
        self.last = bool(block.context_pre_only)
        self.kind = (
            f"block{'.dual' if block.use_dual_attention else ''}{'.last' if self.last else ''}"
        )
        self.writes = (stream.patches, *(() if self.last else (stream.conditioning,)))
        self.published = {"block": f"transformer_blocks.{number}"}
        self.block = with_own_norms(with_own_attention(copy.deepcopy(block)))

    def compute(self, state: dict[str, Tensor], batch: Batch) -> dict[str, Tensor]:
        conditioning, patches = self.block(
            hidden_states=state["patches"],
            encoder_hidden_states=state["conditioning"].unflatten(0, (-1, self.context_tokens)),
            temb=state["time_embedding"],
        )
        if self.last:
            return {"patches": patches}
        return {"patches": patches, "conditioning": conditioning.flatten(0, 1)}


class Out(Finish):
    """Last norm, modulated by the timestep, and the patches' latents."""

    def __init__(self, module: str, whole: Any, canvas: Canvas, weight: float) -> None:
        super().__init__(module, canvas, weight, ("patches", "time_embedding"))
        self.published = {name: name for name in ("norm_out", "proj_out")}
        self.patch = whole.pos_embed.patch_size
        self.norm_out, self.proj_out = copy.deepcopy(whole.norm_out), copy.deepcopy(whole.proj_out)

    def predict(self, state: dict[str, Tensor], batch: Batch) -> Tensor:
        patches = self.norm_out(state["patches"], state["time_embedding"])
        grid = self.canvas.grid(batch, self.patch)
        return from_patches(self.proj_out(patches), self.patch, grid).float()


class Stream:
    """Tensors passed from block to block."""

    def __init__(self, whole: Any, canvas: Canvas) -> None:
        width, self.buckets = whole.inner_dim, canvas.buckets
        self.patches = canvas.patches(whole.pos_embed.height**2, width)
        self.conditioning = TensorSpec("conditioning", "target", "tokens", (width,))
        self.time = TensorSpec("time_embedding", "target", "one", (width,))


def makers(
    module: str,
    config: dict[str, Any],
    canvas: Canvas,
    context_tokens: int,
    projector_hidden: int,
    llm_width: int,
    loss_weight: float,
) -> list[LayerMaker]:
    """Return the layer factories of SD3's transformer in pipeline order.

    Weights are initialised as in diffusers.

    Raises:
        SpecError: diffusers rejects the configuration.
    """
    whole = cache(partial(whole_model, module, "sd3", config))
    stream = Stream(whole(), canvas)
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
        *(
            partial(_block, whole, module, number, context_tokens, stream)
            for number in range(config["num_layers"])
        ),
        lambda: Out(module, whole(), canvas, loss_weight),
    ]
    return [LayerMaker(make, None) for make in construct]


def _block(
    whole: Callable[[], Any], module: str, number: int, context_tokens: int, stream: Stream
) -> Block:
    return Block(module, number, whole().transformer_blocks[number], context_tokens, stream)
