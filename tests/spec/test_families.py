"""Whole published folders in the run file: what is filled in, and what is refused by name."""

import json

import pytest

from disttrain_cli.errors import SpecError
from disttrain_cli.models.architectures import read_configs
from disttrain_cli.models.graph import describe, layer_table
from disttrain_cli.spec.runfile import read_run
from tests.whole_models import QWEN, QWEN_TOWER, TEXT, TOWER, rewritten, run_of

LLAVA = {
    "model_type": "llava",
    "image_token_index": 3,
    "vision_config": {
        "model_type": "clip_vision_model",
        "hidden_size": 32,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "intermediate_size": 64,
        "image_size": 32,
        "patch_size": 8,
    },
    "text_config": {"model_type": "llama", "vocab_size": 300, "hidden_size": 64},
}
PROCESSOR = {
    "image_processor_type": "CLIPImageProcessor",
    "size": {"shortest_edge": 32},
    "crop_size": {"height": 32, "width": 32},
    "image_mean": [0.1, 0.2, 0.3],
    "image_std": [0.5, 0.6, 0.7],
    "resample": 2,
}


@pytest.fixture
def folder(tmp_path):
    """A LLaVA folder without weights."""
    made = tmp_path / "llava"
    made.mkdir()
    (made / "config.json").write_text(json.dumps(LLAVA))
    (made / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    return made


def refused(folder, file, fields, said):
    """The folder is refused by name once these fields of a file are others."""
    rewritten(folder, f"{file}{'' if file == 'config' else '_config'}.json", **fields)
    with pytest.raises(SpecError) as caught:
        describe(run_of(folder))
    assert said in f"{caught.value.what}\n{caught.value.why}" and caught.value.next_step


def test_a_folder_says_what_modules_images_and_tokens_are(folder):
    run = run_of(folder)
    model, data = run.file.model, run.file.data
    assert model.order == ["vision", "llm"] and model.modules["vision"].feature_layer == -2
    assert (data.tokenizer, data.max_image_pixels) == ("llava", 1024)
    configs = read_configs(run)
    assert [config.architecture for config in configs.values()] == ["clip_vision_model", "llama"]
    assert configs["vision"].config.num_hidden_layers == 2  # the last one is not read
    head = describe(run).image
    assert head.mean == (0.1, 0.2, 0.3) and head.std == (0.5, 0.6, 0.7)
    assert head.processor.resize == "crop" and head.processor.resample == "bilinear"
    assert head.grid(700, 30) == head.grid(30, 30) == (4, 4)
    assert run.published.image_token == 3


def test_an_exchanged_llm_has_its_own_tokenizer(folder):
    other = folder.parent / "llama"
    other.mkdir()
    (other / "config.json").write_text(json.dumps(LLAVA["text_config"]))
    run = run_of(folder, {"modules": {"llm": {"kind": "llm", "folder": "llama"}}})
    assert run.file.data.tokenizer == "llama" and run.file.data.max_image_pixels == 1024
    given = run_of(folder, {"modules": {"llm": {"folder": "llama"}}}, data={"tokenizer": "bytes"})
    assert given.file.data.tokenizer == "bytes"
    changed = run_of(folder, {"modules": {"llm": {"config": {"rms_norm_eps": 1e-5}}}})
    assert changed.file.data.tokenizer == "llava"


def test_what_was_filled_in_reads_the_same_again(folder):
    run = run_of(folder, {"modules": {"llm": {"config": {"rms_norm_eps": 1e-5}}}})
    path = folder.parent / "again.yaml"
    path.write_text(run.file.model_dump_json())
    assert read_run(path).file == run.file


@pytest.mark.parametrize(
    ("file", "fields", "said"),
    [
        ("config", {"model_type": "nothing"}, "unknown family: model_type 'nothing'"),
        (
            "config",
            {"model_type": "nothing", "transformers_version": "99.1.0.dev0"},
            "it was written by transformers 99.1.0.dev0, and",
        ),
        ("config", {"auto_map": {"AutoModel": "own.Model"}}, "code of its own (auto_map: "),
        ("config", {"vision_feature_layer": [-2, -5]}, "vision_feature_layer"),
        ("config", {"vision_feature_select_strategy": "full"}, "vision_feature_select_strategy"),
        ("config", {"projector_hidden_act": "relu"}, "projector_hidden_act 'relu'"),
        ("config", {"multimodal_projector_bias": False}, "multimodal_projector_bias False"),
        ("config", {"vision_config": None}, "vision_config is used"),
        ("config", {"vision_config": {"model_type": "pixtral"}}, "'pixtral' is not supported"),
        ("config", {"text_config": {"model_type": "bloom"}}, "no pipeline plan of bloom"),
        ("preprocessor", {"do_resize": False}, "do_resize"),
        ("preprocessor", {"do_pad": True}, "do_pad"),
        ("preprocessor", {"size": {"shortest_edge": 16}}, "size differs from"),
        ("preprocessor", {"resample": 9}, "resample"),
        ("preprocessor", {"size": 48, "crop_size": 48}, "does not fit the tower"),
        ("preprocessor", {"image_std": [0, 0, 0]}, "image_std does not fit"),
        ("preprocessor", {"crop_size": {"height": "x", "width": 32}}, "crop_size.height"),
        ("preprocessor", {"crop_size": [32, 32]}, "crop_size"),
        ("config", {"model_type": ["llava"]}, "unknown family"),
    ],
)
def test_what_is_not_computed_is_refused_by_name(folder, file, fields, said):
    refused(folder, file, fields, said)


def test_a_folder_that_is_not_there_or_without_a_processor_is_refused(folder):
    (folder / "preprocessor_config.json").unlink()
    with pytest.raises(SpecError, match="has no configuration of its image processor"):
        run_of(folder)
    with pytest.raises(SpecError, match="there is no folder llava-hf"):
        run_of(folder, {"folder": "llava-hf/llava-1.5-7b-hf"})
    with pytest.raises(SpecError, match=r"model\.folder"):
        run_of(folder, {"folder": "elsewhere"})


def test_numbers_nested_in_the_processors_file_go_first(folder):
    """As transformers 5 reads a folder that has both."""
    from transformers.image_processing_base import ImageProcessingMixin

    nested = PROCESSOR | {"image_mean": [0.25, 0.5, 0.75]}
    (folder / "processor_config.json").write_text(json.dumps({"image_processor": nested}))
    expected, _ = ImageProcessingMixin.get_image_processor_dict(folder)
    assert list(describe(run_of(folder)).image.mean) == expected["image_mean"] == [0.25, 0.5, 0.75]


def test_the_pixels_of_an_image_must_allow_the_one_size(folder):
    with pytest.raises(SpecError, match="max_image_pixels"):
        describe(run_of(folder, data={"max_image_pixels": 900}))


@pytest.mark.parametrize(
    ("file", "fields", "said"),
    [
        ("config", {"scale_factor": 0.5}, "scale_factor 0.5"),
        ("config", {"vision_config": TOWER | {"attention_dropout": 0.1}}, "attention_dropout"),
        (
            "config",
            {"text_config": {"model_type": "clip_text_model"}},
            "unknown architecture 'clip_text_model'",
        ),
        ("preprocessor", {"max_image_size": {"longest_edge": 64}}, "does not fit the tower"),
        ("processor", {"image_seq_len": 16}, "4 rows in the LLM"),
    ],
)
@pytest.mark.parametrize("family", ["idefics3", "smolvlm"])
def test_what_is_not_computed_of_idefics3_is_refused_by_name(tmp_path, family, file, fields, said):
    folder = tmp_path / family
    folder.mkdir()
    config = {"model_type": family, "vision_config": TOWER, "text_config": TEXT}
    (folder / "config.json").write_text(json.dumps(config))
    tile = {"size": {"longest_edge": 128}, "max_image_size": {"longest_edge": 32}}
    (folder / "preprocessor_config.json").write_text(json.dumps(tile))
    (folder / "processor_config.json").write_text(json.dumps({"image_seq_len": 4}))
    joined = run_of(folder).file.model.modules["vision"]
    assert (joined.merge, joined.projector, joined.feature_layer) == (2, "linear", None)
    refused(folder, file, fields, said)


PINPOINTS = [[32, 64], [64, 32], [64, 64]]


@pytest.mark.parametrize(
    ("file", "fields", "said"),
    [
        ("config", {"vision_feature_layer": [-2, -5]}, "vision_feature_layer"),
        ("config", {"multimodal_projector_bias": False}, "multimodal_projector_bias False"),
        ("config", {"image_grid_pinpoints": [[32, 64]]}, "image_grid_pinpoints"),
        ("config", {"image_grid_pinpoints": 7}, "image_grid_pinpoints"),
        ("config", {"vision_feature_select_strategy": "both"}, "vision_feature_select_strategy"),
        ("preprocessor", {"image_grid_pinpoints": [[32, 64]]}, "image_grid_pinpoints"),
        ("preprocessor", {"do_resize": False}, "do_resize"),
        ("processor", {"patch_size": 4}, "patch_size"),
        ("processor", {"num_image_tokens": 5}, "num_image_tokens"),
        ("processor", {"vision_feature_select_strategy": "x"}, "vision_feature_select_strategy"),
    ],
)
@pytest.mark.parametrize("family", ["llava_next", "llava_onevision"])
def test_what_is_not_computed_of_joined_tiles_is_refused_by_name(
    tmp_path, family, file, fields, said
):
    folder = joined_tiles(tmp_path, family)
    assert describe(run_of(folder)).image.newlines == 4  # a tile's rows
    (folder / "processor_config.json").write_text("{}")
    refused(folder, file, fields, said)


def test_largest_areas_and_joints_of_joined_tiles_are_refused_by_name(tmp_path):
    folder = joined_tiles(tmp_path, "llava_onevision")
    linear = {"modules": {"vision": {"projector": "linear"}}}
    with pytest.raises(SpecError, match="image_newline"):
        layer_table(run_of(folder, linear))
    for ratio in ("pad", 9):
        rewritten(folder, vision_aspect_ratio=ratio)
        with pytest.raises(SpecError, match="vision_aspect_ratio"):
            describe(run_of(folder))


def joined_tiles(folder, family):
    """A folder without weights whose images' rows are those of the joined tiles."""
    made = folder / family
    made.mkdir()
    tower = {"llava_next": "clip_vision_model", "llava_onevision": "siglip_vision_model"}[family]
    config = {
        "model_type": family,
        "vision_config": TOWER | {"model_type": tower},
        "text_config": TEXT,
        "image_grid_pinpoints": PINPOINTS,
    }
    (made / "config.json").write_text(json.dumps(config))
    side = {"height": 32, "width": 32}
    tile = {"size": side, "crop_size": side, "image_grid_pinpoints": PINPOINTS}
    (made / "preprocessor_config.json").write_text(json.dumps(tile))
    return made


@pytest.fixture
def qwen(tmp_path):
    """A Qwen2.5-VL folder without weights, as published: the LLM's fields at the top."""
    made = tmp_path / "qwen"
    made.mkdir()
    tower = {"model_type": "qwen2_5_vl", **QWEN_TOWER, **QWEN["qwen2_5_vl"][0]}
    text = {**TEXT, **QWEN["qwen2_5_vl"][1], "image_token_id": 3}
    whole = {"model_type": "qwen2_5_vl", "vision_config": tower, **text}
    (made / "config.json").write_text(json.dumps(whole))
    processor = {
        "image_processor_type": "Qwen2VLImageProcessorFast",
        "min_pixels": 256,
        "max_pixels": 4096,
        "patch_size": 4,
        "merge_size": 2,
    }
    (made / "preprocessor_config.json").write_text(json.dumps(processor))
    return made


def test_a_budget_is_the_folders_and_a_smaller_one_the_users(qwen):
    run = run_of(qwen)
    assert run.file.data.max_image_pixels == 4096 and run.published.image_token == 3
    assert {name: spec.projector for name, spec in run.file.model.modules.items()} == {
        "vision": "none",
        "llm": "mlp",
    }
    head = describe(run).image
    assert head.grid(8, 8) == (4, 4) and head.grid(1000, 1000) == (16, 16)  # both bounds
    head = describe(run_of(qwen, data={"max_image_pixels": 1024})).image
    assert head.grid(1000, 1000) == (8, 8)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"patch_size": 14}, "patch_size: 14; the tower's: 4"),
        ({"merge_size": 1}, "merge_size: 1; the tower's: 2"),
        ({"image_processor_type": "CLIPImageProcessor"}, "image_processor_type"),
        ({"min_pixels": 5000}, "min_pixels"),
        ({"max_pixels": "many"}, "max_pixels"),
    ],
)
def test_a_processor_that_does_not_fit_qwens_tower_is_refused(qwen, fields, said):
    refused(qwen, "preprocessor", fields, said)


@pytest.mark.parametrize(
    ("file", "fields", "said"),
    [
        ("config", {"downsample_ratio": 0.3}, "downsample_ratio 0.3"),
        ("config", {"downsample_ratio": "half"}, "downsample_ratio 'half'"),
        ("config", {"projector_hidden_act": "silu"}, "projector_hidden_act 'silu'"),
        ("config", {"vision_feature_select_strategy": "full"}, "vision_feature_select_strategy"),
        ("config", {"vision_feature_layer": 3}, "vision_feature_layer 3"),
        ("config", {"vision_config": TOWER | {"norm_type": "batch"}}, "norm_type"),
        ("config", {"vision_config": TOWER | {"use_mask_token": True}}, "use_mask_token"),
        ("config", {"vision_config": TOWER | {"projection_dropout": 0.1}}, "projection_dropout"),
        ("config", {"vision_config": TOWER | {"image_size": [32, 16]}}, "image_size"),
        (
            "config",
            {"text_config": {"model_type": "clip_text_model"}},
            "unknown architecture 'clip_text_model'",
        ),
        ("preprocessor", {"size": {"height": 64, "width": 64}}, "does not fit the tower"),
    ],
)
def test_what_is_not_computed_of_internvl_is_refused_by_name(tmp_path, file, fields, said):
    folder = tmp_path / "internvl"
    folder.mkdir()
    config = {"model_type": "internvl", "vision_config": TOWER, "text_config": TEXT}
    (folder / "config.json").write_text(json.dumps(config))
    tile = {"size": {"height": 32, "width": 32}}
    (folder / "preprocessor_config.json").write_text(json.dumps(tile))
    (folder / "processor_config.json").write_text(json.dumps({"image_seq_length": 4}))
    joined = run_of(folder).file.model.modules["vision"]
    assert (joined.merge, joined.projector, joined.feature_layer) == (2, "norm_mlp", None)
    refused(folder, file, fields, said)
