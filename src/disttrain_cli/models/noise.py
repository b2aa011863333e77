"""Noising of images in training, the generator's prediction target, and sampling.

Diffusion (Ho et al. 2020, section 2): x_t = √ᾱ_t·x_0 + √(1 − ᾱ_t)·ε; predicted is ε, or the
velocity v = √ᾱ_t·ε − √(1 − ᾱ_t)·x_0 (Salimans and Ho 2022, section 4). Rectified flow (Liu et al.
2022, section 2.1): x_t = (1 − σ)·x_0 + σ·ε with σ = t/T; predicted is ε − x_0. A flow's timesteps
have a density (Esser et al. 2024, arXiv 2403.03206, section 3.1) and a shift towards noise, for
large images (section 5.3.2). Schedules are diffusers' own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from disttrain_cli.models.host import constant, to_device
from disttrain_cli.models.layer import Batch

Prediction = Literal["epsilon", "v_prediction", "flow"]
Betas = Literal["linear", "scaled_linear", "squaredcos_cap_v2"]
Density = Literal["uniform", "logit_normal", "mode"]
TimeShift = Literal["exponential", "linear"]


@dataclass(frozen=True)
class Dynamic:
    """Resolution-dependent shift of a flow (diffusers' `use_dynamic_shifting`).

    Fields and defaults of FlowMatchEulerDiscreteScheduler.
    """

    base_shift: float = 0.5
    max_shift: float = 1.15
    base_image_seq_len: int = 256
    max_image_seq_len: int = 4096
    time_shift_type: TimeShift = "exponential"

    def shift(self, tokens: int) -> float:
        """Return s of `Noise.times`: it (type linear) or its logarithm is linear in `tokens`."""
        slope = (self.max_shift - self.base_shift) / (
            self.max_image_seq_len - self.base_image_seq_len
        )
        mu = self.base_shift + slope * (tokens - self.base_image_seq_len)
        return math.exp(mu) if self.time_shift_type == "exponential" else mu


@dataclass(frozen=True)
class Noise:
    """Noise schedule; all fields but the last four are those of `spec.runfile.model.NoiseSpec`."""

    prediction: Prediction = "epsilon"
    betas: Betas = "linear"
    beta_start: float = 1e-4
    beta_end: float = 0.02
    timesteps: int = 1000
    density: Density = "uniform"
    logit_mean: float = 0.0
    logit_std: float = 1.0
    mode_scale: float = 1.29
    shift: float = 1.0
    dynamic: Dynamic | None = None  # rule from which `shift` follows for this image size
    trained_betas: tuple[float, ...] | None = None  # replaces `betas`, one per timestep
    # betas rescaled so that the last timestep is pure noise (Lin et al. 2023, arXiv 2305.08891,
    # algorithm 1)
    zero_snr: bool = False
    terminal: float | None = None  # a flow's last noise level in sampling, to which it is stretched

    def times(self, timesteps_N: Tensor) -> Tensor:
        """Return the generator's time inputs for drawn timesteps 0 … T − 1.

        A flow's times are 1 … T, or with a shift s as many in between: T·sσ / (1 + (s − 1)σ) of σ =
        t/T.
        """
        if self.prediction != "flow":
            return timesteps_N
        if self.shift == 1.0:
            return timesteps_N + 1
        sigma = (timesteps_N + 1) / self.timesteps
        return self.shift * sigma / (1 + (self.shift - 1) * sigma) * self.timesteps

    def draw(self, generator: torch.Generator) -> Tensor:
        """Draw a timestep 0 … T − 1, int64 []."""
        if self.density == "uniform":
            return torch.randint(self.timesteps, (), generator=generator)
        if self.density == "logit_normal":
            drawn = self.logit_mean + self.logit_std * torch.randn((), generator=generator)
            sigma = torch.sigmoid(drawn)
        else:
            u = torch.rand((), generator=generator)
            sigma = 1 - u - self.mode_scale * (torch.cos(math.pi / 2 * u) ** 2 - 1 + u)
        return (sigma * self.timesteps).long().clamp(0, self.timesteps - 1)

    def mix(self, clean_NCHW: Tensor, noise_NCHW: Tensor, timesteps_N: Tensor) -> Tensor:
        """Return noisy images at drawn timesteps, float32."""
        clean_NCHW = clean_NCHW.float()
        if self.prediction == "flow":
            sigma = (self.times(timesteps_N) / self.timesteps).view(-1, 1, 1, 1)
            return (1 - sigma) * clean_NCHW + sigma * noise_NCHW
        signal, noise = self._amplitudes(timesteps_N)
        return signal * clean_NCHW + noise * noise_NCHW

    @property
    def goal_needs_clean(self) -> bool:
        """True if the prediction target depends on the image and not on the noise alone."""
        return self.prediction != "epsilon"

    def goal(self, clean_NCHW: Tensor | None, noise_NCHW: Tensor, timesteps_N: Tensor) -> Tensor:
        """Return the prediction target, float32; `clean_NCHW` may be None if it is the noise."""
        if self.prediction == "epsilon":
            return noise_NCHW
        assert clean_NCHW is not None
        clean_NCHW = clean_NCHW.float()
        if self.prediction == "flow":
            return noise_NCHW - clean_NCHW
        signal, noise = self._amplitudes(timesteps_N)
        return signal * noise_NCHW - noise * clean_NCHW

    def _amplitudes(self, timesteps_N: Tensor) -> tuple[Tensor, Tensor]:
        """Return √ᾱ_t and √(1 − ᾱ_t), [N, 1, 1, 1]."""
        alphas = constant(_alphas, self, device=timesteps_N.device)[timesteps_N].view(-1, 1, 1, 1)
        return alphas**0.5, (1 - alphas) ** 0.5

    def sampler(self, bounded: bool) -> Any:
        """Return diffusers' sampling scheduler: DDIM (Song et al. 2021), or a flow's Euler steps.

        Its steps end at timestep 0, as DDPM's do: the prediction's error remains in the image,
        times the noise of the last timestep. `bounded`: images lie in −1..1 (pixels), so that
        predictions outside are clipped; latents are not.
        """
        from diffusers import DDIMScheduler, FlowMatchEulerDiscreteScheduler

        if self.prediction != "flow":
            # steps from pure noise begin at the last timestep (arXiv 2305.08891, section 3.3)
            spacing = "trailing" if self.zero_snr and self.prediction != "epsilon" else "leading"
            return DDIMScheduler(
                prediction_type=self.prediction,
                clip_sample=bounded,
                timestep_spacing=spacing,
                **_betas(self),
            )
        if self.dynamic is None:
            return FlowMatchEulerDiscreteScheduler(
                num_train_timesteps=self.timesteps,
                shift=self.shift,
                shift_terminal=self.terminal,
            )
        return FlowMatchEulerDiscreteScheduler(
            num_train_timesteps=self.timesteps,
            use_dynamic_shifting=True,
            shift_terminal=self.terminal,
            **asdict(self.dynamic),
        )

    @property
    def most_steps(self) -> int:
        """Most sampling steps: for pure noise a predicted noise carries no information."""
        return self.timesteps - (self.zero_snr and self.prediction == "epsilon")

    def steps(self, bounded: bool, count: int, sigmas: Sequence[float] | None) -> Any:
        """Return the `sampler`, set up for `count` steps: at most one per timestep.

        Args:
            sigmas: a flow's, before the shift, one for each step; None: the scheduler's own.
        """
        scheduler = self.sampler(bounded)
        if self.prediction != "flow":
            scheduler.set_timesteps(count)
            return scheduler
        exponential = self.dynamic is not None and self.dynamic.time_shift_type == "exponential"
        mu = math.log(self.shift) if exponential else self.shift
        scheduler.set_timesteps(count, sigmas=sigmas, mu=mu)
        return scheduler


def _alphas(noise: Noise) -> Tensor:
    """Return ᾱ of every timestep, on the CPU."""
    from diffusers import DDPMScheduler

    with torch.device("cpu"):
        alphas: Tensor = DDPMScheduler(**_betas(noise)).alphas_cumprod
        return alphas


def _betas(noise: Noise) -> dict[str, Any]:
    return {
        "num_train_timesteps": noise.timesteps,
        "beta_schedule": noise.betas,
        "beta_start": noise.beta_start,
        "beta_end": noise.beta_end,
        "trained_betas": noise.trained_betas and list(noise.trained_betas),
        "rescale_betas_zero_snr": noise.zero_snr,
    }


def own_seed(seed: int, index: int) -> int:
    """Return the seed of an image for the generator at `index`; generators draw independently."""
    return (seed + index * 0x9E3779B97F4A7C15) % 2**63


def draw_noise(
    batch: Batch, shape: tuple[int, ...], schedule: Noise, index: int = 0
) -> tuple[Tensor, Tensor]:
    """Return timesteps [N] int64 and noise [N, *shape] float32 of a batch's targets.

    Drawn from `noise_seeds` once per stage, batch and generator (`own_seed`). On the meta device
    there are no seeds to read and the result has no values.
    """
    timestep_of, noise_of = f"timesteps/{index}", f"noise/{index}"
    if noise_of not in batch.cache:
        weights, seeds = batch.of("target").weights, batch.of("target").noise_seeds
        assert weights is not None and seeds is not None
        device = weights.device
        if device.type == "meta":
            batch.cache[timestep_of] = seeds
            batch.cache[noise_of] = torch.empty(len(seeds), *shape, device=device)
        else:
            draws = [_draw_one(own_seed(seed, index), shape, schedule) for seed in seeds.tolist()]
            batch.cache[timestep_of] = to_device(
                torch.stack([timestep for timestep, _ in draws]), device
            )
            batch.cache[noise_of] = to_device(torch.stack([noise for _, noise in draws]), device)
    return batch.cache[timestep_of], batch.cache[noise_of]


def _draw_one(seed: int, shape: tuple[int, ...], schedule: Noise) -> tuple[Tensor, Tensor]:
    generator = torch.Generator("cpu").manual_seed(seed)
    with torch.device("cpu"):
        return schedule.draw(generator), torch.randn(shape, generator=generator)
