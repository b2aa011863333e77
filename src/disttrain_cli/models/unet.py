"""diffusers' UNet2DConditionModel as pipeline layers.

In order: projector, in, down × k, mid, up × k, out with the image loss. Stable Diffusion 1.5, 2.1
and XL (Rombach et al. 2022; Podell et al. 2023). XL also receives one vector per image, here
computed from its context rows, and sizes: the original size of every image is stated as the size at
which it is generated, uncropped.

Skips are `skip.0`, `skip.1`, …; the output of `in` and of every down layer is its last skip, so
`sample` exists from `mid` on and nothing crosses a cut twice.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from disttrain_cli.models.building import LayerMaker
from disttrain_cli.models.configs.generators import pooled_width, whole_model
from disttrain_cli.models.division import colwise, rowwise
from disttrain_cli.models.dropout import seeded
from disttrain_cli.models.generator import Canvas, Finish, GeneratorLayer, Projector, Start, filled
from disttrain_cli.models.layer import Batch, PipelineLayer, TensorSpec
from disttrain_cli.models.processors import with_own_attention


class In(Start):
    """Noisy images (or latents) and their timesteps → first features and time embedding."""

    def __init__(
        self, module: str, unet: Any, writes: tuple[TensorSpec, ...], canvas: Canvas
    ) -> None:
        super().__init__(module, canvas)
        self.writes = writes
        self.published = {name: name for name in ("conv_in", "time_embedding", "add_embedding")}
        self.conv_in, self.time_proj, self.time_embedding = _parts(
            unet, "conv_in", "time_proj", "time_embedding"
        )
        self.told_size = unet.config.addition_embed_type == "text_time"
        if self.told_size:
            self.reads = (*canvas.reads, "pooled")
            self.add_time_proj, self.add_embedding = _parts(unet, "add_time_proj", "add_embedding")

    def start(
        self, state: dict[str, Tensor], noisy_NCHW: Tensor, times_N: Tensor
    ) -> dict[str, Tensor]:
        dtype = self.conv_in.weight.dtype
        embedding = self.time_embedding(self.time_proj(times_N).to(dtype))
        if self.told_size:
            side = float(self.canvas.image_size)
            ids = filled(len(noisy_NCHW), (side, side, 0.0, 0.0, side, side), noisy_NCHW)
            sizes = self.add_time_proj(ids.flatten()).unflatten(0, ids.shape).flatten(1)
            embedding = embedding + self.add_embedding(
                torch.cat([state["pooled"], sizes.to(dtype)], dim=1)
            )
        return {"skip.0": self.conv_in(noisy_NCHW.to(dtype)), "time_embedding": embedding}


class Inner(GeneratorLayer):
    """Down, mid or up block of the U-Net."""

    # Heads and FFN of its transformer blocks are sharded; convolutions are replicated.
    division = (
        colwise("to_q", "to_k", "to_v")
        | colwise("ff.net.0.proj", packed=(1, 1))  # value and gate
        | rowwise("to_out.0", "ff.net.2")
    )

    def __init__(
        self,
        module: str,
        kind: str,
        path: str,
        block: nn.Module,
        context_tokens: int,
        features: str,
        skips: tuple[str, ...],
        writes: tuple[TensorSpec, ...],
    ) -> None:
        super().__init__()
        self.name, self.module, self.kind = f"{module}.{kind}", module, kind
        self.attends = bool(getattr(block, "has_cross_attention", False))
        self.reads = (
            features,
            "time_embedding",
            *skips,
            *(("conditioning",) if self.attends else ()),
        )
        self.writes = writes
        self.features, self.skips, self.context_tokens = features, skips, context_tokens
        self.published = {"block": path}
        self.block = with_own_attention(block)
        seeded(self)

    def compute(self, state: dict[str, Tensor], batch: Batch) -> dict[str, Tensor]:
        arguments: dict[str, Any] = {
            "hidden_states": state[self.features],
            "temb": state["time_embedding"],
        }
        if self.attends:
            arguments["encoder_hidden_states"] = state["conditioning"].unflatten(
                0, (-1, self.context_tokens)
            )
        if self.skips:
            arguments["res_hidden_states_tuple"] = tuple(state[name] for name in self.skips)
        result = self.block(**arguments)
        # a down block's output is its last skip
        outputs = result[1] if isinstance(result, tuple) else (result,)
        return {spec.name: output for spec, output in zip(self.writes, outputs, strict=True)}


class Out(Finish):
    """Last norm and convolution, and the image loss."""

    def __init__(self, module: str, unet: nn.Module, canvas: Canvas, weight: float) -> None:
        super().__init__(module, canvas, weight, ("sample",))
        self.published = {name: name for name in ("conv_norm_out", "conv_out")}
        self.conv_norm_out, self.conv_act, self.conv_out = _parts(
            unet, "conv_norm_out", "conv_act", "conv_out"
        )

    def predict(self, state: dict[str, Tensor], batch: Batch) -> Tensor:
        sample = state["sample"]
        if self.conv_norm_out is not None:
            sample = self.conv_act(self.conv_norm_out(sample))
        return self.conv_out(sample).float()


def _parts(unet: nn.Module, *names: str) -> tuple[Any, ...]:
    return tuple(copy.deepcopy(getattr(unet, name)) for name in names)


def makers(
    module: str,
    config: dict[str, Any],
    canvas: Canvas,
    context_tokens: int,
    projector_hidden: int,
    llm_width: int,
    loss_weight: float,
) -> list[LayerMaker]:
    """Return the layer factories of an image generator in pipeline order.

    Weights are initialised as in diffusers.

    Raises:
        SpecError: diffusers rejects the configuration.
    """
    whole = cache(partial(whole_model, module, "unet2d_condition", config))
    pooled = pooled_width(config) if config["addition_embed_type"] == "text_time" else None
    construct: list[Callable[[], PipelineLayer]] = [
        partial(
            Projector,
            module,
            llm_width,
            projector_hidden,
            config["cross_attention_dim"],
            context_tokens,
            pooled,
        )
    ]
    unet, size = whole(), config["sample_size"]
    channels = unet.conv_in.out_channels
    skips = [TensorSpec("skip.0", "target", "one", (channels, size, size))]
    time = TensorSpec(
        "time_embedding", "target", "one", (unet.time_embedding.linear_2.out_features,)
    )
    first = (skips[0], time)
    construct.append(lambda: In(module, whole(), first, canvas))

    def inner(
        kind: str, path: str, features: str, read: tuple[str, ...], writes: tuple[TensorSpec, ...]
    ) -> None:
        construct.append(
            lambda: Inner(
                module,
                kind,
                path,
                copy.deepcopy(whole().get_submodule(path)),
                context_tokens,
                features,
                read,
                writes,
            )
        )

    for i, block in enumerate(unet.down_blocks):
        channels, made = config["block_out_channels"][i], []
        for index in range(len(block.resnets) + (block.downsamplers is not None)):
            size = size // 2 if index == len(block.resnets) else size
            made.append(
                TensorSpec(f"skip.{len(skips) + index}", "target", "one", (channels, size, size))
            )
        inner(f"down.{i}", f"down_blocks.{i}", skips[-1].name, (), tuple(made))
        skips += made
    inner(
        "mid",
        "mid_block",
        skips[-1].name,
        (),
        (TensorSpec("sample", "target", "one", (channels, size, size)),),
    )
    for i, block in enumerate(unet.up_blocks):
        read = tuple(spec.name for spec in skips[-len(block.resnets) :])
        del skips[-len(block.resnets) :]
        channels = config["block_out_channels"][-1 - i]
        size = size * 2 if block.upsamplers is not None else size
        inner(
            f"up.{i}",
            f"up_blocks.{i}",
            "sample",
            read,
            (TensorSpec("sample", "target", "one", (channels, size, size)),),
        )
    construct.append(lambda: Out(module, whole(), canvas, loss_weight))
    return [LayerMaker(make, None) for make in construct]
