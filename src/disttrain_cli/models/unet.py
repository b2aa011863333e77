"""diffusers' UNet2DConditionModel as pipeline layers: projector, in, down × k, mid, up × k, out with the image loss.

Diffusion: x_t = √ᾱ_t·x_0 + √(1 − ᾱ_t)·ε with the linear schedule of DDPM (Ho et al. 2020, section 4); the
model predicts ε. Timestep and noise of an image are drawn from its own seed on the CPU, so they do not depend
on rank or device; the last layer draws them again instead of receiving them.

Skips are `skip.0`, `skip.1`, …; the output of `in` and of every down layer is its last skip, so `sample` exists
from `mid` on and nothing crosses a cut twice.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from disttrain_cli.models.building import LayerMaker
from disttrain_cli.models.configs import refused
from disttrain_cli.models.division import Division
from disttrain_cli.models.layer import LOSS_PREFIX, Batch, PipelineLayer, TensorSpec

TRAIN_TIMESTEPS = 1000


def draw_noise(batch: Batch, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Timesteps [N] int64 and noise [N, *shape] float32 of a batch's targets, from `noise_seeds` alone.

    Drawn once per stage and batch. On the meta device there are no seeds to read and the result has no values.
    """
    if "noise" not in batch.cache:
        assert batch.target_weights is not None and batch.noise_seeds is not None
        device = batch.target_weights.device
        if device.type == "meta":
            batch.cache["timesteps"] = batch.noise_seeds
            batch.cache["noise"] = torch.empty(len(batch.noise_seeds), *shape, device=device)
        else:
            draws = [_draw_one(seed, shape) for seed in batch.noise_seeds.tolist()]
            batch.cache["timesteps"] = torch.stack([timestep for timestep, _ in draws]).to(device)
            batch.cache["noise"] = torch.stack([noise for _, noise in draws]).to(device)
    return batch.cache["timesteps"], batch.cache["noise"]


def _draw_one(seed: int, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    generator = torch.Generator("cpu").manual_seed(seed)
    with torch.device("cpu"):
        return torch.randint(TRAIN_TIMESTEPS, (), generator=generator), torch.randn(shape, generator=generator)


class UnetLayer(PipelineLayer):
    """A layer whose items are the images to be generated."""

    def is_empty(self, state: dict[str, Tensor], batch: Batch) -> bool:
        if self.reads:
            return len(state[self.reads[0]]) == 0
        assert batch.target_pixels is not None
        return len(batch.target_pixels) == 0


class Projector(UnetLayer):
    """LLM rows → what the U-Net's cross-attention reads: two-layer MLP and norm."""

    kind = "projector"
    reads = ("context",)
    division = Division(column=("mlp.0",), row=("mlp.2",))

    def __init__(self, module: str, llm_width: int, hidden: int, width: int) -> None:
        super().__init__()
        self.name, self.module = f"{module}.projector", module
        self.writes = (TensorSpec("conditioning", "target", "context", (width,)),)
        self.mlp = nn.Sequential(nn.Linear(llm_width, hidden), nn.GELU(), nn.Linear(hidden, width), nn.LayerNorm(width))

    def compute(self, state: dict[str, Tensor], batch: Batch) -> dict[str, Tensor]:
        return {"conditioning": self.mlp(state["context"])}


class In(UnetLayer):
    """Noisy images (or latents) and their timesteps → first features and time embedding."""

    kind = "in"

    def __init__(
        self, module: str, unet: nn.Module, writes: tuple[TensorSpec, ...], shape: tuple[int, ...], reads_latents: bool
    ) -> None:
        from diffusers import DDPMScheduler

        super().__init__()
        self.name, self.module, self.writes, self.shape = f"{module}.in", module, writes, shape
        self.reads, self.needs = (("latents",), ("weights",)) if reads_latents else ((), ("targets",))
        self.conv_in, self.time_proj, self.time_embedding = _parts(unet, "conv_in", "time_proj", "time_embedding")
        with torch.device("cpu"):
            self._schedule = DDPMScheduler(num_train_timesteps=TRAIN_TIMESTEPS)

    def compute(self, state: dict[str, Tensor], batch: Batch) -> dict[str, Tensor]:
        clean = state["latents"].detach() if self.reads else batch.target_pixels
        assert clean is not None
        timesteps, noise = draw_noise(batch, self.shape)
        return self.start(self._schedule.add_noise(clean, noise, timesteps), timesteps)

    def start(self, sample_NCHW: Tensor, timesteps_N: Tensor) -> dict[str, Tensor]:
        """First features of given noisy images at given timesteps."""
        dtype = self.conv_in.weight.dtype
        embedding = self.time_embedding(self.time_proj(timesteps_N).to(dtype))
        return {"skip.0": self.conv_in(sample_NCHW.to(dtype)), "time_embedding": embedding}


class Inner(UnetLayer):
    """A down, mid or up block of the U-Net."""

    # Heads and FFN of its transformer blocks; convolutions are whole on every rank.
    division = Division(column=("to_q", "to_k", "to_v"), fused=("ff.net.0.proj",), row=("to_out.0", "ff.net.2"))

    def __init__(
        self,
        module: str,
        kind: str,
        block: nn.Module,
        context_tokens: int,
        features: str,
        skips: tuple[str, ...],
        writes: tuple[TensorSpec, ...],
    ) -> None:
        super().__init__()
        self.name, self.module, self.kind = f"{module}.{kind}", module, kind
        self.attends = bool(getattr(block, "has_cross_attention", False))
        self.reads = (features, "time_embedding", *skips, *(("conditioning",) if self.attends else ()))
        self.writes = writes
        self.features, self.skips, self.context_tokens = features, skips, context_tokens
        self.block = block

    def compute(self, state: dict[str, Tensor], batch: Batch) -> dict[str, Tensor]:
        arguments: dict[str, Any] = {"hidden_states": state[self.features], "temb": state["time_embedding"]}
        if self.attends:
            arguments["encoder_hidden_states"] = state["conditioning"].unflatten(0, (-1, self.context_tokens))
        if self.skips:
            arguments["res_hidden_states_tuple"] = tuple(state[name] for name in self.skips)
        result = self.block(**arguments)
        outputs = result[1] if isinstance(result, tuple) else (result,)  # a down block's output is its last skip
        return {spec.name: output for spec, output in zip(self.writes, outputs, strict=True)}


class Out(UnetLayer):
    """Last norm and convolution, and the image loss.

    loss/image = weight · Σ_i w_i · mean_i (ε̂ − ε)² / images to generate of the global batch.
    """

    kind = "out"
    reads = ("sample",)
    needs = ("weights",)
    loss = "image"

    def __init__(self, module: str, unet: nn.Module, shape: tuple[int, ...], weight: float) -> None:
        super().__init__()
        self.name, self.module, self.shape, self.weight = f"{module}.out", module, shape, weight
        self.conv_norm_out, self.conv_act, self.conv_out = _parts(unet, "conv_norm_out", "conv_act", "conv_out")

    def compute(self, state: dict[str, Tensor], batch: Batch) -> dict[str, Tensor]:
        assert batch.target_weights is not None
        _, noise = draw_noise(batch, self.shape)
        error_N = (self.predict(state) - noise).square().mean(dim=(1, 2, 3))
        return {f"{LOSS_PREFIX}{self.loss}": self.weight * (batch.target_weights * error_N).sum() / batch.targets}

    def predict(self, state: dict[str, Tensor]) -> Tensor:
        """The predicted noise [N, C, H, W], float32."""
        sample = state["sample"]
        if self.conv_norm_out is not None:
            sample = self.conv_act(self.conv_norm_out(sample))
        return self.conv_out(sample).float()


def _parts(unet: nn.Module, *names: str) -> tuple[Any, ...]:
    return tuple(copy.deepcopy(getattr(unet, name)) for name in names)


def makers(
    module: str,
    config: dict[str, Any],
    context_tokens: int,
    projector_hidden: int,
    llm_width: int,
    loss_weight: float,
    reads_latents: bool = False,
) -> list[LayerMaker]:
    """The layers of an image generator in pipeline order; weights start as diffusers starts them.

    With `reads_latents` the images come from a VAE's layer before them, else from the batch.

    Raises:
        SpecError: diffusers refuses the configuration.
    """
    whole = cache(partial(_whole, module, config))
    construct: list[Callable[[], PipelineLayer]] = [
        partial(Projector, module, llm_width, projector_hidden, config["cross_attention_dim"])
    ]
    unet, size = whole(), config["sample_size"]
    shape, channels = (config["in_channels"], size, size), unet.conv_in.out_channels
    skips = [TensorSpec("skip.0", "target", "one", (channels, size, size))]
    time = TensorSpec("time_embedding", "target", "one", (unet.time_embedding.linear_2.out_features,))
    first = (skips[0], time)
    construct.append(lambda: In(module, whole(), first, shape, reads_latents))

    def inner(kind: str, path: str, features: str, read: tuple[str, ...], writes: tuple[TensorSpec, ...]) -> None:
        construct.append(
            lambda: Inner(
                module, kind, copy.deepcopy(whole().get_submodule(path)), context_tokens, features, read, writes
            )
        )

    for i, block in enumerate(unet.down_blocks):
        channels, made = config["block_out_channels"][i], []
        for place in range(len(block.resnets) + (block.downsamplers is not None)):
            size = size // 2 if place == len(block.resnets) else size
            made.append(TensorSpec(f"skip.{len(skips) + place}", "target", "one", (channels, size, size)))
        inner(f"down.{i}", f"down_blocks.{i}", skips[-1].name, (), tuple(made))
        skips += made
    inner("mid", "mid_block", skips[-1].name, (), (TensorSpec("sample", "target", "one", (channels, size, size)),))
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
    construct.append(lambda: Out(module, whole(), shape, loss_weight))
    return [LayerMaker(make, None) for make in construct]


def _whole(module: str, config: dict[str, Any]) -> Any:
    from diffusers.models.unets.unet_2d_condition import UNet2DConditionModel

    try:
        with torch.device("meta"):
            return UNet2DConditionModel(**config)
    except (ValueError, TypeError, IndexError, AttributeError, RuntimeError, ZeroDivisionError) as error:
        raise refused(module, "unet2d_condition", error) from None
