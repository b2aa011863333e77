"""Generators over images of several sizes: losses equal diffusers' own forward on each image alone;
sizes that do not fit are refused by name."""

import pytest
import torch

from disttrain_cli.errors import SpecError
from disttrain_cli.models.architectures import read_configs
from disttrain_cli.models.flops import count_flops
from disttrain_cli.models.graph import build_layers, describe, layer_table, live_tensors
from disttrain_cli.models.noise import draw_noise
from disttrain_cli.models.posterior import draw
from disttrain_cli.models.probe import entry_state, probe_batch, row_count
from disttrain_cli.models.sampling import generate
from tests.batches import changed, through
from tests.cases import mostly_slow
from tests.models.changed_runs import with_generator, with_modules
from tests.models.test_generators import GENERATORS, NAME, library_model

KINDS = ("sd3.5", "sd3, pixels", "flux", "lumina2", "lumina2, pixels")
BUCKETS = [[16, 16], [24, 12], [12, 24]]
#: Rows and columns of patches of 4 pixels.
GRIDS = [(4, 4), (3, 6), (6, 3), (3, 6), (4, 4)]


def run_of(make_run, kind, **fields):
    run = make_run(image_generator={"config": {"block_out_channels": [16, 32]}})
    spec = {"architecture": "unet2d_condition", **GENERATORS[kind], "buckets": BUCKETS, **fields}
    return with_generator(run, **spec)


@pytest.fixture
def setting(make_run):
    """The generator's layers, a batch of images of several sizes, the state at the entry."""

    def make(kind, grids=GRIDS, **fields):
        run = run_of(make_run, kind, **fields)
        table, inputs = layer_table(run), describe(run)
        start = next(i for i, info in enumerate(table) if info.module == NAME)
        batch = probe_batch(inputs, target=grids)
        batch.of("target").weights[1:2] = 0.0
        layers = build_layers(run, start, len(table))
        return run, inputs, layers, batch, entry_state(table, NAME, inputs, batch)

    return make


def predicted_by_diffusers(model, kind, noisy, times, conditioning, pooled):
    """Of one image, as the family's pipeline calls its class."""
    more = {} if pooled is None else {"pooled_projections": pooled}
    if kind.startswith("lumina2"):
        mask = torch.ones(1, 4, dtype=torch.bool)
        more |= {"encoder_attention_mask": mask, "encoder_hidden_states": conditioning}
        return -model(noisy, timestep=1 - times / 1000, **more).sample
    if kind.startswith("sd3"):
        return model(noisy, timestep=times, encoder_hidden_states=conditioning, **more).sample
    from diffusers import FluxPipeline as Pipeline

    height, width = noisy.shape[2:]
    ids = Pipeline._prepare_latent_image_ids(1, height // 2, width // 2, "cpu", noisy.dtype)
    made = model(
        Pipeline._pack_latents(noisy, *noisy.shape),
        timestep=times / 1000,
        img_ids=ids,
        txt_ids=torch.zeros(4, 3),
        guidance=torch.full((1,), 3.5) if model.config.guidance_embeds else None,
        encoder_hidden_states=conditioning,
        **more,
    ).sample
    return Pipeline._unpack_latents(made, height, width, 1)


@pytest.mark.parametrize(
    "kind", mostly_slow(KINDS, *(kind for kind in KINDS if "pixels" not in kind))
)
def test_losses_equal_diffusers_forward_on_each_image_alone(setting, kind):
    run, inputs, layers, batch, state = setting(kind)
    torch.manual_seed(1)
    model, config = library_model(run, layers)
    by_kind = {layer.kind: layer for layer in layers}
    projected = by_kind["projector"](state, batch)
    made = through(layers, batch, state)
    canvas, targets = layers[-1].canvas, batch.of("target")
    assert targets.grids == sorted(GRIDS) and len(targets.values[0]) == 3
    pixels = [image for block in targets.values[0] for image in block.split(1)]
    expected = 0.0
    for number, (grid, image) in enumerate(zip(targets.grids, pixels, strict=True)):
        alone = probe_batch(inputs, target=[grid])
        alone = changed(
            alone, "target", noise_seeds=targets.noise_seeds[number : number + 1], values={}
        )
        shape = (canvas.shape[0], *canvas.buckets.denoised(grid))
        timesteps, noise = draw_noise(alone, shape, canvas.noise)
        clean = image
        if config.vae:
            mean, logvar = by_kind["vae_encoder"].moments(image).chunk(2, 1)
            drawn = mean + (0.5 * logvar).exp() * draw(alone, shape, 0)
            clean = (drawn - (config.vae["shift_factor"] or 0.0)) * config.vae["scaling_factor"]
        assert clean.shape[1:] == shape
        noisy = config.noise.mix(clean, noise, timesteps)
        rows = projected["conditioning"].unflatten(0, (5, 4))[number : number + 1]
        pooled = projected["pooled"][number : number + 1] if "pooled" in projected else None
        times = config.noise.times(timesteps)
        predicted = predicted_by_diffusers(model, kind, noisy, times, rows, pooled)
        error = (predicted - (noise - clean)).square().mean()
        expected = expected + targets.weights[number] * error / 5
    torch.testing.assert_close(made["loss/image"], 2.0 * expected, rtol=1e-5, atol=0)
    trained = [p for layer in layers for p in layer.parameters() if p.requires_grad]
    ours = torch.autograd.grad(made["loss/image"], trained, allow_unused=True)
    assert sum(gradient is not None for gradient in ours) > len(trained) // 2


@pytest.mark.slow
@pytest.mark.parametrize("kind", mostly_slow(["sd3.5", "flux", "lumina2"], "lumina2"))
def test_rows_flops_an_empty_batch_and_drawn_images(setting, kind):
    run, inputs, layers, batch, state = setting(kind)
    table = layer_table(run)
    first = len(table) - len(layers)
    between = dict(state)
    for cut, layer in enumerate(layers, first + 1):
        between.update(layer(between, batch))
        for spec in live_tensors(table, cut) if cut < len(table) else ():
            rows = row_count(spec, inputs, batch)
            assert tuple(between[spec.name].shape) == (rows, *spec.shape), spec
    specs = {spec.name: spec for layer in layers for spec in layer.writes}
    assert row_count(specs["patches"], inputs, batch) == sum(a * b for a, b in GRIDS)
    counted = count_flops(run)[NAME]
    assert all(k.forward.per_length_sq > 0 for name, k in counted.items() if "block" in name)
    nothing = {name: tensor[:0] for name, tensor in state.items()}
    empty = through(layers, probe_batch(inputs), nothing)
    assert empty.get("loss/image") is None or not empty["loss/image"].numel()

    class Keeps:
        @staticmethod
        def decode(sample):
            return sample[:, :3]

    every = build_layers(run, 0, len(table))
    whole = probe_batch(inputs, documents=[[40]], target=GRIDS[:2])
    images = generate(every, whole, inputs, 2, 0, Keeps())
    assert images.shape == (2, 8, 8, 3)


@pytest.mark.parametrize(
    ("kind", "fields", "words"),
    [
        ("sd3.5", {"buckets": [[16, 16], [18, 12]]}, ("buckets", "[18, 12]", "multiples of 4")),
        ("lumina2", {"buckets": [[16, 16], [16, 16]]}, ("buckets", "every size once")),
        ("lumina2", {"buckets": [[36, 4]]}, ("greater than or equal to 8",)),
        ("lumina2", {"buckets": [[40, 8]]}, ("buckets", "32 pixels or fewer: axes_lens is 8")),
        ("sd3.5", {"buckets": [[8, 32]]}, ("28 pixels or fewer: pos_embed_max_size is 7",)),
        ("pixart", {}, ("image_generator.buckets", "pixart learns images of one size")),
        ("sd 1.5", {}, ("buckets", "unet2d_condition learns images of one size", "sd3, flux")),
        ("sd3.5", {"buckets": []}, ("at least 1 item",)),
    ],
)
def test_sizes_that_do_not_fit_are_named(make_run, kind, fields, words):
    with pytest.raises((SpecError, ValueError)) as error:
        read_configs(run_of(make_run, kind, **fields))
    assert all(word in str(error.value) for word in words), str(error.value)


def test_two_generators_in_buckets_are_refused(make_run):
    run = run_of(make_run, "sd3.5")
    own = run.file.model_dump(mode="json", exclude_none=True)["model"]["modules"][NAME]
    with pytest.raises(SpecError, match="one generator"):
        read_configs(with_modules(run, second={**own, "buckets": None}))


@pytest.mark.parametrize("kind", ["flux", "lumina2"])
def test_sizes_from_json_are_taken(setting, kind):
    """As the processes that measure layers are given them."""
    *_, layers, batch, state = setting(kind, grids=[list(grid) for grid in GRIDS])
    assert batch.of("target").grids == sorted(GRIDS)
    assert through(layers, batch, state)["loss/image"].isfinite()
