"""Qwen-Image as layers, and diffusers' transformers that run whole, against their own forward as
their pipelines call it; their VAEs; what is refused."""

import json

import numpy as np
import pytest
import torch
from torch.utils.checkpoint import checkpoint

from disttrain_cli.errors import SpecError
from disttrain_cli.models.architectures import read_configs
from disttrain_cli.models.configs.library_generators import FAMILIES
from disttrain_cli.models.footprint import footprint
from disttrain_cli.models.graph import build_layers, describe, layer_table
from disttrain_cli.models.noise import Noise
from disttrain_cli.models.operators import layer_operators
from disttrain_cli.models.posterior import draw
from disttrain_cli.models.probe import entry_state, probe_batch, state_at
from disttrain_cli.models.published import on_meta
from disttrain_cli.models.sampling import generate
from disttrain_cli.models.vae import decoder_maker
from disttrain_cli.spec.runfile import Run, RunFile
from tests.batches import changed, through
from tests.cases import mostly_slow

NAME = "image_generator"
TEXT, K, N = 20, 5, 3
DUAL = {
    "num_layers": 2,
    "num_attention_heads": 2,
    "attention_head_dim": 16,
    "joint_attention_dim": TEXT,
    "axes_dims_rope": [4, 6, 6],
}
WAN = {
    "num_layers": 2,
    "num_attention_heads": 2,
    "attention_head_dim": 16,
    "text_dim": TEXT,
    "freq_dim": 8,
    "ffn_dim": 32,
}
#: Means and deviations of four channels.
SCALED = {"latents_mean": [0.1, -0.2, 0.3, 0.0], "latents_std": [1.5, 0.5, 2.0, 1.0]}
VIDEO_VAE = {"base_dim": 8, "z_dim": 4, "dim_mult": [1, 2], "num_res_blocks": 1} | SCALED
VAES = {
    "kl": {
        "block_out_channels": [8, 16],
        "layers_per_block": 1,
        "norm_num_groups": 4,
        "latent_channels": 4,
        "down_block_types": ["DownEncoderBlock2D"] * 2,
        "up_block_types": ["UpDecoderBlock2D"] * 2,
        "scaling_factor": 0.4,
        "shift_factor": 0.1,
    },
    "flux2": {
        "_class_name": "AutoencoderKLFlux2",
        "block_out_channels": [8, 16],
        "layers_per_block": 1,
        "norm_num_groups": 4,
        "latent_channels": 4,
        "down_block_types": ["DownEncoderBlock2D"] * 2,
        "up_block_types": ["UpDecoderBlock2D"] * 2,
    },
    "qwen": {
        "_class_name": "AutoencoderKLQwenImage",
        "temperal_downsample": [True],
        **VIDEO_VAE,
    },
    "wan": {
        "_class_name": "AutoencoderKLWan",
        "temperal_downsample": [True],
        "scale_factor_spatial": 2,
        **VIDEO_VAE,
    },
    "hunyuan": {
        "_class_name": "AutoencoderKLHunyuanImage",
        "in_channels": 3,
        "out_channels": 3,
        "latent_channels": 4,
        "block_out_channels": [32, 32],
        "layers_per_block": 1,
        "spatial_compression_ratio": 2,
        "sample_size": 16,
        "scaling_factor": 0.75,
    },
    "dc": {
        "_class_name": "AutoencoderDC",
        "latent_channels": 4,
        "attention_head_dim": 4,
        "scaling_factor": 0.4,
        **{
            f"{half}_{field}": value
            for half in ("encoder", "decoder")
            for field, value in {
                "block_types": ["ResBlock", "EfficientViTBlock"],
                "block_out_channels": [8, 16],
                "layers_per_block": [1, 1],
                "qkv_multiscales": [[], []],
            }.items()
        },
    },
}
#: Family → its VAE and configuration, without its channels.
FAMILY = {
    "qwen_image": ("qwen", DUAL),
    "flux2": (
        "flux2",
        DUAL
        | {
            "num_single_layers": 1,
            "axes_dims_rope": [4, 4, 4, 4],
            "timestep_guidance_channels": 8,
        },
    ),
    "z_image": (
        "kl",
        {
            "dim": 32,
            "n_layers": 2,
            "n_refiner_layers": 1,
            "n_heads": 2,
            "n_kv_heads": 2,
            "cap_feat_dim": TEXT,
            "axes_dims": [4, 6, 6],
            "axes_lens": [64, 16, 16],
        },
    ),
    "wan": ("wan", WAN),
    "skyreels_v2": (None, WAN),
    "chroma": (
        "kl",
        DUAL
        | {
            "num_single_layers": 1,
            "approximator_num_channels": 8,
            "approximator_hidden_dim": 16,
            "approximator_layers": 1,
        },
    ),
    "ovis_image": (None, DUAL | {"num_single_layers": 1}),
    "longcat_image": (None, DUAL | {"num_single_layers": 1}),
    "hunyuan_image": (
        "hunyuan",
        {
            "num_attention_heads": 2,
            "attention_head_dim": 16,
            "num_layers": 1,
            "num_single_layers": 1,
            "num_refiner_layers": 1,
            "text_embed_dim": TEXT,
            "rope_axes_dim": [8, 8],
        },
    ),
    "sana": (
        "dc",
        {
            "num_attention_heads": 2,
            "attention_head_dim": 16,
            "num_layers": 1,
            "num_cross_attention_heads": 2,
            "cross_attention_head_dim": 16,
            "cross_attention_dim": 32,
            "caption_channels": TEXT,
            "timestep_scale": 0.001,
        },
    ),
    "prx": (
        None,
        {
            "context_in_dim": TEXT,
            "hidden_size": 32,
            "num_heads": 2,
            "depth": 2,
            "axes_dim": [8, 8],
        },
    ),
}


def with_channels(family, channels):
    """The configuration of a family's generator of images with some channels."""
    config = FAMILY[family][1]
    packed = family in ("qwen_image", "chroma", "ovis_image", "longcat_image")
    out = {} if family in ("z_image", "prx", "longcat_image", "flux2") else {"out_channels"}
    given = 4 * channels if packed else channels
    of_output = channels if family == "qwen_image" else given
    return config | {"in_channels": given} | dict.fromkeys(out, of_output)


#: Configurations of generators of pixels.
#: Families of every run, and the others.
QUICK = ("qwen_image", "flux2", "z_image")
ALL = mostly_slow(FAMILY, *QUICK)
PIXELS = {family: with_channels(family, 3) for family in FAMILY}


@pytest.fixture
def made(make_run):
    """A run with a generator of a family, and of it: inputs, layers, a batch, its entry's state."""

    def make(family, targets=N, **spec):
        run = make_run(image_generator={"config": {"block_out_channels": [16, 32]}})
        plain = run.file.model_dump(mode="json", exclude_none=True)
        vae = FAMILY[family][0]
        channels = 16 if family == "flux2" else 4 if vae else 3  # FLUX.2's VAE folds 2 × 2 of 4
        spec = {"config": {}, **spec}
        plain["model"]["modules"][NAME] = {
            "kind": "generator",
            "image_size": 16,
            "context_tokens": K,
            "architecture": family,
            "noise": {"shift": 3.0},
            **({"vae": VAES[vae]} if vae else {}),
            **spec,
            "config": with_channels(family, channels) | spec["config"],
        }
        run = type(run)(path=run.path, file=type(run.file).model_validate(plain))
        table, inputs = layer_table(run), describe(run)
        start = next(i for i, info in enumerate(table) if info.module == NAME)
        batch = probe_batch(inputs, target=targets)
        if targets:
            batch.of("target").weights[1:2] = 0.0
        layers = build_layers(run, start, len(table))
        torch.manual_seed(1)
        with torch.no_grad():  # norms that are not all alike
            for layer in layers:
                for parameter in layer.parameters():
                    if parameter.ndim == 1:
                        parameter += 0.1 * torch.rand_like(parameter)
        return run, inputs, layers, batch, entry_state(table, NAME, inputs, batch)

    return make


def library_model(config, layers):
    """diffusers' own model with the weights of some layers."""
    weights = {}
    for layer in layers:
        if layer.weights_of == "module":
            weights |= layer.to_published(dict(layer.named_parameters()))
    model = type(on_meta(config.architecture, config.config))(**config.config).eval()
    found = model.load_state_dict(weights, strict=False)
    assert not found.missing_keys and not found.unexpected_keys
    return model


def as_its_pipeline(family, model, noisy, times, text):
    """A prediction, by a call as in the family's pipeline of diffusers."""
    from diffusers.pipelines.flux.pipeline_flux import FluxPipeline
    from diffusers.pipelines.flux2.pipeline_flux2 import Flux2Pipeline
    from diffusers.pipelines.longcat_image.pipeline_longcat_image import prepare_pos_ids

    side = noisy.shape[2] // 2
    packed = FluxPipeline._pack_latents(noisy, *noisy.shape)
    known = {"timestep": times / 1000, "encoder_hidden_states": text, "return_dict": False}
    if family == "qwen_image":
        shapes = [[(1, side, side)]] * len(noisy)
        out = model(hidden_states=packed, img_shapes=shapes, **known)[0]
    elif family == "flux2":
        ids = Flux2Pipeline._prepare_latent_ids(noisy)
        out = model(
            hidden_states=Flux2Pipeline._pack_latents(noisy),
            img_ids=ids,
            txt_ids=Flux2Pipeline._prepare_text_ids(text),
            guidance=torch.full((len(noisy),), 3.5),
            **known,
        )[0]
        return torch.stack([*Flux2Pipeline._unpack_latents_with_ids(out, ids)])
    elif family == "z_image":
        latents = list(noisy.unsqueeze(2).unbind(0))
        out = model(latents, (1000 - times) / 1000, list(text), return_dict=False)[0]
        return -torch.stack(out).squeeze(2)
    elif family in ("wan", "skyreels_v2"):
        return model(noisy.unsqueeze(2), **known | {"timestep": times})[0].squeeze(2)
    elif family in ("chroma", "ovis_image", "longcat_image"):
        places = FluxPipeline._prepare_latent_image_ids(0, side, side, "cpu", torch.float32)
        numbers = torch.zeros(K, 3)
        if family != "chroma":
            numbers[:, 1:] = torch.arange(K)[:, None]
        if family == "longcat_image":
            places = prepare_pos_ids(1, "image", (512, 512), height=side, width=side)
        out = model(hidden_states=packed, img_ids=places, txt_ids=numbers, **known)[0]
    elif family == "hunyuan_image":
        mask = torch.ones(len(noisy), K)
        known |= {"timestep": times, "encoder_attention_mask": mask}
        return model(noisy, **known)[0]
    elif family == "sana":
        return model(noisy, **known | {"timestep": times * model.config.timestep_scale})[0]
    else:
        return model(noisy, **known)[0]
    return FluxPipeline._unpack_latents(out, 2 * side, 2 * side, 1)


def of_library(family, run, layers, batch, state, model=None):
    """The loss by diffusers' own model, from the same latents, noise and conditioning."""
    config = read_configs(run)[NAME]
    model = library_model(config, layers) if model is None else model
    projector = next(layer for layer in layers if layer.kind == "projector")
    text = projector(state, batch)["conditioning"].unflatten(0, (N, K))
    canvas = layers[-1].canvas
    clean = canvas.clean({"latents": layers[0](state, batch).get("latents")}, batch)
    timesteps, noise = canvas.draw(batch)
    noisy = config.noise.mix(clean, noise, timesteps)
    out = as_its_pipeline(family, model, noisy, config.noise.times(timesteps), text)
    errors = (out - (noise - clean)).square().mean((1, 2, 3))
    return 2.0 * (errors[0] + errors[2]) / N


def test_every_family_is_tried():
    assert FAMILY.keys() == {"qwen_image", *FAMILIES}


@pytest.mark.parametrize("family", ALL)
def test_loss_and_gradients_equal_diffusers_own(made, family):
    run, _, layers, batch, state = made(family)
    assert [layer.kind for layer in layers if layer.weights_of == "module"][-1] in ("whole", "out")
    state["context"].requires_grad_()
    loss = through(layers, batch, state)["loss/image"]
    model = library_model(read_configs(run)[NAME], layers)
    expected = of_library(family, run, layers, batch, state, model)
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=0)
    of_context = [
        torch.autograd.grad(one, state["context"], retain_graph=True)[0] for one in (loss, expected)
    ]
    torch.testing.assert_close(*of_context, rtol=1e-4, atol=1e-7)
    loss.backward()
    expected.backward()
    theirs = {name: parameter.grad for name, parameter in model.named_parameters()}
    for layer in layers:
        for path, parameter in layer.named_parameters():
            if layer.weights_of == "module" and (name := layer.published_name(path)):
                given = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                other = torch.zeros_like(parameter) if theirs[name] is None else theirs[name]
                torch.testing.assert_close(given, other, rtol=1e-3, atol=1e-6, msg=name)


def _vae(config):
    import diffusers

    return getattr(diffusers, config["_class_name"])(**config).eval()


@pytest.mark.parametrize("family", ["flux2", "qwen_image", "wan", "hunyuan_image", "sana"])
def test_latents_and_images_equal_the_vaes_own(made, family):
    """Latents as the family's pipelines scale them, and images of them again."""
    from diffusers.pipelines.flux2.pipeline_flux2 import Flux2Pipeline

    run, _, layers, batch, _ = made(family)
    config, encoder = read_configs(run)[NAME].vae, layers[0]
    decoder = decoder_maker(NAME, config).build(0)
    whole, pixels = _vae(config), batch.of("target").values[0][0]
    for half in (encoder, decoder):
        with torch.no_grad():
            for path, parameter in half.named_parameters():
                if path.endswith("running_var"):
                    parameter.copy_(torch.rand_like(parameter) + 0.5)
        whole.load_state_dict(half.to_published(dict(half.named_parameters())), strict=False)
    if family == "flux2":
        decoder.statistics.load_state_dict(encoder.statistics.state_dict())
        whole.bn.load_state_dict(encoder.statistics.state_dict(), strict=False)
    video = family in ("qwen_image", "wan")
    with torch.no_grad():
        encoded = whole.encode(pixels.unsqueeze(2) if video else pixels)
    noise = draw(batch, layers[-1].canvas.shape, 0)
    if family == "sana":
        latents = encoded.latent
    elif family == "flux2":
        posterior, noise = encoded.latent_dist, Flux2Pipeline._unpatchify_latents(noise)
        latents = Flux2Pipeline._patchify_latents(posterior.mean + posterior.std * noise)
        mean, var = (one.view(1, -1, 1, 1) for one in (whole.bn.running_mean, whole.bn.running_var))
        latents = (latents - mean) / (var + whole.config.batch_norm_eps).sqrt()
    else:
        posterior = encoded.latent_dist
        latents = posterior.mean + posterior.std * (noise.unsqueeze(2) if video else noise)
    if video:
        mean, std = (torch.tensor(SCALED[name]).view(1, -1, 1, 1) for name in SCALED)
        latents = (latents.squeeze(2) - mean) / std
    elif family != "flux2":
        latents = latents * config["scaling_factor"]
    torch.testing.assert_close(encoder({}, batch)["latents"], latents, rtol=1e-4, atol=1e-5)
    with torch.no_grad():
        if video:
            images = whole.decode((latents * std + mean).unsqueeze(2)).sample.squeeze(2)
        elif family == "flux2":
            unscaled = latents * (var + whole.config.batch_norm_eps).sqrt() + mean
            images = whole.decode(Flux2Pipeline._unpatchify_latents(unscaled)).sample
        else:
            images = whole.decode(latents / config["scaling_factor"]).sample
    torch.testing.assert_close(decoder.decode(latents), images, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", ALL)
def test_images_are_drawn(made, family):
    run, inputs, *_ = made(family)
    batch = probe_batch(inputs, image=[(4, 4)], documents=[[40]], target=2)
    batch = changed(batch, "target", values={})
    vae = read_configs(run)[NAME].vae
    decoder = None if vae is None else decoder_maker(NAME, vae).build(0)
    whole = build_layers(run, 0, len(layer_table(run)))
    images = generate(whole, batch, inputs, 2, 0, decoder)
    assert images.shape == (2, 16, 16, 3) and not np.array_equal(*images)


@pytest.mark.parametrize("family", ALL)
def test_half_precision_at_unshifted_times(made, family):
    _, _, layers, batch, state = made(family, noise={})
    layers = [layer.to(torch.bfloat16) for layer in layers]
    loss = through(layers, batch, {"context": state["context"].bfloat16()})["loss/image"]
    loss.backward()
    assert loss.isfinite() and loss.dtype == torch.float32


@pytest.mark.parametrize("family", ALL)
def test_kernels_are_counted(made, family):
    """Of a half-precision layer on meta: attention as it runs, without scores in memory."""
    run, inputs, *_ = made(family)
    table = layer_table(run)
    index = next(
        i for i, info in enumerate(table) if info.name in (f"{NAME}.whole", f"{NAME}.block.0")
    )
    layer = build_layers(run, index, index + 1, "meta", torch.bfloat16)[0]
    batch = probe_batch(inputs, device="meta", target=2)
    state = state_at(table, index, inputs, batch, "meta")
    state = {name: state[name].bfloat16() for name in layer.reads}
    counted = layer_operators(layer, state, batch)
    assert counted.forward.attention_flops > 0 < counted.backward.attention_flops
    recomputed = footprint(layer, state, batch, recompute=True)
    assert recomputed.kept_bytes < footprint(layer, state, batch).kept_bytes


@pytest.mark.parametrize("family", ALL)
def test_replicas_and_recomputation_change_nothing(made, family):
    """Two replicas, of two images and of one, of the same global batch; each layer recomputed."""
    _, _, layers, batch, state = made(family)
    weights = [p for layer in layers for p in layer.parameters() if p.requires_grad]
    loss = through(layers, batch, state)["loss/image"]
    expected = torch.autograd.grad(loss, weights, allow_unused=True)
    for layer in layers:
        if layer.kind == "whole":  # tables of positions come back from wherever they were
            layer.constants.move(torch.device("meta"))
    targets, parts = batch.of("target"), []
    for own in (slice(0, 2), slice(2, 3)):
        part = changed(
            batch,
            "target",
            grids=targets.grids[own],
            weights=targets.weights[own],
            noise_seeds=targets.noise_seeds[own],
            values={number: [run[own] for run in runs] for number, runs in targets.values.items()},
        )
        rows = {"context": state["context"].unflatten(0, (N, K))[own].flatten(0, 1)}
        for layer in layers:
            rows = rows | checkpoint(layer, rows, part, use_reentrant=False)
        parts.append(rows["loss/image"])
    torch.testing.assert_close(sum(parts), loss, rtol=1e-5, atol=0)
    for given, other in zip(
        torch.autograd.grad(sum(parts), weights, allow_unused=True), expected, strict=True
    ):
        assert (given is None) == (other is None)
        if given is not None:
            torch.testing.assert_close(given, other, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("family", ["qwen_image", "flux2", "z_image", "wan"])
def test_images_of_several_sizes(made, family):
    """The loss of a batch is the sum of those of its images alone."""
    run, inputs, layers, *_ = made(family, targets=0, buckets=[[16, 16], [24, 12], [12, 24]])
    grids = [(8, 8), (12, 6), (6, 12)] if FAMILY[family][0] is None else [(4, 4), (6, 3), (3, 6)]
    batch = probe_batch(inputs, target=grids)
    targets = batch.of("target")
    context = entry_state(layer_table(run), NAME, inputs, batch)["context"]
    loss = through(layers, batch, {"context": context})["loss/image"]
    alone = 0.0
    for number, grid in enumerate(targets.grids):
        one = changed(
            probe_batch(inputs, target=[grid]),
            "target",
            noise_seeds=targets.noise_seeds[number : number + 1],
            values={0: [targets.values[0][number]]},
        )
        rows = context.unflatten(0, (N, K))[number]
        alone += through(layers, one, {"context": rows})["loss/image"] / N
    torch.testing.assert_close(loss, alone, rtol=1e-5, atol=0)


@pytest.mark.parametrize("family", ["qwen_image", "flux2", "wan"])
def test_adapters_equal_pefts(made, family):
    from peft import LoraConfig, get_peft_model

    targets = ["to_q", "to_out.0", "proj_out"]
    lora = {"r": 2, "lora_alpha": 6, "target_modules": targets}
    run, _, layers, batch, state = made(family, lora=lora)
    with torch.no_grad():
        for layer in layers:
            for path, parameter in layer.named_parameters():
                if "lora_B" in path:
                    parameter.normal_(0.0, 0.3)
    adapters = {
        f"{layer.published_path(path.partition('.lora_')[0])}.lora_{path.partition('.lora_')[2]}": p
        for layer in layers
        for path, p in layer.named_parameters()
        if ".lora_" in path
    }
    model = library_model(read_configs(run)[NAME], layers)
    adapted = get_peft_model(model, LoraConfig(**lora))
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                name = name.removeprefix("base_model.model.").replace(".default.", ".")
                parameter.copy_(adapters.pop(name))
    assert not adapters
    loss = through(layers, batch, state)["loss/image"]
    expected = of_library(family, run, layers, batch, state, model)
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=0)
    loss.backward()
    trained = {
        path.split(".")[-2]
        for layer in layers
        for path, p in layer.named_parameters()
        if p.grad is not None and layer.kind != "projector"
    }
    assert trained == {"lora_A", "lora_B"}


@pytest.mark.parametrize(
    ("family", "spec", "words"),
    [
        ("flux2", {"architecture": "flux3"}, ("unknown architecture 'flux3'", "flux2")),
        ("flux2", {"config": {"in_channels": 4}}, ("config.in_channels", "16: vae.latent")),
        (
            "flux2",
            {"config": {"axes_dims_rope": [4, 4, 4]}},
            ("does not fit Flux2Trans", "length 12"),
        ),
        ("flux2", {"config": {"num_head": 2}}, ("config.num_head", "unknown field")),
        ("flux2", {"config": {"patch_size": 2}}, ("config.patch_size", "its channels")),
        ("flux2", {"noise": {"prediction": "epsilon"}}, ("noise.prediction", "flux2's own")),
        ("flux2", {"image_size": 18}, ("image_size", "multiples of 4")),
        ("z_image", {"config": {"axes_lens": [64, 3, 8]}}, ("config.axes_lens", "4 or more")),
        ("z_image", {"config": {"axes_lens": [33, 8, 8]}}, ("context_tokens", "or fewer")),
        ("z_image", {"config": {"siglip_feat_dim": 8}}, ("siglip_feat_dim", "does not feed it")),
        (
            "z_image",
            {"config": {"axes_dims": [4, 4, 4]}},
            ("does not fit z_image", "sum(axes_dims)"),
        ),
        ("z_image", {"config": {"all_patch_size": [4]}}, ("all_patch_size", "[2]")),
        ("wan", {"config": {"image_dim": 8}}, ("config.image_dim", "does not feed it")),
        ("wan", {"config": {"patch_size": [2, 2, 2]}}, ("config.patch_size", "1 frame")),
        ("wan", {"config": {"rope_max_seq_len": 2}}, ("does not fit WanTrans",)),
        ("wan", {"config": {"text_dim": 0}}, ("config.text_dim", "1 or more")),
        ("sana", {"config": {"guidance_embeds": True}}, ("guidance_embeds", "does not feed it")),
        ("sana", {"config": {"dropout": 0.1}}, ("config.dropout", "0: ")),
        ("qwen_image", {"config": {"zero_cond_t": True}}, ("config.zero_cond_t", "false")),
        ("qwen_image", {"config": {"out_channels": 16}}, ("config.out_channels", "4: ")),
        ("qwen_image", {"config": {"axes_dims_rope": [4, 4, 4]}}, ("axes_dims_rope", "(16)")),
        ("wan", {"vae": {"_class_name": "AutoencoderTiny"}}, ("vae._class_name", "KLWan")),
        ("wan", {"vae": {"z_dim": 4}}, ("vae.z_dim", "unknown field of AutoencoderKL")),
        ("wan", {"vae": VAES["wan"] | {"latents_std": [1.0]}}, ("latents_std", "4 positive")),
        ("wan", {"vae": VAES["wan"] | {"scale_factor_spatial": 4}}, ("vae does not fit", "(1, 8")),
        ("wan", {"vae": VAES["wan"] | {"dropout": 0.1}}, ("vae.dropout", "0: ")),
        (
            "hunyuan_image",
            {"vae": {"_class_name": "AutoencoderKLHunyuanImage"}},
            ("is missing", "no default"),
        ),
    ],
)
def test_what_does_not_fit_is_named(made, family, spec, words):
    with pytest.raises(SpecError) as error:
        made(family, **spec)
    assert all(word in str(error.value) for word in words), str(error.value)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        (
            {
                "_class_name": "UniPCMultistepScheduler",
                "prediction_type": "flow_prediction",
                "use_flow_sigmas": True,
                "flow_shift": 3.0,
            },
            Noise("flow", shift=3.0),
        ),
        (
            {"_class_name": "FlowMatchEulerDiscreteScheduler", "shift_terminal": 0.02},
            Noise("flow", terminal=0.02),
        ),
        (
            {"_class_name": "FlowMatchEulerDiscreteScheduler", "shift_terminal": 2},
            "shift_terminal of its folder's",
        ),
        ({"_class_name": "UniPCMultistepScheduler"}, "of another family"),
    ],
)
def test_schedules_of_published_folders(make_run, tmp_path, fields, expected):
    on_meta("wan", PIXELS["wan"]).save_config(tmp_path / "wan")
    (tmp_path / "wan" / "scheduler_config.json").write_text(json.dumps(fields))
    plain = make_run().file.model_dump(mode="json", exclude_none=True)
    plain["model"]["modules"][NAME] = {
        "kind": "generator",
        "image_size": 16,
        "context_tokens": K,
        "folder": "wan",
    }
    run = Run(path=tmp_path / "disttrain.yaml", file=RunFile.model_validate(plain))
    if isinstance(expected, str):
        with pytest.raises(SpecError, match=expected):
            read_configs(run)
        return
    noise = read_configs(run)[NAME].noise
    assert noise == expected and noise.sampler(False).config.shift_terminal == noise.terminal
