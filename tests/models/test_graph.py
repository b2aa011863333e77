import json

import pytest
import torch

from disttrain_cli.errors import SpecError
from disttrain_cli.models.graph import build_layers, describe, layer_table, live_tensors
from disttrain_cli.models.probe import entry_state, probe_batch, state_at
from tests.batches import through

GRIDS = [(4, 4), (2, 6), (4, 4)]
DOCUMENTS = [[20, 20], [41]]


def test_describe_says_what_the_data_needs(make_run):
    inputs = describe(make_run())
    assert (inputs.vocabulary, inputs.sequence_length) == (261, 48)
    assert (inputs.image.patch_px, inputs.image.merge, inputs.image.extra_tokens) == (4, 2, 1)
    assert (inputs.target.size_px, inputs.target.context_tokens, inputs.target.latent_pixels) == (
        16,
        4,
        256,
    )


def test_modules_may_be_missing(make_run):
    run = make_run(image_encoder=None, image_generator=None)
    inputs, table = describe(run), layer_table(run)
    assert inputs.image is None and inputs.target is None
    assert [layer.kind for layer in table] == ["embed", "block", "block", "head"]
    assert table[0].reads == () and table[-1].writes == () and table[-1].needs == ("labels",)
    batch = probe_batch(inputs, documents=DOCUMENTS)
    state = through(build_layers(run, 0, len(table)), batch)
    state["loss/text"].backward()


def test_the_table_is_what_gets_built(make_run):
    run = make_run()
    table = layer_table(run)
    for info, layer in zip(table, build_layers(run, 0, len(table)), strict=True):
        assert all(
            getattr(layer, name) == getattr(info, name)
            for name in ("name", "module", "kind", "reads", "writes", "needs", "loss")
        )
        assert info.parameters == sum(p.numel() for p in layer.parameters()) > 0
        assert not list(layer.buffers())
    assert len({info.name for info in table}) == len(table)
    assert layer_table(run) is table


def test_layers_of_a_kind_have_equal_costs(make_run):
    by_kind = {}
    for info in layer_table(make_run()):
        by_kind.setdefault((info.module, info.kind), set()).add(info.parameters)
    assert all(len(sizes) == 1 for sizes in by_kind.values())


def test_initial_weights_depend_on_seed_and_name_only(make_run):
    run = make_run()
    whole = build_layers(run, 0, len(layer_table(run)))
    random_state = torch.random.get_rng_state()
    for start, stop in ((0, 1), (2, 7), (9, 16)):
        torch.manual_seed(start)
        for expected, layer in zip(whole[start:stop], build_layers(run, start, stop), strict=True):
            for (name, a), b in zip(expected.named_parameters(), layer.parameters(), strict=True):
                assert torch.equal(a, b), (layer.name, name)
    torch.random.set_rng_state(random_state)
    other = build_layers(make_run(seed=1), 5, 6)[0]
    assert not torch.equal(whole[5].layer.mlp.up_proj.weight, other.layer.mlp.up_proj.weight)
    assert not torch.equal(whole[5].layer.mlp.up_proj.weight, whole[6].layer.mlp.up_proj.weight)
    assert abs(float(other.layer.mlp.up_proj.weight.detach().std()) - 0.02) < 0.001
    assert torch.equal(other.layer.input_layernorm.weight, torch.ones(48))


def test_building_leaves_the_random_state_alone(make_run):
    torch.manual_seed(3)
    before = torch.random.get_rng_state()
    build_layers(make_run(), 0, 3)
    assert torch.equal(before, torch.random.get_rng_state())


@pytest.mark.slow
def test_only_live_tensors_need_to_cross_a_cut(make_run):
    run = make_run()
    table, inputs = layer_table(run), describe(run)
    layers = build_layers(run, 0, len(table))

    def losses(cuts):
        batch = probe_batch(inputs, image=GRIDS, documents=DOCUMENTS, target=3)
        state = {}
        for index, layer in enumerate(layers):
            if index in cuts:
                state = {spec.name: state[spec.name] for spec in live_tensors(table, index)}
                batch.cache.clear()
            written = layer(state, batch)
            for spec in layer.writes:
                assert written[spec.name].shape[1:] == spec.shape, (layer.name, spec)
            result.update({k: written.pop(k) for k in list(written) if k.startswith("loss/")})
            state.update(written)
        total = sum(result.values())
        gradient = torch.autograd.grad(total, layers[0].embeddings.cls_token)[0]
        return {k: float(v.detach()) for k, v in result.items()}, gradient

    result = {}
    expected, gradient = losses(())
    assert set(expected) == {"loss/text", "loss/image"} and gradient.abs().max() > 0
    for cut in range(1, len(layers)):
        found, other = losses((cut,))
        assert found == expected and torch.equal(gradient, other), cut
    assert losses(range(1, len(layers)))[0] == expected


def test_no_live_tensor_is_superfluous(make_run):
    table = layer_table(make_run())
    for cut in range(len(table) + 1):
        for spec in live_tensors(table, cut):
            reader = next(layer for layer in table[cut:] if spec.name in layer.reads)
            between = table[cut : table.index(reader)]
            assert all(spec.name != s.name for layer in between for s in layer.writes)
    assert live_tensors(table, 0) == live_tensors(table, len(table)) == []


@pytest.mark.parametrize(("grids", "targets"), [([], 0), (GRIDS, 0), ([], 3)])
def test_slots_without_images_or_targets_run_forward_and_backward(make_run, grids, targets):
    run = make_run()
    table, inputs = layer_table(run), describe(run)
    layers = build_layers(run, 0, len(table))
    batch = probe_batch(inputs, image=grids, documents=DOCUMENTS, target=targets)
    state = through(layers, batch)
    sum(v for k, v in state.items() if k.startswith("loss/")).backward()
    assert ("loss/image" in state) == bool(targets)
    for layer in layers:
        empty = (layer.module == "image_encoder" and not grids) or (
            layer.module == "image_generator" and not targets
        )
        assert (next(layer.parameters()).grad is None) == empty
        for spec in layer.writes:
            assert empty == (len(state[spec.name]) == 0) or (spec.name == "context" and not targets)


def test_entry_state_fits_every_module(make_run):
    run = make_run()
    table, inputs = layer_table(run), describe(run)
    batch = probe_batch(inputs, image=GRIDS, documents=DOCUMENTS, target=2)
    assert {k: tuple(v.shape) for k, v in entry_state(table, "llm", inputs, batch).items()} == {
        "image_embeds": (11, 48)
    }
    assert {
        k: tuple(v.shape) for k, v in entry_state(table, "image_generator", inputs, batch).items()
    } == {"context": (8, 48)}
    layers = build_layers(run, 0, len(table))
    for index, layer in enumerate(layers):
        state = state_at(table, index, inputs, batch)
        results = layer(state, batch).values()
        torch.autograd.backward(list(results), [torch.ones_like(r) for r in results])
        assert all(state[name].grad is not None for name in layer.reads)


def test_bf16_layers_run(make_run):
    run = make_run()
    table, inputs = layer_table(run), describe(run)
    batch = probe_batch(inputs, image=GRIDS, documents=DOCUMENTS, target=2)
    layers = build_layers(run, 0, len(table), dtype=torch.bfloat16)
    state = through(layers, batch)
    full = through(
        build_layers(run, 0, len(table)),
        probe_batch(inputs, image=GRIDS, documents=DOCUMENTS, target=2),
    )
    for name in ("loss/text", "loss/image"):
        assert state[name].dtype == torch.float32
        assert float(state[name].detach()) == pytest.approx(float(full[name].detach()), rel=0.02)
    (state["loss/text"] + state["loss/image"]).backward()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"llm": {"architecture": "gpt9"}}, ("gpt9", "whisper", "decoders of transformers")),
        ({"llm": {"architecture": "vit"}}, ("kind encoder, not llm",)),
        ({"llm": {"config": {"hiden_size": 48}}}, ("hiden_size", "hidden_size")),
        ({"image_encoder": {"config": {"num_layers": 3}}}, ("num_layers", "num_hidden_layers")),
        ({"image_generator": {"config": {"cross_attention": 3}}}, ("cross_attention_dim",)),
        ({"llm": {"config": {"hidden_size": "large"}}}, ("hidden_size", "expected int")),
        ({"llm": {"config": {"hidden_size": 50}}}, ("multiple of the number of attention",)),
        (
            {"image_encoder": {"config": {"hidden_size": 50}}},
            ("hidden_size", "multiple of num_attention_heads"),
        ),
        ({"llm": {"config": {"num_key_value_heads": 3}}}, ("num_key_value_heads", "divisor")),
        ({"llm": {"config": {"num_attention_heads": 0}}}, ("model.modules.llm",)),
        ({"llm": {"config": {"num_hidden_layers": 0}}}, ("num_hidden_layers",)),
        ({"llm": {"config": {"attention_dropout": 0.1}}}, ("attention_dropout",)),
        (
            {"image_encoder": {"config": {"attention_probs_dropout_prob": 0.1}}},
            ("attention_probs_dropout_prob",),
        ),
        ({"image_encoder": {"config": {"patch_size": [4, 2]}}}, ("patch_size",)),
        ({"llm": {"config": {"vocab_size": 256}}}, ("vocab_size", "261")),
        ({"image_generator": {"image_size": 17}}, ("image_size", "multiples of 2")),
        ({"image_generator": {"config": {"dropout": 1.5}}}, ("dropout",)),
        ({"image_generator": {"config": {"class_embed_type": "timestep"}}}, ("class_embed_type",)),
        (
            {
                "image_generator": {
                    "config": {"down_block_types": ["DownBlock2D", "AttnDownBlock2D"]}
                }
            },
            ("AttnDownBlock2D",),
        ),
        (
            {"image_generator": {"config": {"up_block_types": "UpBlock2D"}}},
            ("up_block_types", "CrossAttnUpBlock2D"),
        ),
        ({"image_generator": {"config": {"in_channels": 4}}}, ("in_channels",)),
        ({"image_generator": {"config": {"sample_size": 64}}}, ("sample_size",)),
        (
            {"image_generator": {"config": {"norm_num_groups": 7}}},
            ("image_generator", "num_channels"),
        ),
        ({"image_generator": {"config": {"block_out_channels": [16]}}}, ("block_out_channels",)),
        ({"image_generator": {"config": {"block_out_channels": "wide"}}}, ("image_generator",)),
        ({"image_generator": {"config": {"layers_per_block": None}}}, ("image_generator",)),
        ({"llm": {"config": {"hidden_act": "no-such"}}}, ("hidden_act", "silu")),
        (
            {"llm": {"config": {"rope_parameters": {"rope_type": "spiral"}}}},
            ("rope_type", "default"),
        ),
        (
            {"llm": {"config": {"rope_parameters": {"rope_type": "linear"}}}},
            ("model.modules.llm", "factor"),
        ),
        ({"image_generator": {"config": {"block_out_channels": [-16, 32]}}}, ("image_generator",)),
    ],
)
def test_wrong_configurations_are_named(make_run, changes, words):
    with pytest.raises(SpecError) as error:
        layer_table(make_run(**changes))
    assert all(word in str(error.value) for word in words), str(error.value)


def test_modules_from_folders(make_run, tmp_path):
    from transformers import LlamaConfig

    folder = tmp_path / "my-llama"
    run = make_run()
    LlamaConfig(**run.file.model.modules["llm"].config).save_pretrained(folder)
    (tmp_path / "my-unet").mkdir()
    unet = {
        "_class_name": "UNet2DConditionModel",
        "_diffusers_version": "0.1",
        **run.file.model.modules["image_generator"].config,
        "sample_size": 16,
    }
    (tmp_path / "my-unet" / "config.json").write_text(json.dumps(unet))
    other = make_run(
        llm={"architecture": None, "folder": "my-llama"},
        image_generator={"architecture": None, "folder": "my-unet", "config": {}},
    )
    assert layer_table(other) == layer_table(run)


def test_a_tower_inside_a_whole_models_folder_with_its_processor(make_run, tmp_path):
    """The tower's part of config.json is used, and the processor's mean, deviation and scale."""
    folder = tmp_path / "eye"
    folder.mkdir()
    vision = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 64,
        "image_size": 16,
        "patch_size": 4,
        "model_type": "siglip_vision_model",
    }
    (folder / "config.json").write_text(
        json.dumps({"model_type": "siglip", "vision_config": vision})
    )
    run = make_run(image_encoder={"architecture": None, "folder": "eye", "config": {}})
    image = describe(run).image
    assert (image.patch_px, image.extra_tokens) == (4, 0) and image.mean == image.std == (
        0.5,
        0.5,
        0.5,
    )
    processor = {"image_mean": [0.1, 0.2, 0.3], "image_std": 0.25, "rescale_factor": 1 / 127.5}
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    image = describe(run).image
    assert image.mean == pytest.approx((0.05, 0.1, 0.15)) and image.std == pytest.approx(
        (0.125, 0.125, 0.125)
    )
    (folder / "preprocessor_config.json").write_text(
        json.dumps({"do_normalize": False, "do_rescale": False})
    )
    image = describe(run).image
    assert image.mean == (0, 0, 0) and image.std == pytest.approx((1 / 255,) * 3)
    for wrong, words in (
        ({"image_std": [1, 0, 1]}, "image_std"),
        ({"image_mean": "grey"}, "image_mean"),
        ({"image_std": float("nan")}, "image_std"),
        ({"rescale_factor": float("inf")}, "rescale_factor"),
        ({"rescale_factor": -1}, "rescale_factor"),
    ):
        (folder / "preprocessor_config.json").write_text(json.dumps(wrong))
        with pytest.raises(SpecError, match=words):
            describe(run)


def test_means_are_those_of_the_classes_processors():
    from transformers.image_utils import (
        IMAGENET_STANDARD_MEAN,
        IMAGENET_STANDARD_STD,
        OPENAI_CLIP_MEAN,
        OPENAI_CLIP_STD,
    )

    from disttrain_cli.models.configs.images import CLIP, HALVES

    assert [list(values) for values in CLIP] == [OPENAI_CLIP_MEAN, OPENAI_CLIP_STD]
    assert [list(values) for values in HALVES] == [IMAGENET_STANDARD_MEAN, IMAGENET_STANDARD_STD]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, ("no model configuration", "model.modules.llm.folder")),
        ("{", ("Cannot read",)),
        ("[]", ("must be a mapping",)),
        ('{"model_type": "gpt9"}', ("gpt9", "known: vit, clip_vision_model")),
        ("{}", ("unknown architecture",)),
        (
            '{"model_type": "llama", "auto_map": {"AutoModel": "mine.Model"}}',
            ("auto_map", "never run", "mine.Model"),
        ),
        ('{"model_type": "clip"}', ("whole clip model", "vision_config")),
        ('{"model_type": "clip", "vision_config": {}}', ("of kind encoder, not llm",)),
    ],
)
def test_bad_folders_are_refused(make_run, tmp_path, content, words):
    (tmp_path / "folder").mkdir()
    if content is not None:
        (tmp_path / "folder" / "config.json").write_text(content)
    with pytest.raises(SpecError) as error:
        describe(make_run(llm={"architecture": None, "folder": "folder"}))
    assert all(word in str(error.value) for word in words), str(error.value)
