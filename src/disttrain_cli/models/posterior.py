"""Latents of an image: a sample of the posterior that a VAE's encoder predicts.

Latent diffusion (Rombach et al. 2022, section 3.1): z = scaling · (sample of the posterior −
shift). The sample is drawn from the image's own seed on the CPU, so it does not depend on rank or
device, nor on whether the posterior's moments were computed in this step or cached.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from disttrain_cli.models.configs.vaes import scale_of
from disttrain_cli.models.host import constant, to_device
from disttrain_cli.models.layer import Batch
from disttrain_cli.models.noise import own_seed

#: Separates the posterior's draw from the diffusion noise of the same seed.
_POSTERIOR = 0x1A7E27


@dataclass(frozen=True)
class Posterior:
    """Conversion of a VAE's moments to latents; each has one value, or one per channel."""

    scaling: tuple[float, ...]
    shift: tuple[float, ...]

    @torch.no_grad()
    def sample(self, moments_NCHW: Tensor, batch: Batch, index: int) -> Tensor:
        """Return latents [N, C, H, W] of the batch's targets, for the generator at `index`.

        Args:
            moments_NCHW: mean and log-variance [N, 2 · C, H, W].
        """
        from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution

        posterior = DiagonalGaussianDistribution(moments_NCHW)
        noise = to_device(draw(batch, posterior.mean.shape[1:], index), moments_NCHW.device)
        sample: Tensor = posterior.mean + posterior.std * noise.to(moments_NCHW)
        return (sample - per_channel(self.shift, sample)) * per_channel(self.scaling, sample)


def posterior_of(config: dict[str, Any]) -> Posterior:
    """Return the posterior of a VAE's configuration."""
    return Posterior(*scale_of(config))


def per_channel(values: tuple[float, ...], latents_NCHW: Tensor) -> Tensor | float:
    """Return a value, or one per channel [C, 1, 1], to combine with latents."""
    if len(values) == 1:
        return values[0]
    device, dtype = latents_NCHW.device, latents_NCHW.dtype
    return constant(torch.tensor, values, device=device, dtype=dtype).view(-1, 1, 1)


def draw(batch: Batch, shape: tuple[int, ...], index: int) -> Tensor:
    """Draw standard normal [N, *shape] float32 on the CPU for a batch's targets.

    On the meta device the result has no values.
    """
    noise_seeds = batch.of("target").noise_seeds
    assert noise_seeds is not None
    if noise_seeds.is_meta:
        return torch.empty(len(noise_seeds), *shape, device="meta")
    seeds = [own_seed(seed, index) ^ _POSTERIOR for seed in noise_seeds.tolist()]
    with torch.device("cpu"):
        return torch.stack(
            [
                torch.randn(shape, generator=torch.Generator("cpu").manual_seed(seed))
                for seed in seeds
            ]
        )
