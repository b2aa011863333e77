"""Generating images: encoder and LLM once, then DDIM (Song et al. 2021) through the generator's layers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from disttrain_cli.errors import SpecError
from disttrain_cli.models import unet
from disttrain_cli.models.layer import Batch, PipelineLayer
from disttrain_cli.spec.inputs import ModelInputs


@torch.no_grad()
def generate(
    layers: Sequence[PipelineLayer], batch: Batch, inputs: ModelInputs, denoising_steps: int, seed: int
) -> NDArray[np.uint8]:
    """Images [N, H, W, C] for the context tokens of a batch, N = rows of `batch.context_rows` / context tokens.

    `layers` is the whole model on one device; the batch's labels and target pixels are not used. Image i starts
    from noise drawn from (seed, i), the same on any device.

    Raises:
        SpecError: the generator denoises latents; the model holds no decoder for them.
    """
    from diffusers import DDIMScheduler

    target = inputs.target
    assert target is not None and batch.context_rows is not None
    if target.cached_latents or any(layer.frozen for layer in layers):
        what = f"{target.module} denoises a VAE's latents, and the model has no decoder that makes images of them"
        raise SpecError(what, "only the VAE's encoder is trained with", "Set samples.images: 0 in the run file.")
    count = len(batch.context_rows) // target.context_tokens
    if not count:
        return np.zeros((0, target.size_px, target.size_px, target.channels), dtype=np.uint8)
    split = next(i for i, layer in enumerate(layers) if layer.module == target.module)
    state: dict[str, Tensor] = {}
    for layer in layers[: split + 1]:  # the generator's first layer is its projector
        state.update(layer(state, batch))
    projector, start, *inner, out = layers[split:]
    assert isinstance(projector, unet.Projector) and isinstance(start, unet.In) and isinstance(out, unet.Out)

    device = state["conditioning"].device
    shape = (target.channels, target.size_px, target.size_px)
    draws = [
        torch.randn(shape, generator=torch.Generator("cpu").manual_seed(seed * 1_000_003 + i)) for i in range(count)
    ]
    sample = torch.stack(draws).to(device)
    scheduler = DDIMScheduler(num_train_timesteps=unet.TRAIN_TIMESTEPS, timestep_spacing="trailing")
    scheduler.set_timesteps(denoising_steps)
    for timestep in scheduler.timesteps:
        features = {"conditioning": state["conditioning"], **start.start(sample, timestep.to(device).expand(count))}
        for layer in inner:
            features.update(layer(features, batch))
        sample = scheduler.step(out.predict(features), timestep, sample).prev_sample
    pixels = ((sample.clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8)
    return pixels.permute(0, 2, 3, 1).cpu().numpy()
