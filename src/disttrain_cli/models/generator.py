"""Common parts of all image generators: projector, noising, predictions and image loss.

Timestep and noise of an image are drawn from its own seed on the CPU, so they do not depend on rank
or device; the last layer draws them again instead of receiving them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from disttrain_cli.models.by_size import by_size
from disttrain_cli.models.division import colwise, rowwise
from disttrain_cli.models.host import constant
from disttrain_cli.models.layer import LOSS_PREFIX, Batch, PipelineLayer, TensorSpec
from disttrain_cli.models.noise import Noise, draw_noise
from disttrain_cli.models.parallel import once
from disttrain_cli.models.posterior import Posterior
from disttrain_cli.spec.buckets import Buckets


@dataclass(frozen=True)
class Canvas:
    """Denoised images or latents of a generator."""

    # channels, height, width of the denoised tensor (image or a VAE's latents) when sampling
    shape: tuple[int, int, int]
    noise: Noise
    image_size: int  # pixels per side
    # True: a VAE layer before the generator writes latents; else they are in the batch
    reads_latents: bool
    index: int = 0  # index of the generator in the model
    posterior: Posterior | None = None  # set if the batch holds a VAE's moments
    buckets: Buckets | None = None  # training sizes, if they differ

    def grid(self, batch: Batch, patch: int) -> tuple[int, int]:
        """Return rows and columns of patches of a batch's images, which share one size."""
        if self.buckets is not None:
            return batch.of("target").grids[0]
        return self.shape[1] // patch, self.shape[2] // patch

    def patches(self, count: int, width: int) -> TensorSpec:
        """Return the state tensor of an image's patches [P, D]; with buckets a row per patch."""
        if self.buckets is not None:
            return TensorSpec("patches", "target", "patches", (width,))
        return TensorSpec("patches", "target", "one", (count, width))

    @property
    def reads(self) -> tuple[str, ...]:
        """State tensors that hold the clean images."""
        return ("latents",) if self.reads_latents else ()

    @property
    def needs(self) -> str:
        """Batch field required by the layers that read clean images."""
        return "weights" if self.reads_latents else targets_field(self.index)

    def clean(self, state: dict[str, Tensor], batch: Batch) -> Tensor:
        """Return images or latents without noise [N, C, H, W]; no gradients flow into them."""
        if self.reads_latents:
            clean = state["latents"].detach()
            if self.buckets is None:
                return clean
            return from_patches(clean, self.buckets.patch, batch.of("target").grids[0])
        if self.posterior is None:
            return targets_of(batch, self.index)
        name = f"latents/{self.index}"
        if name not in batch.cache:
            moments = targets_of(batch, self.index)
            batch.cache[name] = self.posterior.sample(moments, batch, self.index)
        latents: Tensor = batch.cache[name]
        return latents

    def draw(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return timesteps and noise of the batch's targets."""
        height, width = self.shape[1:]
        if self.buckets is not None:
            height, width = self.buckets.denoised(batch.of("target").grids[0])
        return draw_noise(batch, (self.shape[0], height, width), self.noise, self.index)


def targets_field(index: int) -> str:
    """Return the batch field with a generator's targets, by its index in the model."""
    return f"target.{index}" if index else "target"


def targets_of(batch: Batch, index: int) -> Tensor:
    """Return a generator's targets [N, C, H, W]."""
    (targets,) = batch.of("target").values[index]
    return targets


class GeneratorLayer(PipelineLayer):
    """Layer whose items are the images to be generated.

    With `buckets` it runs once for the images of each size (`by_size`).
    """

    buckets: Buckets | None = None

    def forward(self, state: dict[str, Tensor], batch: Batch) -> dict[str, Tensor]:
        if self.buckets is None or self.is_empty(state, batch):
            return super().forward(state, batch)
        return by_size(self, state, batch)

    def seeded_rows(self, batch: Batch) -> tuple[Tensor | None, list[int]]:
        """Return the items' seeds and one row per image, however many rows a tensor has for it."""
        return batch.of("target").seeds, [1] * len(batch.of("target"))

    def is_empty(self, state: dict[str, Tensor], batch: Batch) -> bool:
        if self.reads:
            return len(state[self.reads[0]]) == 0
        return not batch.of("target").grids


class Projector(GeneratorLayer):
    """LLM rows → the generator's conditioning for cross-attention: two-layer MLP and norm.

    With `pooled` also one vector of that width per image: its rows' mean through a linear layer.
    """

    kind = "projector"
    reads = ("context",)
    division = colwise("mlp.0") | rowwise("mlp.2")

    def __init__(
        self,
        module: str,
        llm_width: int,
        hidden: int,
        width: int,
        context_tokens: int = 1,
        pooled: int | None = None,
    ) -> None:
        super().__init__()
        self.name, self.module, self.context_tokens = f"{module}.projector", module, context_tokens
        self.writes = (TensorSpec("conditioning", "target", "tokens", (width,)),)
        self.mlp = nn.Sequential(
            nn.Linear(llm_width, hidden), nn.GELU(), nn.Linear(hidden, width), nn.LayerNorm(width)
        )
        self.pooled = None if pooled is None else nn.Linear(llm_width, pooled)
        if pooled is not None:
            self.writes += (TensorSpec("pooled", "target", "one", (pooled,)),)

    def compute(self, state: dict[str, Tensor], batch: Batch) -> dict[str, Tensor]:
        result = {"conditioning": self.mlp(state["context"])}
        if self.pooled is not None:
            result["pooled"] = self.pooled(
                state["context"].unflatten(0, (-1, self.context_tokens)).mean(1)
            )
        return result


class Start(GeneratorLayer):
    """Noisy images (or latents) and their timesteps → the generator's first tensors."""

    kind = "in"

    def __init__(self, module: str, canvas: Canvas) -> None:
        super().__init__()
        self.name, self.module, self.canvas = f"{module}.in", module, canvas
        self.buckets = canvas.buckets
        self.reads, self.needs = canvas.reads, (canvas.needs,)

    def compute(self, state: dict[str, Tensor], batch: Batch) -> dict[str, Tensor]:
        canvas = self.canvas
        timesteps, noise = canvas.draw(batch)
        noisy = canvas.noise.mix(canvas.clean(state, batch), noise, timesteps)
        return self.start(state, noisy, canvas.noise.times(timesteps))

    def sigmas(self, steps: int) -> list[float] | None:
        """Return the noise levels of `steps` steps, before any shift; None: the scheduler's own.

        They are those that the family's pipeline in diffusers passes to its scheduler.
        """
        return None

    def start(
        self, state: dict[str, Tensor], noisy_NCHW: Tensor, times_N: Tensor
    ) -> dict[str, Tensor]:
        """Return the first tensors for noisy images, their times, and `state`'s conditioning."""
        raise NotImplementedError


class Finish(GeneratorLayer):
    """The generator's last tensors → its prediction, and the image loss.

    loss = weight · Σ_i w_i · mean_i (prediction − goal)² / images to generate of the global batch.
    Its name is `image`, or `image/MODULE` for further generators.
    """

    kind = "out"

    def __init__(self, module: str, canvas: Canvas, weight: float, reads: tuple[str, ...]) -> None:
        super().__init__()
        self.name, self.module, self.canvas, self.weight = f"{module}.out", module, canvas, weight
        self.buckets = canvas.buckets
        self.loss = f"image/{module}" if canvas.index else "image"
        sees_clean = canvas.noise.goal_needs_clean
        self.reads = (*reads, *(canvas.reads if sees_clean else ()))
        self.needs = (canvas.needs if sees_clean else "weights",)

    def compute(self, state: dict[str, Tensor], batch: Batch) -> dict[str, Tensor]:
        weights = batch.of("target").weights
        assert weights is not None
        noise, (timesteps, drawn) = self.canvas.noise, self.canvas.draw(batch)
        clean = self.canvas.clean(state, batch) if noise.goal_needs_clean else None
        error_N = (
            (self.predict(state, batch) - noise.goal(clean, drawn, timesteps))
            .square()
            .mean(dim=(1, 2, 3))
        )
        loss = self.weight * (weights * error_N).sum() / batch.targets
        return {f"{LOSS_PREFIX}{self.loss}": once(loss, self.group)}

    def predict(self, state: dict[str, Tensor], batch: Batch) -> Tensor:
        """Return the prediction [N, C, H, W], float32, for images of one size."""
        raise NotImplementedError


def from_patches(pixels_NPV: Tensor, patch: int, grid: tuple[int, int]) -> Tensor:
    """Return images [N, C, H, W] from square patches in raster order, each [patch, patch, C].

    `grid`: rows and columns of patches.
    """
    image = pixels_NPV.unflatten(2, (patch, patch, -1)).unflatten(1, grid)
    return image.permute(0, 5, 1, 3, 2, 4).flatten(4, 5).flatten(2, 3)


def to_patches(image_NCHW: Tensor, patch: int) -> Tensor:
    """Return the patches of images [N, P, patch · patch · C]; the inverse of `from_patches`."""
    patches = image_NCHW.unflatten(3, (-1, patch)).unflatten(2, (-1, patch))
    return patches.permute(0, 2, 4, 3, 5, 1).flatten(3).flatten(1, 2)


def even_sigmas(steps: int) -> list[float]:
    """Return equally spaced sigmas from 1 to 1/steps, for pipelines with dynamic shifts."""
    return [1 - step / steps for step in range(steps)]


def filled(count: int, values: tuple[float, ...], like: Tensor) -> Tensor:
    """Return [N, V]: the same values for `count` images, with the device and dtype of `like`."""
    return constant(torch.tensor, values, device=like.device, dtype=like.dtype).expand(count, -1)
