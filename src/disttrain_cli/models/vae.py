"""Frozen VAE of diffusers (`configs.vaes`).

Its encoder is a pipeline layer, target pixels → latents that a generator learns to denoise; its
decoder, which no stage has, converts generated latents to images.
"""

from __future__ import annotations

import copy
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from disttrain_cli.models.building import LayerMaker
from disttrain_cli.models.configs.checks import MISTAKES, refused
from disttrain_cli.models.configs.generators import whole_model
from disttrain_cli.models.configs.vaes import CLASS, VAES, latents_of
from disttrain_cli.models.generator import GeneratorLayer, targets_field, targets_of, to_patches
from disttrain_cli.models.layer import Batch, PipelineLayer, TensorSpec
from disttrain_cli.models.posterior import per_channel, posterior_of
from disttrain_cli.models.processors import OwnAttention, with_own_attention
from disttrain_cli.spec.buckets import Buckets

#: Pixels encoded at a time: the encoder's memory grows with them, here to 1.3 GiB in bf16.
PIXELS = 1 << 20


class Statistics(nn.Module):
    """Mean and variance of latents, which FLUX.2's VAE has as a batch norm; never trained."""

    def __init__(self, channels: int, eps: float) -> None:
        super().__init__()
        self.running_mean, self.running_var = (nn.Parameter(torch.empty(channels)) for _ in "12")
        self.eps = eps

    def std(self) -> Tensor:
        """Return the standard deviation of each channel [C, 1, 1]."""
        return (self.running_var + self.eps).sqrt().view(-1, 1, 1)

    def mean(self) -> Tensor:
        """Return the mean of each channel [C, 1, 1]."""
        return self.running_mean.view(-1, 1, 1)


class _Half(PipelineLayer):
    """VAE without its decoder or its encoder, as the class itself runs it, without gradients."""

    frozen = True
    weights_of = "vae"
    starts = {"running_var": 1.0}  # noqa: RUF012

    def _take(self, config: dict[str, Any], whole: nn.Module, absent: str) -> None:
        self.about = VAES[config[CLASS]]
        self.vae: Any = copy.deepcopy(whole)
        for name in (absent, f"{'post_' * (absent == 'decoder')}quant_conv"):
            if getattr(self.vae, name, None) is not None:
                setattr(self.vae, name, nn.Identity())
        if (norm := getattr(self.vae, "bn", None)) is not None:
            self.vae.bn = Statistics(len(norm.running_mean), norm.eps)
        with_own_attention(self.vae)
        self.published = {f"vae.{name}": name for name, _ in self.vae.named_children()}
        self.requires_grad_(False)

    @property
    def statistics(self) -> Statistics | None:
        """Statistics by which latents are normalised, if the VAE has them."""
        return getattr(self.vae, "bn", None)

    @property
    def dtype(self) -> torch.dtype:
        """Precision in which it computes."""
        return next(self.vae.parameters()).dtype


class VaeEncoder(GeneratorLayer, _Half):
    """Encoder of a VAE, without gradients."""

    kind = "vae_encoder"

    def __init__(
        self,
        module: str,
        config: dict[str, Any],
        whole: nn.Module,
        image_size: int,
        index: int,
        buckets: Buckets | None = None,
    ) -> None:
        super().__init__()
        self.name, self.module, self.index = f"{module}.vae_encoder", module, index
        self.needs = (targets_field(index),)
        channels, factor = latents_of(config)
        side, self.buckets = image_size // factor, buckets
        self.writes = (TensorSpec("latents", "target", "one", (channels, side, side)),)
        if buckets is not None:
            of_patch = (channels * buckets.patch**2,)
            self.writes = (TensorSpec("latents", "target", "patches", of_patch),)
        self.posterior = posterior_of(config)
        self._take(config, whole, "decoder")

    def compute(self, state: dict[str, Tensor], batch: Batch) -> dict[str, Tensor]:
        moments = self.moments(targets_of(batch, self.index))
        latents = self.posterior.sample(moments, batch, self.index)
        if self.buckets is not None:
            latents = to_patches(latents, self.buckets.patch)
        return {"latents": latents}

    @torch.no_grad()
    def moments(self, pixels_NCHW: Tensor) -> Tensor:
        """Return latents' mean and log-variance [N, 2 · channels, H, W] of images in −1..1."""
        pixels = pixels_NCHW.to(self.dtype)
        images = max(1, PIXELS // pixels[0, 0].numel())
        return torch.cat([self._moments(some) for some in pixels.split(images)])

    def _moments(self, pixels_NCHW: Tensor) -> Tensor:
        with OwnAttention():
            if self.about.video:
                moments: Tensor = self.vae._encode(pixels_NCHW.unsqueeze(2)).squeeze(2)
                return moments
            moments = self.vae._encode(pixels_NCHW)
        if not self.about.random:  # as far as a log-variance goes (DiagonalGaussianDistribution)
            return torch.cat([moments, torch.full_like(moments, -30.0)], dim=1)
        if self.statistics is None:
            return moments
        mean, log_variance = (
            functional.pixel_unshuffle(half, self.about.packed) for half in moments.chunk(2, dim=1)
        )
        std = self.statistics.std()
        return torch.cat(
            [(mean - self.statistics.mean()) / std, log_variance - 2 * std.log()], dim=1
        )


class VaeDecoder(_Half):
    """Decoder of a VAE, without gradients."""

    kind = "vae_decoder"

    def __init__(self, module: str, config: dict[str, Any], whole: nn.Module) -> None:
        super().__init__()
        self.name, self.module = f"{module}.vae_decoder", module
        self.posterior = posterior_of(config)
        self._take(config, whole, "encoder")

    @torch.no_grad()
    def decode(self, latents_NCHW: Tensor) -> Tensor:
        """Return images [N, 3, H, W] of about −1..1, decoded one by one to bound memory."""
        posterior = self.posterior
        latents_NCHW = latents_NCHW / per_channel(posterior.scaling, latents_NCHW) + per_channel(
            posterior.shift, latents_NCHW
        )
        if self.statistics is not None:
            latents_NCHW = latents_NCHW * self.statistics.std() + self.statistics.mean()
            latents_NCHW = functional.pixel_shuffle(latents_NCHW, self.about.packed)
        images = []
        for latent in latents_NCHW.to(self.dtype).split(1):
            if self.about.video:
                images.append(self.vae.decode(latent.unsqueeze(2)).sample.squeeze(2))
            else:
                images.append(self.vae.decode(latent).sample)
        return torch.cat(images).float()


def decoder_maker(module: str, config: dict[str, Any]) -> LayerMaker:
    """Return the factory of the VAE's decoder, which belongs to no pipeline."""
    return LayerMaker(
        lambda: VaeDecoder(module, config, whole_model(module, config[CLASS], config, "vae")),
        None,
    )


def encoder_maker(
    module: str,
    config: dict[str, Any],
    image_size: int,
    index: int = 0,
    buckets: Buckets | None = None,
) -> LayerMaker:
    """Return the factory of the VAE's encoder, a generator's first layer.

    Weights are initialised as in diffusers.

    Args:
        index: of the generator in the model.
        buckets: sizes of the images, if they are not all squares of `image_size`.

    Raises:
        SpecError: diffusers rejects the configuration.
    """
    whole = cache(partial(whole_model, module, config[CLASS], config, "vae"))
    channels, factor = latents_of(config)
    side = image_size // factor
    with torch.device("meta"):
        encoder = VaeEncoder(module, config, whole(), image_size, index, buckets)
        try:
            given = encoder.moments(torch.empty(1, 3, image_size, image_size)).shape
        except (*MISTAKES, RuntimeError) as error:
            raise refused(module, config[CLASS], error, "vae") from None
    if given != (1, 2 * channels, side, side):
        shape = ValueError(f"its latents of one image: {tuple(given)}, with their variance")
        raise refused(module, config[CLASS], shape, "vae")
    return LayerMaker(lambda: VaeEncoder(module, config, whole(), image_size, index, buckets), None)
