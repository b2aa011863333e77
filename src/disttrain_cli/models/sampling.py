"""Image generation: encoders and LLM once, then the generator's layers at every step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from disttrain_cli.models.generator import Canvas, Finish, Start
from disttrain_cli.models.layer import Batch, PipelineLayer
from disttrain_cli.models.vae import VaeDecoder
from disttrain_cli.spec.inputs import ModelInputs


@torch.no_grad()
def generate(
    layers: Sequence[PipelineLayer],
    batch: Batch,
    inputs: ModelInputs,
    denoising_steps: int,
    seed: int,
    decoder: VaeDecoder | None = None,
    generator: str | None = None,
) -> NDArray[np.uint8]:
    """Return images [N, H, W, C] for the N targets of a batch, of which only the rows are used.

    Image i starts from noise drawn from (seed, i), the same on any device.

    Args:
        layers: the whole model on one device; a VAE's encoder in it is skipped.
        decoder: converts latents to images, for a generator of latents.
        generator: module that generates; None: the first one.
    """
    target = inputs.target_of(generator or inputs.generators[0])
    others = set(inputs.generators) - {target.module}
    layers = [layer for layer in layers if layer.weights_of != "vae" and layer.module not in others]
    count = len(batch.of("target"))
    if not count:
        return np.zeros((0, target.size_px, target.size_px, 3), dtype=np.uint8)
    split = next(i for i, layer in enumerate(layers) if layer.module == target.module)
    state: dict[str, Tensor] = {}
    for layer in layers[: split + 1]:  # up to and including the generator's projector
        state.update(layer(state, batch))
    start, inner, out = layers[split + 1], layers[split + 2 : -1], layers[-1]  # or one is both
    assert isinstance(start, Start) and isinstance(out, Finish)

    canvas, device = start.canvas, state["conditioning"].device
    batch = _squares(batch, canvas)
    draws = [
        torch.randn(
            canvas.shape,
            generator=torch.Generator("cpu").manual_seed((seed * 1_000_003 + i) % 2**63),
        )
        for i in range(count)
    ]
    sample = torch.stack(draws).to(device)
    steps = min(denoising_steps, canvas.noise.most_steps)
    scheduler = canvas.noise.steps(decoder is None, steps, start.sigmas(steps))
    for time in scheduler.timesteps:
        features = {**state, **start.start(state, sample, time.to(device).expand(count))}
        for layer in inner:
            features.update(layer.compute(features, batch))
        sample = scheduler.step(out.predict(features, batch), time, sample).prev_sample
    pixels = sample if decoder is None else decoder.decode(sample)
    pixels = ((pixels.clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8)
    return pixels.permute(0, 2, 3, 1).cpu().numpy()


def _squares(batch: Batch, canvas: Canvas) -> Batch:
    """Return the batch with all targets at one size, for a generator with buckets."""
    if canvas.buckets is None:
        return batch
    side = canvas.shape[1] // canvas.buckets.patch
    targets = replace(batch.of("target"), grids=[(side, side)] * len(batch.of("target")), values={})
    return replace(batch, items={**batch.items, "target": targets}, cache={})
