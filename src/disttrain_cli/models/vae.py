"""diffusers' AutoencoderKL, frozen.

Its encoder is a pipeline layer, target pixels → latents that a generator learns to denoise; its
decoder, which no stage has, converts generated latents to images.
"""

from __future__ import annotations

import copy
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from disttrain_cli.models.building import LayerMaker
from disttrain_cli.models.configs.generators import latent_side, whole_model
from disttrain_cli.models.generator import GeneratorLayer, targets_field, targets_of, to_patches
from disttrain_cli.models.layer import Batch, PipelineLayer, TensorSpec
from disttrain_cli.models.posterior import posterior_of
from disttrain_cli.models.processors import with_own_attention
from disttrain_cli.spec.buckets import Buckets

#: Pixels encoded at a time: the encoder's memory grows with them, here to 1.3 GiB in bf16.
PIXELS = 1 << 20


class VaeEncoder(GeneratorLayer):
    """Encoder and quant_conv of an AutoencoderKL, without gradients."""

    kind = "vae_encoder"
    frozen = True
    weights_of = "vae"

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
        self.published = {name: name for name in ("encoder", "quant_conv")}
        side = latent_side(config, image_size)
        channels, self.buckets = config["latent_channels"], buckets
        self.writes = (TensorSpec("latents", "target", "one", (channels, side, side)),)
        if buckets is not None:
            of_patch = (channels * buckets.patch**2,)
            self.writes = (TensorSpec("latents", "target", "patches", of_patch),)
        self.posterior = posterior_of(config)
        self.encoder = with_own_attention(copy.deepcopy(whole.encoder))
        self.quant_conv = copy.deepcopy(whole.quant_conv)
        self.requires_grad_(False)

    def compute(self, state: dict[str, Tensor], batch: Batch) -> dict[str, Tensor]:
        moments = self.moments(targets_of(batch, self.index))
        latents = self.posterior.sample(moments, batch, self.index)
        if self.buckets is not None:
            latents = to_patches(latents, self.buckets.patch)
        return {"latents": latents}

    @torch.no_grad()
    def moments(self, pixels_NCHW: Tensor) -> Tensor:
        """Return latents' mean and log-variance [N, 2 · channels, H, W] of images in −1..1."""
        pixels = pixels_NCHW.to(self.encoder.conv_in.weight.dtype)
        images = max(1, PIXELS // pixels[0, 0].numel())
        return torch.cat([self._moments(some) for some in pixels.split(images)])

    def _moments(self, pixels_NCHW: Tensor) -> Tensor:
        moments = self.encoder(pixels_NCHW)
        return moments if self.quant_conv is None else self.quant_conv(moments)


class VaeDecoder(PipelineLayer):
    """post_quant_conv and decoder of an AutoencoderKL, without gradients."""

    kind = "vae_decoder"
    frozen = True
    weights_of = "vae"

    def __init__(self, module: str, config: dict[str, Any], whole: nn.Module) -> None:
        super().__init__()
        self.name, self.module = f"{module}.vae_decoder", module
        self.published = {name: name for name in ("decoder", "post_quant_conv")}
        self.scaling, self.shift = config["scaling_factor"], config["shift_factor"] or 0.0
        self.decoder = with_own_attention(copy.deepcopy(whole.decoder))
        self.post_quant_conv = copy.deepcopy(whole.post_quant_conv)
        self.requires_grad_(False)

    @torch.no_grad()
    def decode(self, latents_NCHW: Tensor) -> Tensor:
        """Return images [N, 3, H, W] of about −1..1, decoded one by one to bound memory."""
        latents_NCHW = (latents_NCHW / self.scaling + self.shift).to(
            self.decoder.conv_in.weight.dtype
        )
        images = []
        for latent in latents_NCHW.split(1):
            images.append(
                self.decoder(
                    latent if self.post_quant_conv is None else self.post_quant_conv(latent)
                )
            )
        return torch.cat(images).float()


def decoder_maker(module: str, config: dict[str, Any]) -> LayerMaker:
    """Return the factory of the VAE's decoder, which belongs to no pipeline."""
    return LayerMaker(
        lambda: VaeDecoder(module, config, whole_model(module, "AutoencoderKL", config, "vae")),
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
    whole = cache(partial(whole_model, module, "AutoencoderKL", config, "vae"))
    whole()
    return LayerMaker(lambda: VaeEncoder(module, config, whole(), image_size, index, buckets), None)
