import dataclasses

import numpy as np
import pytest
import torch

from disttrain_cli.models.graph import build_layers, describe, layer_table
from disttrain_cli.models.noise import Noise, _betas
from disttrain_cli.models.probe import probe_batch
from disttrain_cli.models.sampling import generate
from tests.batches import changed


def images(run, steps=3, seed=0, targets=2):
    layers, inputs = build_layers(run, 0, len(layer_table(run))), describe(run)
    batch = probe_batch(inputs, image=[(4, 4)], documents=[[40], [30]], target=targets)
    return generate(
        layers,
        changed(dataclasses.replace(batch, labels=None), "target", values={}),
        inputs,
        steps,
        seed,
    )


def test_images_are_a_function_of_weights_seed_and_context(make_run):
    first = images(make_run())
    assert first.shape == (2, 16, 16, 3) and first.dtype == np.uint8
    assert np.array_equal(first, images(make_run()))
    assert not np.array_equal(first, images(make_run(), seed=1))
    assert not np.array_equal(first, images(make_run(seed=1)))
    assert not np.array_equal(first[0], first[1])


def test_nothing_to_generate_gives_no_image(make_run):
    assert images(make_run(), targets=0).shape == (0, 16, 16, 3)


def test_equal_to_diffusers_own_loop_with_a_perfect_predictor(make_run, monkeypatch):
    """A predictor that knows the clean image must bring DDIM back to it exactly, whatever the
    noise."""
    from diffusers import DDIMScheduler

    from disttrain_cli.models import unet

    clean = torch.linspace(-0.9, 0.9, 3 * 16 * 16).view(1, 3, 16, 16)
    alphas = DDIMScheduler().alphas_cumprod
    seen = {}
    monkeypatch.setattr(
        unet.In,
        "start",
        lambda self, state, x, t, start=unet.In.start: (
            seen.update(x=x, t=t),
            start(self, state, x, t),
        )[1],
    )

    def knows(self, state, batch):
        alpha = alphas[seen["t"]].view(-1, 1, 1, 1)
        return (seen["x"] - alpha.sqrt() * clean) / (1 - alpha).sqrt()

    monkeypatch.setattr(unet.Out, "predict", knows)
    result = images(make_run(), steps=5)
    expected = ((clean[0] + 1) * 127.5).round().permute(1, 2, 0).numpy()
    assert np.abs(result.astype(float) - expected).max() <= 1


@pytest.mark.parametrize("prediction", ["epsilon", "v_prediction"])
def test_what_a_prediction_is_wrong_by_stays_in_images_no_more_than_with_ddpm(prediction):
    """A denoiser of four images that knows them, but for an error of a tenth: how far its images
    are from the next."""
    from diffusers import DDPMScheduler

    noise = Noise(prediction=prediction)
    images = torch.randint(0, 2, (4, 64), generator=torch.Generator().manual_seed(0)) * 1.8 - 0.9
    alphas = DDPMScheduler(**_betas(noise)).alphas_cumprod

    def predict(noisy, time):
        signal, sigma = alphas[time].sqrt(), (1 - alphas[time]).sqrt()
        clean = (
            torch.softmax(-(noisy[:, None] - signal * images).square().sum(-1) / (2 * sigma**2), -1)
            @ images
        )
        drawn = (noisy - signal * clean) / sigma
        return (
            drawn if prediction == "epsilon" else signal * drawn - sigma * clean
        ) + 0.1 * torch.sin(9 * noisy)

    def left_over(scheduler):
        scheduler.set_timesteps(20)
        sample, random = (
            torch.randn(16, 64, generator=torch.Generator().manual_seed(1)),
            torch.Generator().manual_seed(2),
        )
        for time in scheduler.timesteps:
            sample = scheduler.step(
                predict(sample, time), time, sample, generator=random
            ).prev_sample
        return float((sample[:, None] - images).square().mean(-1).min(1).values.sqrt().mean())

    ddpm = left_over(DDPMScheduler(prediction_type=prediction, clip_sample=True, **_betas(noise)))
    assert left_over(noise.sampler(bounded=True)) < 1.5 * ddpm < 0.02


def test_no_more_steps_than_timesteps(make_run):
    run = make_run(image_generator={"noise": {"timesteps": 3}})
    assert images(run, steps=20, targets=1).shape == (1, 16, 16, 3)


@pytest.mark.parametrize("steps", [1, 20])
def test_any_number_of_steps(make_run, steps):
    assert images(make_run(), steps=steps, targets=1).shape == (1, 16, 16, 3)
