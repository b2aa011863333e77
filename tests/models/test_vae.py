import pytest
import torch

from disttrain_cli.errors import SpecError
from disttrain_cli.models.activations import saved_bytes
from disttrain_cli.models.architectures import read_configs
from disttrain_cli.models.flops import count_flops
from disttrain_cli.models.graph import build_layers, describe, layer_table, live_tensors
from disttrain_cli.models.noise import Noise, draw_noise
from disttrain_cli.models.posterior import draw
from disttrain_cli.models.probe import entry_state, probe_batch
from disttrain_cli.models.sampling import generate
from disttrain_cli.models.vae import decoder_maker
from tests.batches import changed, through

VAE = {
    "block_out_channels": [8, 16],
    "layers_per_block": 1,
    "latent_channels": 4,
    "norm_num_groups": 4,
    "down_block_types": ["DownEncoderBlock2D", "DownEncoderBlock2D"],
    "up_block_types": ["UpDecoderBlock2D", "UpDecoderBlock2D"],
}
GENERATOR = {"vae": VAE, "config": {"in_channels": 4, "out_channels": 4}}


@pytest.fixture
def run(make_run):
    return make_run(image_generator=GENERATOR)


def generator(run, dtype=torch.float32):
    table, inputs = layer_table(run), describe(run)
    start = next(i for i, layer in enumerate(table) if layer.module == "image_generator")
    batch = probe_batch(inputs, target=3)
    layers = build_layers(run, start, len(table), dtype=dtype)
    return layers, batch, entry_state(table, "image_generator", inputs, batch, dtype=dtype)


@pytest.mark.slow
def test_the_encoder_stands_at_the_generators_entry_and_is_frozen(run):
    target = describe(run).target
    assert (target.size_px, target.channels, target.latent_pixels, target.shape) == (
        16,
        3,
        8 * 8,
        (3, 16, 16),
    )
    table = layer_table(run)
    own = [layer for layer in table if layer.module == "image_generator"]
    assert [layer.kind for layer in own[:3]] == ["vae_encoder", "projector", "in"]
    assert [layer.kind for layer in table if layer.frozen] == ["vae_encoder"]
    assert {spec.name: spec.shape for spec in live_tensors(table, table.index(own[1]))} == {
        "context": (48,),
        "latents": (4, 8, 8),
    }
    costs = count_flops(run)["image_generator"]
    assert costs["vae_encoder"].forward.per_item > 0
    assert not any(costs["vae_encoder"].backward.model_dump().values())
    layers, batch, state = generator(run)
    assert not any(parameter.requires_grad for parameter in layers[0].parameters())
    assert not layers[0](state, batch)["latents"].requires_grad
    assert saved_bytes(layers[0], state, batch) == 0


def test_latents_equal_diffusers_own_and_the_loss_is_in_latent_space(run):
    from diffusers import AutoencoderKL, DDPMScheduler

    layers, batch, state = generator(run)
    vae, _, start, *_, out = layers
    whole = AutoencoderKL(**VAE).eval()
    whole.encoder.load_state_dict(vae.vae.encoder.state_dict())
    whole.quant_conv.load_state_dict(vae.vae.quant_conv.state_dict())
    state = through(layers, batch, state)
    with torch.no_grad():
        posterior = whole.encode(batch.of("target").values[0][0]).latent_dist
    drawn = (state["latents"] / whole.config.scaling_factor - posterior.mean) / posterior.std
    torch.testing.assert_close(drawn, draw(batch, (4, 8, 8), 0), rtol=1e-4, atol=1e-4)
    timesteps, noise = draw_noise(batch, (4, 8, 8), Noise())
    assert not torch.equal(drawn, noise)
    first = start.start(
        {}, DDPMScheduler().add_noise(state["latents"], noise, timesteps), timesteps
    )
    assert torch.equal(first["skip.0"], state["skip.0"])
    errors = (out.predict(state, batch) - noise).square().mean((1, 2, 3))
    torch.testing.assert_close(state["loss/image"], 2.0 * errors.mean(), rtol=1e-6, atol=0)
    state["loss/image"].backward()
    for layer in layers:
        assert all((parameter.grad is None) == layer.frozen for parameter in layer.parameters())


def test_a_latent_depends_on_the_images_seed_only(run):
    layers, batch, _ = generator(run)
    order = torch.tensor([2, 0])
    targets = batch.of("target")
    part = changed(
        batch,
        "target",
        grids=targets.grids[:2],
        noise_seeds=targets.noise_seeds[order],
        values={0: [targets.values[0][0][order]]},
    )
    torch.manual_seed(99)
    torch.testing.assert_close(
        layers[0]({}, part)["latents"], layers[0]({}, batch)["latents"][order]
    )
    nobody = probe_batch(describe(run), target=0)
    assert layers[0]({}, nobody)["latents"].shape == (0, 4, 8, 8)


def test_bf16_runs(run):
    layers, batch, state = generator(run, torch.bfloat16)
    state = through(layers, batch, state)
    assert state["latents"].dtype == torch.bfloat16 and state["loss/image"].isfinite()
    state["loss/image"].backward()


@pytest.mark.slow
def test_cached_latents_need_no_encoder(make_run, run):
    cached = make_run(image_generator={**GENERATOR, "cached_latents": True})
    target = describe(cached).target
    assert (target.size_px, target.latent_pixels, target.shape) == (16, 64, (8, 8, 8))
    assert [layer.name for layer in layer_table(cached)] == [
        layer.name for layer in layer_table(run) if layer.kind != "vae_encoder"
    ]
    layers, batch, state = generator(cached)
    through(layers, batch, state)["loss/image"].backward()
    with_vae, without = count_flops(run)["image_generator"], count_flops(cached)["image_generator"]
    assert {kind: costs for kind, costs in with_vae.items() if kind != "vae_encoder"} == without


def test_images_are_made_of_latents_by_the_vaes_decoder(make_run, run):
    from diffusers import AutoencoderKL

    inputs, config = describe(run), read_configs(run)["image_generator"].vae
    decoder = decoder_maker("image_generator", config).build(0)
    whole = AutoencoderKL(**VAE).eval()
    whole.decoder.load_state_dict(decoder.vae.decoder.state_dict())
    whole.post_quant_conv.load_state_dict(decoder.vae.post_quant_conv.state_dict())
    latents = torch.randn(2, 4, 8, 8)
    with torch.no_grad():
        expected = whole.decode(latents / whole.config.scaling_factor).sample
    torch.testing.assert_close(decoder.decode(latents), expected)
    batch = changed(
        probe_batch(inputs, image=[(4, 4)], documents=[[40]], target=2), "target", values={}
    )
    images = generate(build_layers(run, 0, len(layer_table(run))), batch, inputs, 2, 0, decoder)
    assert images.shape == (2, 16, 16, 3) and not (images[0] == images[1]).all()
    cached = make_run(image_generator={**GENERATOR, "cached_latents": True})
    again = generate(
        build_layers(cached, 0, len(layer_table(cached))), batch, describe(cached), 2, 0, decoder
    )
    assert (again == images).all()


@pytest.mark.parametrize(
    ("config", "vae", "others", "words"),
    [
        ({"in_channels": 3}, {}, {}, ("config.in_channels", "4: vae.latent_channels")),
        ({"out_channels": 8}, {}, {}, ("config.out_channels", "4: vae.latent_channels")),
        ({"sample_size": 16}, {}, {}, ("config.sample_size", "8, the side of the VAE's latents")),
        ({}, {"latent_chanels": 4}, {}, ("vae.latent_chanels", "latent_channels")),
        ({}, {"in_channels": 1}, {}, ("vae.in_channels", "RGB")),
        ({}, {"latent_channels": 0}, {}, ("vae.latent_channels", "1 or more")),
        (
            {},
            {"block_out_channels": [8]},
            {},
            ("vae.block_out_channels", "2, one for each of down_block_types"),
        ),
        (
            {},
            {"up_block_types": ["UpDecoderBlock2D"]},
            {},
            ("vae.up_block_types", "2, one for each"),
        ),
        (
            {},
            {"down_block_types": ["DownBlock2D", "DownBlock2D"]},
            {},
            ("vae.down_block_types", "DownEncoderBlock2D"),
        ),
        ({}, {"down_block_types": []}, {}, ("vae.down_block_types",)),
        ({}, {"norm_num_groups": 7}, {}, ("image_generator.vae", "AutoencoderKL", "num_channels")),
        ({}, {"layers_per_block": "two"}, {}, ("image_generator.vae", "AutoencoderKL")),
        ({}, {"scaling_factor": 0.0}, {}, ("vae.scaling_factor", "positive")),
        ({}, {"scaling_factor": float("nan")}, {}, ("vae.scaling_factor", "finite")),
        ({}, {"shift_factor": "little"}, {}, ("vae.shift_factor", "number")),
        ({}, {"latents_mean": [0.1]}, {}, ("vae.latents_mean", "nothing")),
        ({}, {}, {"image_size": 15}, ("image_size", "multiples of 2", "VAE")),
        ({}, {}, {"image_size": 18}, ("image_size", "multiples of 4", "after the VAE's by 2")),
    ],
)
def test_wrong_configurations_are_named(make_run, config, vae, others, words):
    change = {"vae": {**VAE, **vae}, "config": {**GENERATOR["config"], **config}, **others}
    with pytest.raises(SpecError) as error:
        layer_table(make_run(image_generator=change))
    assert all(word in str(error.value) for word in words), str(error.value)
