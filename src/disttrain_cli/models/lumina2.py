"""diffusers' Lumina2Transformer2DModel as pipeline layers.

In order: projector, in, context refiner × n, noise refiner × n, block × m, out with the image loss.
Lumina-Image 2.0 (Qin et al. 2025, arXiv 2503.21758, section 3.1): conditioning and image are
refined separately and then share one set of weights, with grouped queries, gated FFNs and norms
before and after both. Its time runs from noise at 0 to the image at 1, and its prediction is the
direction to the image: the negative of a flow's (`noise`). Rows of an image: its patches in raster
order, one row of shape [P, D].
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
from disttrain_cli.models.fused import gated, with_own_norms
from disttrain_cli.models.generator import (
    Canvas,
    Finish,
    GeneratorLayer,
    Projector,
    Start,
    even_sigmas,
    from_patches,
    to_patches,
)
from disttrain_cli.models.layer import Batch, PipelineLayer, TensorSpec
from disttrain_cli.models.processors import with_own_attention
from disttrain_cli.models.rotary import turns

DIVISION = {
    **colwise("to_q", "to_k", "to_v", "feed_forward.linear_1", "feed_forward.linear_3"),
    **rowwise("to_out.0", "feed_forward.linear_2"),
    **per_head("norm_q", "norm_k"),
}
#: Attribute of the transformer that holds the blocks of each kind.
PATHS = {"context": "context_refiner", "noise": "noise_refiner", "block": "layers"}


class Stream:
    """Tensors passed from block to block."""

    def __init__(self, whole: Any, canvas: Canvas) -> None:
        config, self.canvas = whole.config, canvas
        width, patches = config.hidden_size, (config.sample_size // config.patch_size) ** 2
        self.patches = canvas.patches(patches, width)
        self.conditioning = TensorSpec("conditioning", "target", "tokens", (width,))
        time = whole.time_caption_embed.timestep_embedder.linear_2.out_features
        self.time = TensorSpec("time_embedding", "target", "one", (time,))


class In(Start):
    """Noisy latents → patches; timestep → modulation; conditioning → the blocks' width."""

    def __init__(self, module: str, whole: Any, canvas: Canvas, stream: Stream) -> None:
        super().__init__(module, canvas)
        self.published = {name: name for name in ("x_embedder", "time_caption_embed")}
        self.reads = (*canvas.reads, "conditioning")
        self.writes = (stream.patches, stream.time, stream.conditioning)
        self.patch = whole.config.patch_size
        self.x_embedder = copy.deepcopy(whole.x_embedder)
        self.time_caption_embed = with_own_norms(copy.deepcopy(whole.time_caption_embed))

    def sigmas(self, steps: int) -> list[float]:
        return even_sigmas(steps)

    def start(
        self, state: dict[str, Tensor], noisy_NCHW: Tensor, times_N: Tensor
    ) -> dict[str, Tensor]:
        noisy = noisy_NCHW.to(self.x_embedder.weight.dtype)
        time, conditioning = self.time_caption_embed(
            noisy, 1 - times_N / self.canvas.noise.timesteps, state["conditioning"]
        )
        return {
            "patches": self.x_embedder(to_patches(noisy, self.patch)),
            "time_embedding": time,
            "conditioning": conditioning,
        }


class FeedForward(nn.Module):
    """LuminaFeedForward that saves only the tensors that plans account for."""

    def __init__(self, theirs: Any) -> None:
        super().__init__()
        self.linear_1, self.linear_2, self.linear_3, self.silu = (
            getattr(theirs, name) for name in ("linear_1", "linear_2", "linear_3", "silu")
        )

    def forward(self, rows: Tensor) -> Tensor:
        made: Tensor = self.linear_2(gated(self.linear_1(rows), self.linear_3(rows), self.silu))
        return made


class Block(GeneratorLayer):
    """diffusers' Lumina2TransformerBlock over the conditioning, the image, or both together."""

    division = DIVISION

    def __init__(
        self, module: str, kind: str, number: int, whole: Any, context_tokens: int, stream: Stream
    ) -> None:
        super().__init__()
        self.name, self.module, self.kind = f"{module}.{kind}.{number}", module, kind
        self.published = {"block": f"{PATHS[kind]}.{number}"}
        self.reads = {
            "context": ("conditioning",),
            "noise": ("patches", "time_embedding"),
            "block": ("patches", "conditioning", "time_embedding"),
        }[kind]
        self.writes = tuple(
            spec for spec in (stream.patches, stream.conditioning) if spec.name in self.reads
        )
        config = whole.config
        self.context_tokens, self.axes = context_tokens, tuple(config.axes_dim_rope)
        self.canvas, self.buckets, self.patch = stream.canvas, None, config.patch_size
        if kind != "context":
            self.buckets = stream.canvas.buckets
        block = copy.deepcopy(whole.get_submodule(self.published["block"]))
        block.feed_forward = FeedForward(block.feed_forward)
        self.block: Any = with_own_norms(with_own_attention(block))
        # so that a TP group shards the fewer heads of keys and values by their own number
        self.block.attn.head_dim = sum(self.axes)

    def compute(self, state: dict[str, Tensor], batch: Batch) -> dict[str, Tensor]:
        context, streams = self.context_tokens, list[Tensor]()
        grid = (0, 0) if self.kind == "context" else self.canvas.grid(batch, self.patch)
        cosines_sines = turns(context, grid, self.axes, "lumina2", state[self.reads[0]])
        if self.kind != "noise":
            streams.append(state["conditioning"].unflatten(0, (-1, context)))
        else:
            cosines_sines = tuple(one[context:] for one in cosines_sines)
        if self.kind != "context":
            streams.append(state["patches"])
        rows = streams[0] if len(streams) == 1 else torch.cat(streams, dim=1)
        made = self.block(rows, None, cosines_sines, state.get("time_embedding"))
        if self.kind == "noise":
            return {"patches": made}
        if self.kind == "context":
            return {"conditioning": made.flatten(0, 1)}
        return {"conditioning": made[:, :context].flatten(0, 1), "patches": made[:, context:]}


class Out(Finish):
    """Last norm, modulated by the timestep, and the patches' latents."""

    def __init__(self, module: str, whole: Any, canvas: Canvas, weight: float) -> None:
        super().__init__(module, canvas, weight, ("patches", "time_embedding"))
        self.published = {"norm_out": "norm_out"}
        self.patch = whole.config.patch_size
        self.norm_out = copy.deepcopy(whole.norm_out)

    def predict(self, state: dict[str, Tensor], batch: Batch) -> Tensor:
        made = self.norm_out(state["patches"], state["time_embedding"])
        return -from_patches(made, self.patch, self.canvas.grid(batch, self.patch)).float()


def makers(
    module: str,
    config: dict[str, Any],
    canvas: Canvas,
    context_tokens: int,
    projector_hidden: int,
    llm_width: int,
    loss_weight: float,
) -> list[LayerMaker]:
    """Return the layer factories of Lumina 2's transformer in pipeline order.

    Weights are initialised as in diffusers.

    Raises:
        SpecError: diffusers rejects the configuration.
    """
    whole = cache(partial(whole_model, module, "lumina2", config))
    stream = Stream(whole(), canvas)
    counts = {
        "context": config["num_refiner_layers"],
        "noise": config["num_refiner_layers"],
        "block": config["num_layers"],
    }
    construct: list[Callable[[], PipelineLayer]] = [
        partial(
            Projector, module, llm_width, projector_hidden, config["cap_feat_dim"], context_tokens
        ),
        lambda: In(module, whole(), canvas, stream),
        *(
            partial(Block, module, kind, number, whole(), context_tokens, stream)
            for kind, count in counts.items()
            for number in range(count)
        ),
        lambda: Out(module, whole(), canvas, loss_weight),
    ]
    return [LayerMaker(make, None) for make in construct]
