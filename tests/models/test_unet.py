import torch

from disttrain_cli.models.graph import build_layers, describe, layer_table
from disttrain_cli.models.noise import Noise, draw_noise
from disttrain_cli.models.probe import entry_state, probe_batch
from tests.batches import changed, through


def generator(run):
    return build_layers(run, 8, len(layer_table(run)))


def whole_unet(run, layers):
    from diffusers.models.unets.unet_2d_condition import UNet2DConditionModel

    spec = run.file.model.modules["image_generator"]
    whole = UNet2DConditionModel(**spec.config, sample_size=spec.image_size)
    blocks = [*whole.down_blocks, whole.mid_block, *whole.up_blocks]
    for mine, theirs in zip(layers[2:-1], blocks, strict=True):
        theirs.load_state_dict(mine.block.state_dict())
    for name in ("conv_in", "time_embedding"):
        getattr(whole, name).load_state_dict(getattr(layers[1], name).state_dict())
    for name in ("conv_norm_out", "conv_out"):
        getattr(whole, name).load_state_dict(getattr(layers[-1], name).state_dict())
    return whole


def check_equal_to_diffusers(run):
    from diffusers import DDPMScheduler

    layers = generator(run)
    whole = whole_unet(run, layers)
    inputs = describe(run)
    batch = probe_batch(inputs, target=3)
    batch.of("target").weights.copy_(torch.tensor([1.0, 0.0, 1.0]))
    state = through(layers, batch, entry_state(layer_table(run), "image_generator", inputs, batch))
    timesteps, noise = draw_noise(batch, (3, 16, 16), Noise())
    noisy = DDPMScheduler().add_noise(batch.of("target").values[0][0], noise, timesteps)
    conditioning = state["conditioning"].unflatten(0, (3, 4))
    predicted = whole(noisy, timesteps, conditioning).sample
    assert torch.equal(layers[-1].predict(state, batch), predicted)
    errors = (predicted - noise).square().mean((1, 2, 3))
    torch.testing.assert_close(
        state["loss/image"], 2.0 * (errors[0] + errors[2]) / 3, rtol=1e-6, atol=0
    )
    mine = torch.autograd.grad(
        state["loss/image"], [p for layer in layers[1:] for p in layer.parameters()]
    )
    assert all(gradient.isfinite().all() for gradient in mine)


def test_layers_equal_diffusers_own_model(make_run):
    check_equal_to_diffusers(make_run())


def test_deeper_unets_too(make_run):
    config = {
        "block_out_channels": [8, 16, 16],
        "layers_per_block": 2,
        "attention_head_dim": [2, 4, 4],
        "down_block_types": ["DownBlock2D", "CrossAttnDownBlock2D", "DownBlock2D"],
        "up_block_types": ["UpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"],
        "mid_block_type": "UNetMidBlock2D",
        "use_linear_projection": True,
    }
    check_equal_to_diffusers(make_run(image_generator={"config": config}))


def test_noise_depends_on_the_images_seed_only(make_run):
    batch = probe_batch(describe(make_run()), target=4)
    timesteps, noise = draw_noise(batch, (3, 16, 16), Noise())
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
    some_timesteps, some_noise = draw_noise(part, (3, 16, 16), Noise())
    assert torch.equal(some_timesteps, timesteps[order]) and torch.equal(some_noise, noise[order])
    assert len(set(timesteps.tolist())) > 1 and 0.9 < float(noise.std()) < 1.1


def test_last_layer_needs_nothing_from_the_first(make_run):
    """`out` draws the noise again on a stage of its own."""
    run = make_run()
    layers, inputs = generator(run), describe(run)
    batch = probe_batch(inputs, target=2)
    state = through(
        layers[:-1], batch, entry_state(layer_table(run), "image_generator", inputs, batch)
    )
    here = layers[-1]({"sample": state["sample"]}, batch)["loss/image"]
    batch.cache.clear()
    assert torch.equal(here, layers[-1]({"sample": state["sample"]}, batch)["loss/image"])
