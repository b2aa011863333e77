"""Vision towers against transformers' own: the published names of every weight, hidden states on
any grids."""

import dataclasses
from typing import Any

import pytest
import torch

from disttrain_cli.errors import SpecError
from disttrain_cli.models.activations import saved_bytes
from disttrain_cli.models.architectures import read_configs
from disttrain_cli.models.clip import places
from disttrain_cli.models.flops import count_flops, layer_flops
from disttrain_cli.models.graph import build_layers, describe, layer_table, live_tensors
from disttrain_cli.models.layer import Batch, Items
from disttrain_cli.models.operators import layer_operators
from disttrain_cli.models.probe import probe_batch, probe_work, state_at
from disttrain_cli.models.published import on_meta
from disttrain_cli.models.qwen_vision import layout
from disttrain_cli.models.sharding import tp_degrees
from disttrain_cli.models.tensor_parallel import linears
from disttrain_cli.models.towers import positions
from tests.batches import through
from tests.cases import first_fast

SQUARE = {
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "image_size": 16,
    "patch_size": 4,
}
QWEN = {
    "hidden_size": 32,
    "depth": 3,
    "num_heads": 4,
    "intermediate_size": 48,
    "patch_size": 4,
    "window_size": 16,
    "spatial_merge_size": 2,
    "out_hidden_size": 40,
    "fullatt_block_indexes": [1],
}
QWEN3 = {
    "hidden_size": 32,
    "depth": 3,
    "num_heads": 4,
    "intermediate_size": 48,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "out_hidden_size": 48,
    "num_position_embeddings": 25,
    "deepstack_visual_indexes": [0, 1],
}
TOWERS: dict[str, Any] = {
    "vit": {"merge": 2, "config": SQUARE},
    "clip_vision_model": {"merge": 2, "config": SQUARE},
    "siglip_vision_model": {"merge": 2, "config": SQUARE},
    "internvl_vision": {"merge": 2, "projector": "norm_mlp", "config": SQUARE},
    "idefics3_vision": {"merge": 2, "projector": "linear", "config": SQUARE},
    "qwen2_5_vl_vision": {"config": QWEN},
    "qwen3_vl_vision": {"config": QWEN3},
}
#: As the largest InternVL towers are.
INTERNVIT_6B = {
    "norm_type": "rms_norm",
    "use_qk_norm": True,
    "use_mean_pooling": False,
    "attention_bias": True,
}
ASKED_TO_INTERPOLATE = ("vit", "clip_vision_model", "siglip_vision_model")
GRIDS = [(4, 4), (4, 4), (4, 6), (6, 8), (2, 8)]


@pytest.fixture
def tower(make_run):
    def make(architecture, **changes):
        spec = TOWERS[architecture.replace("smolvlm", "idefics3")]
        config = spec["config"] | changes.pop("config", {})
        run = make_run(image_generator=None, image_encoder=None)
        modules = {
            "eye": {
                "kind": "encoder",
                "architecture": architecture,
                **spec,
                "config": config,
                **changes,
            }
        }
        plain = run.file.model_dump(mode="json", exclude_none=True)
        plain["model"]["modules"] = modules | plain["model"]["modules"]
        return type(run)(path=run.path, file=type(run.file).model_validate(plain))

    return make


def encoder(run, **options):
    table = layer_table(run)
    return build_layers(run, 0, sum(info.module == "eye" for info in table), **options)


def published(run, architecture, original=None):
    """transformers' whole model with random weights, and our layers with the same ones through
    `published`."""
    torch.manual_seed(1)
    whole = on_meta(architecture, read_configs(original or run)["eye"].config)
    whole.to_empty(device="cpu")
    type(whole).init_weights(whole)
    with torch.no_grad():
        for parameter in whole.parameters():
            parameter.normal_(0.1, 0.2)
    weights, layers, used = whole.state_dict(), encoder(run), []
    for layer in layers:
        own = dict(layer.named_parameters())
        for path, tensor in layer.from_published(lambda name: used.append(name) or weights[name]):
            with torch.no_grad():
                own[path].copy_(tensor)
        assert layer.kind in ("projector",) or all(layer.published_name(path) for path in own)
        back = layer.to_published(own)
        assert all(torch.equal(tensor, weights[name]) for name, tensor in back.items())
    return whole.eval(), layers, set(weights) - set(used)


@pytest.mark.parametrize(
    ("architecture", "config"),
    [
        ("vit", {}),
        ("clip_vision_model", {}),
        ("siglip_vision_model", {}),
        ("internvl_vision", {}),
        ("internvl_vision", INTERNVIT_6B),
        ("idefics3_vision", {}),
        ("smolvlm_vision", {"image_size": 28}),
    ],
)
@pytest.mark.parametrize("feature_layer", [None, -1, -2])
def test_patches_equal_transformers_own(tower, architecture, config, feature_layer):
    run = tower(architecture, feature_layer=feature_layer, config=config)
    whole, layers, unused = published(run, architecture, tower(architecture, config=config))
    assert len(layers) == 2 + (3 if feature_layer is None else 4 + feature_layer)
    batch = probe_batch(describe(run), image=GRIDS)
    state = through(layers[:-1], batch)
    found = layers[-1].norm(state["image_hidden"])
    expected = []
    for pixels in batch.of("image").values[0]:
        # the others always do
        how = {"interpolate_pos_encoding": True} if architecture in ASKED_TO_INTERPOLATE else {}
        made = whole(pixels, **how, output_hidden_states=True)
        if feature_layer is not None:
            expected.append(made.hidden_states[feature_layer])
        elif architecture == "clip_vision_model":
            expected.append(whole.post_layernorm(made.last_hidden_state))
        else:
            expected.append(made.last_hidden_state)
    torch.testing.assert_close(
        found, torch.cat([e.flatten(0, 1) for e in expected]), rtol=1e-5, atol=1e-5
    )
    # the tower's own size is among them
    assert (4, 4) in batch.of("image").grids and found.shape[1] == 32
    if feature_layer is None:
        heads = {name for name in unused if not name.startswith(("head.", "pooler."))}
        assert not heads, heads
    through(layers[-1:], batch, state)["image_embeds"].sum().backward()
    assert all(p.grad is not None for layer in layers for p in layer.parameters())


def test_qwen_equals_transformers_own(tower):
    run = tower("qwen2_5_vl_vision")
    whole, layers, unused = published(run, "qwen2_5_vl_vision")
    assert not unused
    assert [layer.kind for layer in layers] == [
        "embed",
        "block",
        "block.global",
        "block",
        "merger",
        "projector",
    ]
    batch = probe_batch(describe(run), image=GRIDS)
    grids, patches = [], []
    for pixels in batch.of("image").values[
        0
    ]:  # as transformers' processor lays patches out, the image twice
        for image in pixels:
            rows, columns = image.shape[1] // 4, image.shape[2] // 4
            cut = image.unflatten(1, (rows // 2, 2, 4)).unflatten(4, (columns // 2, 2, 4))
            # block rows, block columns, 2, 2, channel, height, width
            blocks = cut.permute(1, 4, 2, 5, 0, 3, 6)
            patches.append(
                blocks.unsqueeze(5).expand(-1, -1, -1, -1, -1, 2, -1, -1).flatten(4).flatten(0, 3)
            )
            grids.append([1, rows, columns])
    expected = whole(torch.cat(patches), grid_thw=torch.tensor(grids))
    state = through(layers[:-1], batch)
    torch.testing.assert_close(
        state["image_hidden"], expected.last_hidden_state, rtol=1e-5, atol=1e-5
    )
    torch.testing.assert_close(state["image_merged"], expected.pooler_output, rtol=1e-5, atol=1e-5)
    through(layers[-1:], batch, state)["image_embeds"].sum().backward()
    assert all(p.grad is not None for layer in layers for p in layer.parameters())


@pytest.mark.parametrize("architecture", TOWERS)
def test_images_together_equal_one_by_one(tower, architecture):
    run = tower(architecture)
    layers = encoder(run)
    batch = probe_batch(describe(run), image=GRIDS)
    together = through(layers, batch)["image_embeds"]
    images = [image for pixels in batch.of("image").values[0] for image in pixels]
    alone = [
        through(layers, Batch({"image": Items([grid], {0: [image[None]]})}))["image_embeds"]
        for grid, image in zip(batch.of("image").grids, images, strict=True)
    ]
    assert [len(rows) for rows in alone] == [
        rows * columns // 4 for rows, columns in batch.of("image").grids
    ]
    torch.testing.assert_close(together, torch.cat(alone), rtol=1e-5, atol=1e-6)
    table, state = layer_table(run), {}
    # a cut before every layer: on each side only what is live, nothing cached
    for place, layer in enumerate(layers):
        state = {spec.name: state[spec.name] for spec in live_tensors(table, place)}
        state.update(layer(state, dataclasses.replace(batch, cache={})))
    assert torch.equal(state["image_embeds"], together)
    empty = through(layers, Batch({"image": Items([], {0: []})}))["image_embeds"]
    assert empty.shape == (0, 48)


@pytest.mark.parametrize("architecture", first_fast(TOWERS))
def test_costs_are_counted(tower, architecture):
    """FLOPs hold at other sizes in whole windows; operators and what a TP group reduces are there
    for every kind."""
    run = tower(architecture)
    table, inputs, flops = layer_table(run), describe(run), count_flops(run)["eye"]
    grids = [(4, 4), (8, 4), (8, 12)]
    for index, info in enumerate(table):
        if info.module != "eye":
            continue
        batch = probe_batch(inputs, image=grids, device="meta")
        layer = build_layers(run, index, index + 1, device="meta")[0]
        state = state_at(table, index, inputs, batch, "meta")
        counts = layer_flops(layer, state, batch)
        work = probe_work(inputs, "eye", image=grids)
        costs = flops[info.kind]
        assert (costs.forward(work), costs.backward(work), costs.backward_input(work)) == counts
        operators = layer_operators(layer, state, batch)
        assert operators.forward.kernels > 0 and (operators.saved_bytes > 0 or info.kind == "embed")


@pytest.mark.parametrize("architecture", TOWERS)
def test_bf16_runs_and_what_is_kept_for_the_backward_is_counted(tower, architecture):
    run = tower(architecture)
    table, inputs = layer_table(run), describe(run)
    batch = probe_batch(inputs, image=GRIDS)
    full = through(encoder(run), batch)["image_embeds"]
    layers = encoder(run, dtype=torch.bfloat16)
    made = through(layers, probe_batch(inputs, image=GRIDS))["image_embeds"]
    assert made.dtype == torch.bfloat16
    assert (made.float() - full).norm() < 0.05 * full.norm()
    made.sum().backward()
    rows = sum(rows * columns for rows, columns in GRIDS)
    for place, layer in enumerate(layers):
        kept = saved_bytes(
            layer, state_at(table, place, inputs, batch, dtype=torch.bfloat16), batch
        )
        assert kept >= (2 * 32 * rows if layer.kind.startswith("block") else 0)


@pytest.mark.parametrize("architecture", TOWERS)
def test_degrees_and_shards(tower, architecture):
    run = tower(architecture)
    assert tp_degrees(run, "eye", 8) == [1, 2, 4]
    inputs, table = describe(run), layer_table(run)
    batch = probe_batch(inputs, image=GRIDS)
    layers = encoder(run)
    for place, layer in enumerate(layers):
        state = {
            name: tensor.detach() for name, tensor in state_at(table, place, inputs, batch).items()
        }
        parts = [build_layers(run, place, place + 1, tp=4, tp_rank=rank)[0] for rank in range(4)]
        if layer.kind == "projector":  # a partial sum each: together they are the whole layer's
            total = sum(part(dict(state), batch)["image_embeds"] for part in parts)
            # alone, each part of an undivided linear makes all rows
            total = total - 3 * layer.mlp[2].bias if linears(layer, 1) else total / 4
            torch.testing.assert_close(
                total, layer(dict(state), batch)["image_embeds"], rtol=1e-5, atol=1e-5
            )
        elif layer.kind != "embed":
            assert (
                sum(p.numel() for p in parts[0].parameters())
                < sum(p.numel() for p in layer.parameters()) / 3
            )
            assert all(
                made.shape == layer(dict(state), batch)[name].shape
                for name, made in parts[1](dict(state), batch).items()
            )


@pytest.mark.parametrize(
    ("side", "rows", "columns"), [(4, 2, 6), (3, 5, 3), (2, 2, 3), (1, 2, 2), (16, 23, 9)]
)
def test_positions_are_interpolated_as_transformers_does(side, rows, columns):
    table = torch.randn(side * side, 5, generator=torch.Generator().manual_seed(0))
    grid = table.unflatten(0, (side, side)).permute(2, 0, 1)[None]
    expected = torch.nn.functional.interpolate(
        grid, size=(rows, columns), mode="bicubic", align_corners=False
    )
    torch.testing.assert_close(
        positions(table, rows, columns), expected[0].flatten(1).T, rtol=1e-5, atol=1e-5
    )
    assert positions(table, side, side) is table


def test_layer_scale_starts_as_the_class_says(tower):
    run = tower("internvl_vision", config={"layer_scale_init_value": 0.3})
    block = encoder(run)[1].layer
    assert (block.lambda_1 == 0.3).all() and (block.lambda_2 == 0.3).all()


def test_a_new_projector_of_a_published_internvl_tower_starts_with_weights_to_speak_of(tower):
    *_, projector = encoder(tower("internvl_vision", config={"initializer_range": 1e-10}))
    assert 0.01 < projector.mlp[2].weight.std() < 0.03


@pytest.mark.parametrize("side", [7, 26, 27, 32])
def test_a_full_tile_has_every_place_once(side):
    assert torch.equal(places(side, side, side), torch.arange(side * side))


def test_rows_of_a_window_follow_each_other():
    own = layout(6, 8, 2, 4)
    assert own.windows == (16, 16, 8, 8)
    assert sorted(own.order.tolist()) == list(range(48))
    assert own.order[:16].tolist() == [0, 1, 8, 9, 2, 3, 10, 11, 16, 17, 24, 25, 18, 19, 26, 27]
    blocks = own.order[::4].unflatten(0, (12,))
    assert blocks[own.tokens].tolist() == [
        row * 16 + column * 2 for row in range(3) for column in range(4)
    ]


@pytest.mark.parametrize(
    ("architecture", "changes", "words"),
    [
        ("clip_vision_model", {"feature_layer": -4}, ("feature_layer", "-1 to -3")),
        ("siglip_vision_model", {"config": {"image_size": [16, 16]}}, ("image_size", "squares")),
        ("siglip_vision_model", {"config": {"attention_dropout": 0.5}}, ("attention_dropout",)),
        ("clip_vision_model", {"config": {"projection_dims": 3}}, ("projection_dim",)),
        ("qwen2_5_vl_vision", {"feature_layer": -1}, ("feature_layer", "nothing")),
        ("qwen2_5_vl_vision", {"merge": 3}, ("merge", "2, the tower's own")),
        ("qwen2_5_vl_vision", {"projector": "linear"}, ("projector", "mlp, none")),
        ("internvl_vision", {"projector": "none"}, ("projector", "mlp, norm_mlp, linear")),
        ("qwen2_5_vl_vision", {"config": {"window_size": 12}}, ("window_size", "multiple")),
        (
            "qwen2_5_vl_vision",
            {"config": {"fullatt_block_indexes": [3]}},
            ("fullatt_block_indexes", "0 to 2"),
        ),
        ("qwen2_5_vl_vision", {"config": {"hidden_size": 24}}, ("hidden_size", "4 × num_heads")),
        ("qwen2_5_vl_vision", {"config": {"patch_size": [4, 4]}}, ("patch_size",)),
    ],
)
def test_wrong_configurations_are_named(tower, architecture, changes, words):
    with pytest.raises(SpecError) as error:
        layer_table(tower(architecture, **changes))
    assert all(word in str(error.value) for word in words), str(error.value)
