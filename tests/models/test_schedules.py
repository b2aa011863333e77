"""Noise schedules of published folders: each field of each scheduler class that is taken is applied
as diffusers does, says nothing of training, or is refused."""

import inspect
import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch

from disttrain_cli.errors import SpecError
from disttrain_cli.models.architectures import read_configs
from disttrain_cli.models.configs import noise as schedules
from disttrain_cli.models.noise import Noise
from disttrain_cli.models.weights import starting_weights
from disttrain_cli.runtime.outputs.export import export
from disttrain_cli.spec.runfile import Run
from tests.cases import first_fast
from tests.models.changed_runs import with_generator
from tests.models.conftest import UNET
from tests.runtime.outputs.test_export import trained

NAME = "image_generator"
Write = Callable[..., Run]


@pytest.fixture
def write(make_run: Callable[..., Run], tmp_path: Path) -> Write:
    """A run whose U-Net comes from a folder with a scheduler_config.json of some fields."""

    def written(fields: dict[str, Any], **spec: Any) -> Run:
        folder = tmp_path / "sd" / "unet"
        if not folder.exists():
            diffusers.UNet2DConditionModel(**UNET).save_config(folder)
        (tmp_path / "sd" / "scheduler").mkdir(exist_ok=True)
        path = tmp_path / "sd" / "scheduler" / "scheduler_config.json"
        path.write_text(json.dumps(fields))
        noise = {"noise": spec} if spec else {}
        return with_generator(make_run(), folder="sd/unet", pretrained=False, **noise)

    return written


def noise_of(run: Run) -> Noise:
    noise = read_configs(run)[NAME].noise
    assert noise is not None
    return noise


@pytest.mark.parametrize("name", [*schedules.DIFFUSION_SCHEDULERS, *schedules.FLOW_SCHEDULERS])
def test_every_field_of_every_class_that_is_taken_has_its_place(name: str) -> None:
    parameters = set(inspect.signature(getattr(diffusers, name).__init__).parameters) - {"self"}
    if name in schedules.FLOW_SCHEDULERS:
        applied, plain, drawing = set(schedules.FLOW_FIELDS), set(schedules.FLOW_PLAIN), set()
    else:
        applied, plain = set(schedules.DIFFUSION_FIELDS), set(schedules.DIFFUSION_PLAIN)
        drawing = set(schedules.DRAWING_FIELDS)
    assert parameters <= applied | plain | drawing
    assert not applied & plain and not drawing & (applied | plain)
    assert schedules.unread(dict.fromkeys(parameters)) == []


BETAS = torch.linspace(0.002, 0.03, 40).tolist()
SHORT = {"num_train_timesteps": 40}


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"beta_start": 0.001, "beta_end": 0.01, "beta_schedule": "scaled_linear"},
        {"beta_schedule": "squaredcos_cap_v2"},
        {"rescale_betas_zero_snr": True},
        {"trained_betas": BETAS},
        {"trained_betas": BETAS, "rescale_betas_zero_snr": True},
        {"trained_betas": BETAS, "beta_start": 0.5, "beta_end": 0.1},  # not read beside them
        {"rescale_betas_zero_snr": True, "prediction_type": "v_prediction"},
        {"beta_schedule": "scaled_linear", "rescale_betas_zero_snr": True, "clip_sample": False},
    ],
)
@pytest.mark.parametrize("name", ["DDPMScheduler", "DDIMScheduler", "EulerDiscreteScheduler", None])
def test_images_become_noise_as_in_diffusers(
    write: Write, name: str | None, fields: dict[str, Any]
) -> None:
    """Which trains with DDPMScheduler, whichever class the folder names."""
    fields = SHORT | fields | ({"_class_name": name} if name else {})
    run = write(fields)
    noise = noise_of(run)
    theirs = diffusers.DDPMScheduler.from_config(fields)
    generator = torch.Generator().manual_seed(0)
    clean, drawn = (torch.randn(40, 3, 2, 2, generator=generator) for _ in range(2))
    times = torch.arange(40)
    assert torch.equal(noise.mix(clean, drawn, times), theirs.add_noise(clean, drawn, times))
    goal = noise.goal(clean, drawn, times)
    velocity = fields.get("prediction_type") == "v_prediction"
    assert torch.equal(goal, theirs.get_velocity(clean, drawn, times) if velocity else drawn)
    assert torch.equal(noise.sampler(bounded=True).alphas_cumprod, theirs.alphas_cumprod)


@pytest.mark.parametrize("name", first_fast(schedules.DIFFUSION_SCHEDULERS, 5))
def test_what_a_schedule_leaves_out_is_its_classs_default(write: Write, name: str) -> None:
    noise = noise_of(write({"_class_name": name}))
    with warnings.catch_warnings(action="ignore"):  # of diffusers, about numpy
        theirs = getattr(diffusers, name)()
    assert torch.equal(noise.sampler(bounded=True).alphas_cumprod, theirs.alphas_cumprod)
    assert noise.prediction == theirs.config.prediction_type


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"_class_name": "EDMEulerScheduler", "sigma_data": 0.5}, "_class_name: EDMEulerScheduler"),
        ({"_class_name": "LCMScheduler"}, "_class_name: LCMScheduler"),
        ({"_class_name": "FlowMatchLCMScheduler"}, "_class_name: FlowMatchLCMScheduler"),
        ({"_class_name": "ddpm"}, "_class_name: ddpm"),
        ({"trained_betas": BETAS}, "given: '40 values'; allowed: 1000 numbers"),
        ({"trained_betas": 0.1}, "trained_betas"),
        (SHORT | {"trained_betas": [*BETAS[:-1], "much"]}, "trained_betas"),
        (SHORT | {"trained_betas": [*BETAS[:-1], 1.5]}, "trained_betas"),
        ({"rescale_betas_zero_snr": "yes"}, "rescale_betas_zero_snr"),
        ({"num_train_timesteps": 1, "rescale_betas_zero_snr": True}, "rescale_betas_zero_snr"),
        ({"prediction_type": "sample"}, "prediction_type"),
        ({"prediction_type": "flow_prediction"}, "prediction_type"),
        ({"beta_schedule": "sigmoid"}, "beta_schedule"),
        ({"_class_name": "EulerDiscreteScheduler", "timestep_type": "continuous"}, "timestep_type"),
        ({"_class_name": "UniPCMultistepScheduler", "use_flow_sigmas": True}, "use_flow_sigmas"),
        ({"_class_name": "DPMSolverMultistepScheduler", "use_dynamic_shifting": True}, "dynamic"),
        *(
            ({"_class_name": schedules.FLOW_SCHEDULER, field: True}, field)
            for field in schedules.FLOW_PLAIN
        ),
    ],
)
def test_what_is_trained_otherwise_is_refused(
    write: Write, fields: dict[str, Any], said: str
) -> None:
    with pytest.raises(SpecError) as refused:
        read_configs(write(fields))
    assert said in f"{refused.value.what}\n{refused.value.why}", refused.value


def test_the_run_files_betas_take_the_place_of_listed_ones(write: Write) -> None:
    fields = SHORT | {"trained_betas": BETAS, "rescale_betas_zero_snr": True}
    assert noise_of(write(fields)).trained_betas == tuple(BETAS)
    noise = noise_of(write(fields, betas="scaled_linear", beta_end=0.01))
    assert noise == Noise(betas="scaled_linear", beta_end=0.01, timesteps=40, zero_snr=True)
    with pytest.raises(SpecError, match="40 values"):
        read_configs(write(fields, timesteps=50))


def test_a_field_of_no_class_is_named(write: Write) -> None:
    run = write({"rescale_beta_zero_snr": True, "_diffusers_version": "0.1", "steps_offset": 1})
    (note,) = [note for note in starting_weights(run) if "not read of" in note]
    assert note.startswith(f"{NAME}: not read of its scheduler_config.json: rescale_beta_zero_")


@pytest.mark.parametrize("prediction", ["v_prediction", "epsilon"])
@pytest.mark.parametrize("count", [5, 40])
def test_images_are_drawn_of_noise_alone(prediction: Any, count: int) -> None:
    """By a model that knows the image: velocities lead there from the last timestep on; noise
    alone says nothing of the image where noise is predicted, and no step begins there."""
    noise = Noise(prediction, timesteps=40, zero_snr=True)
    scheduler = noise.steps(False, min(count, noise.most_steps), None)
    assert (int(scheduler.timesteps[0]) == 39) == (prediction == "v_prediction")
    clean = torch.linspace(-0.9, 0.9, 12).view(1, 3, 2, 2)
    sample = torch.randn(1, 3, 2, 2, generator=torch.Generator().manual_seed(0))
    for time in scheduler.timesteps:
        alpha = scheduler.alphas_cumprod[time]
        drawn = (sample - alpha.sqrt() * clean) / (1 - alpha).sqrt()
        goal = noise.goal(clean, drawn, time.view(1))
        sample = scheduler.step(goal, time, sample).prev_sample
    torch.testing.assert_close(sample, clean, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_an_export_has_the_schedule_of_its_folder(write: Write, tmp_path: Path) -> None:
    """Whole, with fields that only say how images are drawn; and what the run file changed."""
    fields = SHORT | {
        "_class_name": "PNDMScheduler",
        "beta_schedule": "scaled_linear",
        "trained_betas": BETAS,
        "rescale_betas_zero_snr": True,
        "timestep_spacing": "trailing",
        "skip_prk_steps": True,
    }
    for number, (spec, changed) in enumerate(
        (
            ({}, {}),
            ({"prediction": "v_prediction"}, {"prediction_type": "v_prediction"}),
            (
                {"betas": "linear", "beta_end": 0.01},
                {"beta_schedule": "linear", "beta_end": 0.01, "trained_betas": None},
            ),
        )
    ):
        run = write(fields, **spec)
        trained(run, step=number + 1)
        export(run, tmp_path / f"out{number}")
        path = tmp_path / f"out{number}" / NAME / "scheduler_config.json"
        assert json.loads(path.read_text()) == fields | changed
        assert torch.equal(
            diffusers.DDPMScheduler.from_pretrained(path.parent).alphas_cumprod,
            noise_of(run).sampler(bounded=True).alphas_cumprod,
        )
    run = write(fields, prediction="flow")
    trained(run, step=9)
    export(run, tmp_path / "flow")
    found = json.loads((tmp_path / "flow" / NAME / "scheduler_config.json").read_text())
    assert found["_class_name"] == schedules.FLOW_SCHEDULER
