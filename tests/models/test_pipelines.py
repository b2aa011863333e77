"""Drawing by SD3, Flux and Lumina 2 against their pipelines in diffusers, from the same noise and
conditioning: times, sigmas and images."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from disttrain_cli.errors import SpecError
from disttrain_cli.models.architectures import read_configs
from disttrain_cli.models.configs.generators import CLASSES
from disttrain_cli.models.graph import build_layers, describe, layer_table
from disttrain_cli.models.published import on_meta
from disttrain_cli.models.sampling import generate
from disttrain_cli.models.vae import VaeDecoder, decoder_maker
from disttrain_cli.spec.runfile import Run
from tests.batches import changed
from tests.cases import first_fast
from tests.models.test_generators import FLUX, LUMINA2, NAME, SD3, VAE, library_model

#: Patches of an image: latents of 8 × 8 in patches of 2 × 2.
TOKENS = 16
STATIC = {"shift": 3.0}
DYNAMIC = {"shift": 3.0, "use_dynamic_shifting": True, "base_shift": 0.5, "max_shift": 1.15}
LINEAR = {
    "use_dynamic_shifting": True,
    "time_shift_type": "linear",
    "base_image_seq_len": 8,
    "max_image_seq_len": 64,
}
SCHEDULES = pytest.mark.parametrize(
    "schedule", [{}, STATIC, DYNAMIC, LINEAR], ids=["plain", "static", "dynamic", "linear"]
)
PIPELINES = {
    "sd3": "StableDiffusion3Pipeline",
    "flux": "FluxPipeline",
    "lumina2": "Lumina2Pipeline",
}
FAMILIES = pytest.mark.parametrize("family", ["sd3", "flux", "lumina2"])


@pytest.fixture
def written(make_run: Any, tmp_path: Path) -> Any:
    """A run whose generator and schedule are folders of a pipeline."""

    def make(family: str, schedule: dict[str, Any], **noise: Any) -> Run:
        config = {"sd3": SD3 | {"qk_norm": "rms_norm"}, "flux": FLUX, "lumina2": LUMINA2}[family]
        on_meta(family, config).save_config(tmp_path / "pipe" / "transformer")
        fields = {"_class_name": "FlowMatchEulerDiscreteScheduler", **schedule}
        (tmp_path / "pipe" / "scheduler").mkdir(exist_ok=True)
        (tmp_path / "pipe" / "scheduler" / "scheduler_config.json").write_text(json.dumps(fields))
        run = make_run()
        plain = run.file.model_dump(mode="json", exclude_none=True)
        plain["model"]["modules"][NAME] = {
            "kind": "generator",
            "image_size": 16,
            "context_tokens": 4,
            "folder": "pipe/transformer",
            "vae": VAE | {"shift_factor": 0.06},
            "noise": noise,
            "pretrained": False,
        }
        return Run(path=run.path, file=type(run.file).model_validate(plain))

    return make


def asked_by_pipeline(family: str, scheduler: Any, steps: int) -> Any:
    """The scheduler after what the pipeline's `__call__` asks of it."""
    from diffusers.pipelines.flux import pipeline_flux as flux

    told = {
        "mu": flux.calculate_shift(
            TOKENS,
            scheduler.config.base_image_seq_len,
            scheduler.config.max_image_seq_len,
            scheduler.config.base_shift,
            scheduler.config.max_shift,
        )
    }
    sigmas = np.linspace(1.0, 1 / steps, steps) if family != "sd3" else None
    flux.retrieve_timesteps(scheduler, steps, "cpu", sigmas=sigmas, **told)
    return scheduler


@FAMILIES
@SCHEDULES
@pytest.mark.parametrize("steps", first_fast([4, 1, 28]))
def test_times_and_sigmas_are_the_pipelines(
    written: Any, family: str, schedule: dict[str, Any], steps: int
) -> None:
    from diffusers import FlowMatchEulerDiscreteScheduler

    run = written(family, schedule)
    table = layer_table(run)
    at = next(i for i, layer in enumerate(table) if layer.name == f"{NAME}.in")
    (start,) = build_layers(run, at, at + 1)
    noise = read_configs(run)[NAME].noise
    assert noise is not None
    mine = noise.steps(False, steps, start.sigmas(steps))  # type: ignore[attr-defined]
    theirs = asked_by_pipeline(family, FlowMatchEulerDiscreteScheduler.from_config(schedule), steps)
    torch.testing.assert_close(mine.timesteps, theirs.timesteps, rtol=1e-6, atol=0)
    torch.testing.assert_close(mine.sigmas, theirs.sigmas, rtol=1e-6, atol=0)
    # what an export's pipeline will ask of the schedule beside it
    exported = FlowMatchEulerDiscreteScheduler.from_config(noise.sampler(False).config)
    again = asked_by_pipeline(family, exported, steps)
    torch.testing.assert_close(again.sigmas, theirs.sigmas, rtol=1e-6, atol=0)


@pytest.mark.slow
@FAMILIES
@SCHEDULES
def test_images_are_the_pipelines(
    written: Any, monkeypatch: pytest.MonkeyPatch, family: str, schedule: dict[str, Any]
) -> None:
    import diffusers

    from disttrain_cli.models.probe import probe_batch

    if family == "lumina2" and schedule.get("use_dynamic_shifting"):
        pytest.skip("its pipeline shifts by the number of channels, not of tokens")
    run = written(family, schedule)
    inputs, config = describe(run), read_configs(run)[NAME]
    layers = build_layers(run, 0, len(layer_table(run)))
    assert config.vae is not None and config.noise is not None
    decoder = decoder_maker(NAME, config.vae).build(0)
    assert isinstance(decoder, VaeDecoder)
    start = next(layer for layer in layers if layer.name == f"{NAME}.in")
    seen, begin = dict[str, Tensor](), start.start  # type: ignore[attr-defined]

    def watched(state: dict[str, Tensor], noisy: Tensor, times: Tensor) -> dict[str, Tensor]:
        seen.update(
            {"noise": seen.get("noise", noisy)}
            | {name: state[name] for name in ("conditioning", "pooled") if name in state}
        )
        return dict(begin(state, noisy, times))

    monkeypatch.setattr(start, "start", watched)
    batch = changed(
        probe_batch(inputs, image=[(4, 4)], documents=[[40], [30]], target=2), "target", values={}
    )
    mine = generate(layers, batch, inputs, 4, 0, decoder)

    vae = on_meta("vae", config.vae).to_empty(device="cpu").eval()
    vae.load_state_dict(decoder.to_published(dict(decoder.named_parameters())), strict=False)
    absent: dict[str, Any] = dict.fromkeys(
        ("text_encoder", "tokenizer")
        + (("text_encoder_2", "tokenizer_2") if family != "lumina2" else ())
        + (("text_encoder_3", "tokenizer_3") if family == "sd3" else ())
    )
    pipeline_class = getattr(diffusers, PIPELINES[family])
    pipe = pipeline_class(
        transformer=library_model(run, [layer for layer in layers if layer.module == NAME])[0],
        vae=vae,
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler.from_config(schedule),
        **absent,
    )
    assert type(pipe.transformer).__name__ == CLASSES[family]
    noise = seen["noise"]
    if family == "flux":
        noise = pipe._pack_latents(noise, *noise.shape)
    with torch.no_grad():
        theirs = pipe(
            prompt_embeds=seen["conditioning"].unflatten(0, (2, 4)),
            **(
                {"pooled_prompt_embeds": seen["pooled"]}
                if "pooled" in seen
                else {"prompt_attention_mask": torch.ones(2, 4, dtype=torch.bool)}
            ),
            latents=noise,
            height=16,
            width=16,
            num_inference_steps=4,
            guidance_scale=3.5 if family == "flux" else 1.0,
            output_type="np",
        ).images
    difference = np.abs(mine.astype(float) - theirs * 255)
    assert difference.max() <= 0.51 and mine.std() > 5


@pytest.mark.parametrize(
    "fields",
    [
        {"base_shift": "much"},
        {"base_image_seq_len": 64, "max_image_seq_len": 64},
        {"time_shift_type": "linear", "base_shift": -9.0},
        {"time_shift_type": "cubic"},
        {"max_shift": 1e9},
    ],
)
def test_a_line_that_gives_no_shift_is_refused(written: Any, fields: dict[str, Any]) -> None:
    with pytest.raises(SpecError, match="no shift for images of 16 tokens"):
        read_configs(written("flux", {"use_dynamic_shifting": True} | fields))


def test_a_number_of_the_run_file_goes_over_a_folders_dynamic_shift(written: Any) -> None:
    noise = read_configs(written("flux", DYNAMIC, shift=2.0))[NAME].noise
    assert noise is not None and (noise.shift, noise.dynamic) == (2.0, None)
