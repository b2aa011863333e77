"""Image generators against diffusers' own forward: U-Nets like SD 1.5, 2.1, XL, PixArt, SD3,
Flux and Lumina 2; noise, cuts, sampling."""

import copy
import dataclasses
import json
import math

import numpy as np
import pytest
import torch

from disttrain_cli.errors import SpecError
from disttrain_cli.models.architectures import read_configs
from disttrain_cli.models.flops import count_flops
from disttrain_cli.models.generator import Finish
from disttrain_cli.models.graph import build_layers, describe, layer_table, live_tensors
from disttrain_cli.models.noise import Noise
from disttrain_cli.models.probe import entry_state, probe_batch
from disttrain_cli.models.published import on_meta
from disttrain_cli.models.sampling import generate
from disttrain_cli.models.sharding import tp_degrees
from disttrain_cli.models.tensor_parallel import linears, shard
from tests.batches import changed, through
from tests.cases import mostly_slow
from tests.models.changed_runs import with_generator
from tests.models.test_sharding import in_lockstep
from tests.models.test_vae import VAE

NAME = "image_generator"
SD = {
    "in_channels": 4,
    "out_channels": 4,
    "block_out_channels": [16, 32],
    "layers_per_block": 1,
    "down_block_types": ["CrossAttnDownBlock2D", "DownBlock2D"],
    "up_block_types": ["UpBlock2D", "CrossAttnUpBlock2D"],
    "cross_attention_dim": 24,
    "norm_num_groups": 8,
}
SCALED = {"betas": "scaled_linear", "beta_start": 0.00085, "beta_end": 0.012}
PIXART = {
    "num_attention_heads": 4,
    "attention_head_dim": 12,
    "in_channels": 4,
    "out_channels": 8,
    "num_layers": 2,
    "cross_attention_dim": 48,
    "caption_channels": 20,
    "use_additional_conditions": True,
}
SD3 = {
    "num_attention_heads": 4,
    "attention_head_dim": 12,
    "in_channels": 4,
    "out_channels": 4,
    "num_layers": 3,
    "patch_size": 2,
    "joint_attention_dim": 20,
    "caption_projection_dim": 48,
    "pooled_projection_dim": 24,
    "pos_embed_max_size": 7,
}
FLUX = {
    "num_attention_heads": 4,
    "attention_head_dim": 12,
    "in_channels": 16,
    "num_layers": 1,
    "num_single_layers": 2,
    "joint_attention_dim": 20,
    "pooled_projection_dim": 24,
    "axes_dims_rope": [2, 4, 6],
    "guidance_embeds": True,
}
LUMINA2 = {
    "hidden_size": 48,
    "num_attention_heads": 4,
    "num_kv_heads": 2,
    "in_channels": 4,
    "num_layers": 2,
    "num_refiner_layers": 1,
    "multiple_of": 16,
    "axes_dim_rope": [4, 4, 4],
    "axes_lens": [8, 8, 8],
    "cap_feat_dim": 20,
}
GENERATORS = {
    "sd 1.5": {"config": SD | {"attention_head_dim": 4}, "vae": VAE, "noise": SCALED},
    "sd 2.1": {
        "config": SD
        | {"attention_head_dim": [2, 4], "use_linear_projection": True, "upcast_attention": True},
        "vae": VAE,
        "noise": SCALED | {"prediction": "v_prediction"},
    },
    "sd xl": {
        "config": SD
        | {
            "down_block_types": ["DownBlock2D", "CrossAttnDownBlock2D"],
            "up_block_types": ["CrossAttnUpBlock2D", "UpBlock2D"],
            "attention_head_dim": [2, 4],
            "transformer_layers_per_block": [1, 2],
            "use_linear_projection": True,
            "addition_embed_type": "text_time",
            "addition_time_embed_dim": 8,
            "projection_class_embeddings_input_dim": 20 + 6 * 8,
        },
        "vae": VAE,
        "noise": SCALED,
    },
    "pixart": {"architecture": "pixart", "config": PIXART, "vae": VAE},
    "pixart, small": {
        "architecture": "pixart",
        "config": PIXART
        | {
            "in_channels": 3,
            "out_channels": 3,
            "caption_channels": None,
            "use_additional_conditions": False,
            "cross_attention_dim": 20,
            "activation_fn": "geglu",
        },
        "noise": {"prediction": "flow"},
    },
    "sd3": {"architecture": "sd3", "config": SD3, "vae": VAE | {"shift_factor": 0.06}},
    "sd3.5": {
        "architecture": "sd3",
        "config": SD3 | {"qk_norm": "rms_norm", "dual_attention_layers": [0]},
        "vae": VAE,
        "noise": {"density": "logit_normal", "shift": 3.0},
    },
    "sd3, pixels": {
        "architecture": "sd3",
        "config": SD3
        | {
            "in_channels": 3,
            "out_channels": 3,
            "num_layers": 1,
            "patch_size": 4,
            "qk_norm": "layer_norm",
            "dual_attention_layers": [0],
        },
        "noise": {"density": "mode"},
    },
    "flux": {"architecture": "flux", "config": FLUX, "vae": VAE, "noise": {"shift": "resolution"}},
    "flux, pixels": {
        "architecture": "flux",
        "config": FLUX | {"in_channels": 12, "out_channels": 12, "guidance_embeds": False},
    },
    "lumina2": {
        "architecture": "lumina2",
        "config": LUMINA2,
        "vae": VAE | {"shift_factor": 0.06},
        "noise": {"density": "logit_normal", "shift": 3.0},
    },
    "lumina2, pixels": {
        "architecture": "lumina2",
        "config": LUMINA2
        | {"in_channels": 3, "patch_size": 4, "num_kv_heads": 4, "num_refiner_layers": 2},
    },
    "pixels, velocity": {
        "config": SD | {"in_channels": 3, "out_channels": 3, "attention_head_dim": 4},
        "noise": {"prediction": "v_prediction", "betas": "squaredcos_cap_v2"},
    },
}
QUICK = ("sd xl", "pixart, small", "flux")
ANY = pytest.mark.parametrize("kind", mostly_slow(GENERATORS, *QUICK))


@pytest.fixture
def setting(make_run):
    """Run, inputs, the generator's layers, a batch and the state at the generator's entry."""

    def make(kind, targets=3):
        # The tiny U-Net of `make_run` has fields of its own.
        run = make_run(image_generator={"config": {"block_out_channels": [16, 32]}})
        run = with_generator(run, **{"architecture": "unet2d_condition", **GENERATORS[kind]})
        table, inputs = layer_table(run), describe(run)
        start = next(i for i, info in enumerate(table) if info.module == NAME)
        batch = probe_batch(inputs, target=targets)
        batch.of("target").weights[1:2] = 0.0
        return (
            run,
            inputs,
            build_layers(run, start, len(table)),
            batch,
            entry_state(table, NAME, inputs, batch),
        )

    return make


def library_model(run, layers):
    config = read_configs(run)[NAME]
    model = on_meta(config.architecture, config.config).to_empty(device="cpu").eval()
    weights = {}
    for layer in layers:
        if layer.weights_of == "module":
            weights |= layer.to_published(dict(layer.named_parameters()))
    if config.architecture == "pixart":  # positions are no weights
        model.pos_embed = type(model)(**config.config).pos_embed
    if config.architecture == "lumina2":
        model.rope_embedder = type(model)(**config.config).rope_embedder
    found = model.load_state_dict(weights, strict=False)
    assert not found.missing_keys and not found.unexpected_keys
    return model, config


@pytest.mark.parametrize("kind", GENERATORS)
def test_layers_equal_diffusers_own_model(setting, kind):
    run, _, layers, batch, state = setting(kind)
    torch.manual_seed(1)
    with torch.no_grad():  # norms that are not all alike
        for layer in layers:
            for parameter in layer.parameters():
                if parameter.ndim == 1:
                    parameter += 0.1 * torch.randn_like(parameter)
    model, config = library_model(run, layers)
    state = through(layers, batch, state)
    canvas, out = layers[-1].canvas, layers[-1]
    clean = state["latents"] if config.vae else batch.of("target").values[0][0]
    assert canvas.shape == ((4, 8, 8) if config.vae else (3, 16, 16))
    timesteps, noise = canvas.draw(batch)
    noisy = config.noise.mix(clean, noise, timesteps)
    arguments = {"encoder_hidden_states": state["conditioning"].unflatten(0, (3, 4))}
    if kind == "sd xl":
        ids = torch.tensor([16.0, 16.0, 0.0, 0.0, 16.0, 16.0]).expand(3, -1)
        arguments["added_cond_kwargs"] = {"text_embeds": state["pooled"], "time_ids": ids}
    if kind.startswith("pixart"):  # the layers' own conditioning is already projected
        projector = next(layer for layer in layers if layer.kind == "projector")
        arguments["encoder_hidden_states"] = projector(state, batch)["conditioning"].unflatten(
            0, (3, 4)
        )
        arguments["added_cond_kwargs"] = (
            {"resolution": torch.full((3, 2), 16.0), "aspect_ratio": torch.ones(3, 1)}
            if kind == "pixart"
            else {"resolution": None, "aspect_ratio": None}
        )
    if kind.startswith(("sd3", "flux", "lumina2")):
        projector = next(layer for layer in layers if layer.kind == "projector")
        arguments["encoder_hidden_states"] = projector(state, batch)["conditioning"].unflatten(
            0, (3, 4)
        )
        if "pooled" in state:
            arguments["pooled_projections"] = state["pooled"]
    times = config.noise.times(timesteps)
    if kind.startswith("flux"):
        predicted = of_flux(model, config, noisy, times, arguments)
    elif kind.startswith("lumina2"):  # as its pipeline calls it
        arguments["encoder_attention_mask"] = torch.ones(3, 4, dtype=torch.bool)
        predicted = -model(noisy, timestep=1 - times / 1000, **arguments).sample
    else:
        predicted = model(noisy, timestep=times, **arguments).sample[:, : canvas.shape[0]]
    torch.testing.assert_close(out.predict(state, batch), predicted, rtol=1e-5, atol=1e-5)
    goal = {
        "epsilon": noise,
        "flow": noise - clean,
        "v_prediction": scheduler(config.noise).get_velocity(clean, noise, timesteps),
    }[config.noise.prediction]
    errors = (predicted - goal).square().mean((1, 2, 3))
    torch.testing.assert_close(
        state["loss/image"], 2.0 * (errors[0] + errors[2]) / 3, rtol=1e-5, atol=0
    )
    gradients = torch.autograd.grad(
        state["loss/image"], [p for layer in layers for p in layer.parameters() if p.requires_grad]
    )
    assert all(gradient.isfinite().all() for gradient in gradients)


def of_flux(model, config, noisy, times, arguments):
    """Flux's own prediction, given what its pipeline gives it."""
    from diffusers import FluxPipeline

    side = noisy.shape[2]
    guided = config.config["guidance_embeds"]
    made = model(
        FluxPipeline._pack_latents(noisy, *noisy.shape),
        timestep=times / 1000,
        img_ids=FluxPipeline._prepare_latent_image_ids(3, side // 2, side // 2, "cpu", noisy.dtype),
        txt_ids=torch.zeros(4, 3),
        guidance=torch.full((3,), 3.5) if guided else None,
        **arguments,
    ).sample
    return FluxPipeline._unpack_latents(made, side, side, 1)


def scheduler(noise):
    from diffusers import DDPMScheduler

    return DDPMScheduler(
        beta_schedule=noise.betas, beta_start=noise.beta_start, beta_end=noise.beta_end
    )


@pytest.mark.parametrize("betas", ["linear", "scaled_linear", "squaredcos_cap_v2"])
def test_noise_is_mixed_as_diffusers_does_and_flows_are_straight_lines(betas):
    noise, clean, drawn = (
        Noise("v_prediction", betas, 0.001, 0.01),
        torch.randn(3, 1, 2, 2),
        torch.randn(3, 1, 2, 2),
    )
    timesteps = torch.tensor([0, 500, 999])
    assert torch.equal(
        noise.mix(clean, drawn, timesteps), scheduler(noise).add_noise(clean, drawn, timesteps)
    )
    assert torch.equal(
        noise.goal(clean, drawn, timesteps), scheduler(noise).get_velocity(clean, drawn, timesteps)
    )
    flow = Noise("flow")
    torch.testing.assert_close(flow.mix(clean, drawn, timesteps)[2], drawn[2])
    torch.testing.assert_close(
        flow.mix(clean, drawn, timesteps)[1], 0.499 * clean[1] + 0.501 * drawn[1]
    )


def drawn_sigmas(count=20_000, **noise):
    generator = torch.Generator().manual_seed(0)
    schedule = Noise("flow", **noise)
    drawn = torch.stack([schedule.draw(generator) for _ in range(count)])
    assert drawn.dtype == torch.int64 and drawn.min() >= 0 and drawn.max() < schedule.timesteps
    return (drawn + 0.5) / schedule.timesteps


@pytest.mark.slow
def test_timesteps_have_the_densities_of_the_paper():
    """arXiv 2403.03206, section 3.1, by the shares of timesteps below some of them."""
    at = torch.tensor([0.1, 0.25, 0.5, 0.75, 0.9])
    normal, logit = torch.distributions.Normal(0.4, 0.7), at.log() - (1 - at).log()
    s = 1.2
    u = torch.linspace(0, 1, 100_001, dtype=torch.float64)
    mode = 1 - u - s * (torch.cos(torch.pi / 2 * u) ** 2 - 1 + u)
    expected = {
        "uniform": ({}, at),
        "logit_normal": ({"logit_mean": 0.4, "logit_std": 0.7}, normal.cdf(logit)),
        "mode": ({"mode_scale": s}, (mode[:, None] < at).double().mean(0)),
    }
    for density, (fields, below) in expected.items():
        shares = (drawn_sigmas(density=density, **fields)[:, None] < at).double().mean(0)
        torch.testing.assert_close(shares, below.double(), rtol=0, atol=0.012)


@pytest.mark.parametrize("shift", [1.0, 3.0])
def test_a_flows_times_are_its_schedulers(shift):
    from diffusers import FlowMatchEulerDiscreteScheduler

    noise = Noise("flow", shift=shift)
    theirs = FlowMatchEulerDiscreteScheduler(shift=shift)
    drawn = torch.tensor([0, 137, 500, 999])
    times = theirs.timesteps.flip(0)[drawn]
    torch.testing.assert_close(noise.times(drawn).float(), times)
    clean, gauss = torch.randn(4, 2, 3, 3), torch.randn(4, 2, 3, 3)
    torch.testing.assert_close(
        noise.mix(clean, gauss, drawn), theirs.scale_noise(clean, times, gauss)
    )
    mine = noise.sampler(bounded=False)
    for scheduler in (mine, theirs):
        scheduler.set_timesteps(5)
    assert torch.equal(mine.sigmas, theirs.sigmas)


@ANY
def test_any_cut_changes_nothing(setting, kind):
    run, _, layers, batch, state = setting(kind)
    table = layer_table(run)
    first = len(table) - len(layers)
    expected = through(layers, batch, state)["loss/image"]
    whole = torch.autograd.grad(expected, state["context"])[0]
    for cut in range(1, len(layers)):
        part = dataclasses.replace(batch, cache={})
        before = through(layers[:cut], part, state)
        specs = live_tensors(table, first + cut)
        crossing = {spec.name: before[spec.name].detach().requires_grad_() for spec in specs}
        assert all(before[spec.name].shape[1:] == spec.shape for spec in specs)
        loss = through(layers[cut:], dataclasses.replace(batch, cache={}), crossing)["loss/image"]
        assert torch.equal(loss, expected)
        used = [name for name in crossing if before[name].requires_grad]
        gradients = torch.autograd.grad(loss, [crossing[name] for name in used], allow_unused=True)
        back = torch.autograd.grad(
            [before[name] for name in used],
            state["context"],
            [
                torch.zeros_like(before[name]) if gradient is None else gradient
                for name, gradient in zip(used, gradients, strict=True)
            ],
        )[0]
        torch.testing.assert_close(back, whole, rtol=1e-5, atol=1e-7)


@ANY
def test_a_bf16_batch_an_empty_one_and_the_order_of_images(setting, kind):
    _, inputs, layers, batch, state = setting(kind)
    loss = through(layers, batch, state)["loss/image"]
    order = torch.tensor([2, 0, 1])
    rows = (order[:, None] * 4 + torch.arange(4)).flatten()
    targets = batch.of("target")
    other = changed(
        batch,
        "target",
        values={0: [targets.values[0][0][order]]},
        weights=targets.weights[order],
        noise_seeds=targets.noise_seeds[order],
    )
    torch.testing.assert_close(
        through(layers, other, {"context": state["context"][rows]})["loss/image"], loss
    )
    nobody = probe_batch(inputs, target=0)
    empty = through(layers, nobody, {"context": state["context"][:0]})
    assert all(len(tensor) == 0 for tensor in empty.values())
    halves = [copy.deepcopy(layer).bfloat16() for layer in layers]
    made = through(
        halves, dataclasses.replace(batch, cache={}), {"context": state["context"].bfloat16()}
    )
    torch.testing.assert_close(made["loss/image"], loss, rtol=0.1, atol=0.1)


@pytest.mark.parametrize(
    ("fields", "side", "named"),
    [
        ({"sample_size": 16}, 16, "PixArtTransformer2DModel"),
        ({"sample_size": 64}, 32, "PixArtTransformer2DModel"),
        ({"sample_size": 64, "interpolation_scale": 1}, 128, "PixArtTransformer2DModel"),
        ({"sample_size": 128}, 96, "PixArtTransformer2DModel"),
        ({"sample_size": 128, "interpolation_scale": 2}, 64, "Transformer2DModel"),
        ({}, 64, "Transformer2DModel"),  # as folders were written before diffusers had the class
    ],
)
def test_pixarts_positions_are_the_folders_at_any_size(make_run, tmp_path, fields, side, named):
    """diffusers counts them from the folder's `sample_size`, whatever size comes in."""
    import diffusers

    small = {"in_channels": 3, "out_channels": 3, "use_additional_conditions": False}
    theirs = diffusers.PixArtTransformer2DModel(**PIXART | small | fields).eval()
    theirs.save_pretrained(tmp_path / "transformer")
    path = tmp_path / "transformer" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"_class_name": named}))
    run = with_generator(make_run(), image_size=side, folder="transformer")
    ours = diffusers.PixArtTransformer2DModel(**read_configs(run)[NAME].config).eval()
    ours.load_state_dict(theirs.state_dict())
    asked = {
        "hidden_states": torch.randn(1, 3, side, side),
        "encoder_hidden_states": torch.randn(1, 4, 20),
        "timestep": torch.tensor([3]),
        "added_cond_kwargs": {"resolution": None, "aspect_ratio": None},
    }
    with torch.no_grad():
        assert torch.equal(ours(**asked).sample, theirs(**asked).sample)


def test_pixarts_dropout_follows_the_images_seeds(setting, monkeypatch):
    monkeypatch.setitem(
        GENERATORS, "dropping", GENERATORS["pixart"] | {"config": PIXART | {"dropout": 0.5}}
    )
    _, _, layers, batch, state = setting("dropping")
    assert sum("dropout" in layer.needs for layer in layers) == PIXART["num_layers"]
    through(layers, batch, state)
    plain = through(layers, batch, state)["patches"]
    seeds = torch.tensor([5, 6, 7])
    seeded = through(layers, changed(batch, "target", seeds=seeds), state)["patches"]
    assert not torch.equal(seeded, plain)
    targets = batch.of("target")
    part = changed(
        batch,
        "target",
        grids=targets.grids[1:],
        seeds=seeds[1:],
        values={0: [targets.values[0][0][1:]]},
        weights=targets.weights[1:],
        noise_seeds=targets.noise_seeds[1:],
    )
    some = through(layers, part, {"context": state["context"][4:]})["patches"]
    torch.testing.assert_close(some, seeded[1:], rtol=1e-5, atol=1e-5)


@ANY
def test_counted_and_divided(setting, kind):
    run, _, layers, batch, state = setting(kind)
    flops = count_flops(run)[NAME]
    assert all(costs.forward.per_item > 0 and costs.parameters > 0 for costs in flops.values())
    assert tp_degrees(run, NAME, 4)[:2] == [1, 2]
    for layer in layers:
        given = dict(state)
        if linears(layer, 1) and layer.kind != "projector":
            parts = [shard(copy.deepcopy(layer), tp=2, rank=rank) for rank in range(2)]
            for made in in_lockstep(parts, given, dataclasses.replace(batch, cache={})):
                for name, tensor in layer(given, batch).items():
                    torch.testing.assert_close(made[name], tensor, rtol=1e-4, atol=1e-4)
        state = state | layer(given, batch)


@pytest.mark.parametrize(
    "kind", ["sd 2.1", "pixart, small", "pixels, velocity", "sd 1.5", "sd3.5", "sd3, pixels"]
)
def test_a_perfect_predictor_leads_to_the_image(setting, kind, monkeypatch):
    run, inputs, _, _, _ = setting(kind, targets=1)
    noise, seen = read_configs(run)[NAME].noise, {}
    pixels = "vae" not in GENERATORS[kind]
    clean = (
        torch.linspace(-0.9, 0.9, 3 * 16 * 16).view(1, 3, 16, 16)
        if pixels
        else torch.linspace(-2.0, 2.0, 4 * 8 * 8).view(1, 4, 8, 8)
    )
    layers = build_layers(run, 0, len(layer_table(run)))
    start = next(layer for layer in layers if layer.name == f"{NAME}.in")
    begin = start.start
    monkeypatch.setattr(
        start, "start", lambda state, x, t: (seen.update(x=x, t=t), begin(state, x, t))[1]
    )

    def knows(self, state, batch):
        if noise.prediction == "flow":
            sigma = (seen["t"] / noise.timesteps).view(-1, 1, 1, 1)
            return (seen["x"] - clean) / sigma
        alpha = scheduler(noise).alphas_cumprod[seen["t"]].view(-1, 1, 1, 1)
        drawn = (seen["x"] - alpha.sqrt() * clean) / (1 - alpha).sqrt()
        return noise.goal(clean, drawn, seen["t"])

    class Keeps:
        def decode(self, latents):
            seen["latents"] = latents
            return torch.zeros(1, 3, 16, 16)

    monkeypatch.setattr(type(layers[-1]), "predict", knows)
    assert isinstance(layers[-1], Finish)
    batch = changed(
        probe_batch(inputs, image=[(4, 4)], documents=[[40]], target=1), "target", values={}
    )
    images = generate(layers, batch, inputs, 5, 0, None if pixels else Keeps())
    if pixels:
        expected = ((clean[0] + 1) * 127.5).round().permute(1, 2, 0).numpy()
        assert images.dtype == np.uint8 and np.abs(images.astype(float) - expected).max() <= 1
    else:
        torch.testing.assert_close(seen["latents"], clean, rtol=1e-3, atol=1e-3)


def test_the_schedule_is_the_folders_and_the_run_files_over_it(make_run, tmp_path):
    from diffusers import (
        DPMSolverMultistepScheduler,
        FlowMatchEulerDiscreteScheduler,
        UNet2DConditionModel,
    )

    unet = UNet2DConditionModel(
        **SD | {"attention_head_dim": 4, "in_channels": 3, "out_channels": 3}
    )
    unet.save_config(tmp_path / "sd" / "unet")
    DPMSolverMultistepScheduler(
        beta_schedule="scaled_linear",
        beta_start=0.00085,
        beta_end=0.012,
        prediction_type="v_prediction",
    ).save_config(tmp_path / "sd" / "scheduler")

    def noise(**spec):
        made = with_generator(make_run(), folder="sd/unet", **spec)
        assert layer_table(made)
        return read_configs(made)[NAME].noise

    assert noise() == Noise("v_prediction", "scaled_linear", 0.00085, 0.012)
    assert noise(noise={"prediction": "epsilon"}) == Noise(
        "epsilon", "scaled_linear", 0.00085, 0.012
    )
    FlowMatchEulerDiscreteScheduler().save_config(tmp_path / "sd" / "unet")
    assert noise().prediction == "flow"
    path = tmp_path / "sd" / "unet" / "scheduler_config.json"
    path.write_text(json.dumps({"prediction_type": "sample"}))
    with pytest.raises(SpecError, match=r"noise\.prediction") as error:
        noise()
    assert "'epsilon', 'v_prediction' or 'flow'" in str(error.value)
    path.write_text(json.dumps({"beta_start": "little"}))
    with pytest.raises(SpecError, match=r"noise\.beta_start"):
        noise()


FLOW = {"_class_name": "FlowMatchEulerDiscreteScheduler"}
DYNAMIC = FLOW | {"use_dynamic_shifting": True, "base_shift": 0.5, "max_shift": 1.15}


@pytest.mark.parametrize(
    ("fields", "spec", "expected"),
    [
        (FLOW | {"shift": 3.0}, {}, 3.0),
        (FLOW | {"shift": 3.0}, {"shift": 2.0}, 2.0),
        (FLOW, {}, 1.0),
        (DYNAMIC, {}, math.exp(0.5 + 0.65 * (16 - 256) / 3840)),
        (DYNAMIC | {"time_shift_type": "linear"}, {}, 0.5 + 0.65 * (16 - 256) / 3840),
        (FLOW, {"shift": "resolution"}, math.exp(0.5 + 0.65 * (16 - 256) / 3840)),
        (None, {"density": "logit_normal"}, 1.0),
        ({"_class_name": "EulerDiscreteScheduler"}, {}, "of another family"),
        ({"_class_name": "FlowMatchHeunDiscreteScheduler"}, {}, "of another family"),
        ({"num_train_timesteps": 1000}, {}, "no _class_name"),
        (FLOW | {"invert_sigmas": True}, {}, "invert_sigmas"),
        (FLOW | {"shift": "much"}, {}, "shift of its folder's scheduler_config"),
        (FLOW | {"num_train_timesteps": 0}, {}, "num_train_timesteps of its folder's scheduler"),
    ],
)
def test_a_flows_schedule_is_its_folders_and_no_other_familys(
    make_run, tmp_path, fields, spec, expected
):
    on_meta("sd3", SD3).save_config(tmp_path / "pipe" / "transformer")
    if fields is not None:
        (tmp_path / "pipe" / "scheduler").mkdir()
        (tmp_path / "pipe" / "scheduler" / "scheduler_config.json").write_text(json.dumps(fields))
    run = with_generator(make_run(), folder="pipe/transformer", vae=VAE, noise=spec)
    if isinstance(expected, str):
        with pytest.raises(SpecError, match=expected):
            read_configs(run)
        return
    noise = read_configs(run)[NAME].noise
    assert noise.prediction == "flow" and noise.shift == pytest.approx(expected)
    assert noise.density == spec.get("density", "uniform")


@pytest.mark.parametrize(
    ("kind", "config", "others", "words"),
    [
        (
            "pixart",
            {"out_channels": 5},
            {},
            ("config.out_channels", "4: vae.latent_channels, or 8 with a variance"),
        ),
        (
            "pixart",
            {"cross_attention_dim": 20},
            {},
            ("config.cross_attention_dim", "48, the width"),
        ),
        ("pixart", {"attention_head_dim": 11}, {}, ("config.attention_head_dim", "multiple of 12")),
        ("pixart", {"norm_type": "ada_norm"}, {}, ("config.norm_type", "ada_norm_single")),
        ("pixart", {"patch_size": 3}, {}, ("image_size", "multiples of 6", "patches of 3")),
        (
            "pixart",
            {"num_heads": 3},
            {},
            ("config.num_heads", "unknown field", "num_attention_heads"),
        ),
        ("pixart", {"dropout": 1.5}, {}, ("config.dropout", "given: 1.5")),
        (
            "sd xl",
            {"projection_class_embeddings_input_dim": 48},
            {},
            ("projection_class_embeddings_input_dim", "6 times"),
        ),
        ("sd xl", {"addition_embed_type": "image"}, {}, ("addition_embed_type", "text_time")),
        ("sd 1.5", {}, {"noise": {"beta_start": 0.5}}, ("noise.beta_start", "less than beta_end")),
        ("sd 1.5", {}, {"noise": {"shift": 3.0}}, ("noise.shift", "prediction: flow")),
        ("sd3", {}, {"noise": {"prediction": "epsilon"}}, ("noise.prediction", "sd3's own")),
        ("sd3", {}, {"noise": {"logit_std": 0.5}}, ("noise.logit_std", "density: logit_normal")),
        ("sd3", {"caption_projection_dim": 40}, {}, ("config.caption_projection_dim", "48")),
        ("sd3", {"pos_embed_max_size": 3}, {}, ("config.pos_embed_max_size", "4 or more")),
        ("sd3", {"qk_norm": "l2"}, {}, ("config.qk_norm", "rms_norm, layer_norm, or nothing")),
        ("sd3", {"dual_attention_layers": [3]}, {}, ("dual_attention_layers", "below 3")),
        ("sd3", {"patch_size": 3}, {}, ("image_size", "multiples of 6", "patches of 3")),
        ("sd3", {"attention_head_dim": 0}, {}, ("config.attention_head_dim", "1 or more")),
        ("flux", {"in_channels": 4}, {}, ("config.in_channels", "16: 4 times 4")),
        ("flux", {"axes_dims_rope": [2, 4, 8]}, {}, ("config.axes_dims_rope", "(12)")),
        ("flux", {"patch_size": 2}, {}, ("config.patch_size", "1: its patches")),
        ("flux", {"sample_size": 8}, {}, ("config.sample_size", "unknown field")),
        ("flux", {}, {"image_size": 18}, ("image_size", "multiples of 4")),
        ("lumina2", {"num_kv_heads": 3}, {}, ("config.num_kv_heads", "divisor of")),
        ("lumina2", {"hidden_size": 50}, {}, ("config.hidden_size", "multiple of")),
        ("lumina2", {"axes_dim_rope": [4, 4, 6]}, {}, ("config.axes_dim_rope", "(12)")),
        ("lumina2", {"axes_lens": [8, 3, 8]}, {}, ("config.axes_lens", "4 or more")),
        ("lumina2", {"axes_lens": [4, 8, 8]}, {}, (f"{NAME}.context_tokens", "less than 4")),
        ("lumina2", {"patch_size": 3}, {}, ("image_size", "multiples of 6", "patches of 3")),
        ("lumina2", {"num_refiner_layers": -1}, {}, ("num_refiner_layers", "0 or more")),
        ("lumina2", {}, {"noise": {"prediction": "epsilon"}}, ("prediction", "lumina2's own")),
    ],
)
def test_wrong_configurations_are_named(make_run, kind, config, others, words):
    spec = {"architecture": "unet2d_condition", **GENERATORS[kind], **others}
    spec["config"] = spec["config"] | config
    with pytest.raises(SpecError) as error:
        layer_table(with_generator(make_run(), **spec))
    assert all(word in str(error.value) for word in words), str(error.value)


BIG_VAE = {
    "block_out_channels": [128, 256, 512, 512],
    "layers_per_block": 2,
    "latent_channels": 4,
    "down_block_types": ["DownEncoderBlock2D"] * 4,
    "up_block_types": ["UpDecoderBlock2D"] * 4,
}
SD3_MEDIUM = {
    "num_layers": 24,
    "num_attention_heads": 24,
    "caption_projection_dim": 1536,
    "pos_embed_max_size": 192,
}
#: The published configurations, their image size and parameters; of SD3 with its positions.
PUBLISHED = {
    "Stable Diffusion 1.5": (
        "unet2d_condition",
        {"cross_attention_dim": 768, "attention_head_dim": 8},
        512,
        859_520_964,
    ),
    "Stable Diffusion 2.1": (
        "unet2d_condition",
        {
            "cross_attention_dim": 1024,
            "attention_head_dim": [5, 10, 20, 20],
            "use_linear_projection": True,
            "upcast_attention": True,
        },
        768,
        865_910_724,
    ),
    "Stable Diffusion XL": (
        "unet2d_condition",
        {
            "block_out_channels": [320, 640, 1280],
            "attention_head_dim": [5, 10, 20],
            "cross_attention_dim": 2048,
            "down_block_types": ["DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"],
            "up_block_types": ["CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"],
            "use_linear_projection": True,
            "transformer_layers_per_block": [1, 2, 10],
            "addition_embed_type": "text_time",
            "addition_time_embed_dim": 256,
            "projection_class_embeddings_input_dim": 2816,
        },
        1024,
        2_567_463_684,
    ),
    "Stable Diffusion 3 Medium": ("sd3", SD3_MEDIUM, 1024, 2_028_328_000 + 192**2 * 1536),
    "Stable Diffusion 3.5 Medium": (
        "sd3",
        SD3_MEDIUM
        | {
            "pos_embed_max_size": 384,
            "qk_norm": "rms_norm",
            "dual_attention_layers": list(range(13)),
        },
        1024,
        2_243_171_520 + 384**2 * 1536,
    ),
    "FLUX.1-dev": ("flux", {"guidance_embeds": True}, 1024, 11_901_408_320),
    "Lumina-Image 2.0": ("lumina2", {"cap_feat_dim": 2304}, 1024, 2_609_769_152),
    "PixArt-α 1024": ("pixart", {"caption_channels": 4096}, 1024, 611_349_152),
}


CHANNELS = {"unet2d_condition": 4, "pixart": 4, "sd3": 16, "flux": 16, "lumina2": 16}


@pytest.mark.slow
@pytest.mark.parametrize("name", PUBLISHED)
def test_published_generators_are_described(make_run, name):
    architecture, config, size, parameters = PUBLISHED[name]
    vae = BIG_VAE | {"latent_channels": CHANNELS[architecture]}
    run = with_generator(
        make_run(),
        image_size=size,
        context_tokens=77,
        architecture=architecture,
        config=config,
        vae=vae,
    )
    table = [info for info in layer_table(run) if info.module == NAME]
    own = sum(info.parameters for info in table if info.kind != "projector" and not info.frozen)
    assert own == parameters
    assert describe(run).target.latent_pixels == (size // 8) ** 2


def latent_unet(folder):
    """A diffusers pipeline: the U-Net of latents and its VAE."""
    for name, fields in (
        ("unet", {"_class_name": "UNet2DConditionModel", "in_channels": 4, "out_channels": 4}),
        ("vae", {"_class_name": "AutoencoderKL"}),
    ):
        (folder / name).mkdir(parents=True)
        (folder / name / "config.json").write_text(json.dumps(fields))
    (folder / "model_index.json").write_text("{}")


@pytest.mark.parametrize(
    ("folder", "named"),
    [
        ("pipe", "set model.modules.image_generator.folder: pipe/unet"),
        ("pipe/unet", "set model.modules.image_generator.vae_folder: pipe/vae"),
        ("someone/a-model", "hf download someone/a-model --local-dir someone/a-model"),
        ("nowhere", "Correct model.modules.image_generator.folder, or give architecture."),
    ],
)
def test_a_folder_that_does_not_fit_says_what_to_name_instead(make_run, tmp_path, folder, named):
    latent_unet(tmp_path / "pipe")
    run = make_run(image_generator={"architecture": None, "folder": folder, "config": {}})
    run.file.model.modules["image_generator"].config.clear()
    with pytest.raises(SpecError) as error:
        read_configs(run)
    assert named in error.value.next_step, error.value
