"""Whole models of published sizes, from config.json as it is published: as many parameters as the
published weights have."""

import json

import pytest

from disttrain_cli.models.graph import describe, layer_table
from tests.cases import first_fast
from tests.whole_models import run_of

CLIP = {"image_mean": [0.48145466, 0.4578275, 0.40821073]}
LLAVA = {
    "model_type": "llava",
    "image_token_index": 32000,
    "projector_hidden_act": "gelu",
    "text_config": {
        "max_position_embeddings": 4096,
        "model_type": "llama",
        "rms_norm_eps": 1e-05,
        "torch_dtype": "float16",
        "vocab_size": 32064,
    },
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
    "vision_config": {
        "hidden_size": 1024,
        "image_size": 336,
        "intermediate_size": 4096,
        "model_type": "clip_vision_model",
        "num_attention_heads": 16,
        "num_hidden_layers": 24,
        "patch_size": 14,
        "projection_dim": 768,
        "vocab_size": 32000,
    },
    "vision_feature_layer": -2,
    "vision_feature_select_strategy": "default",
}
QWEN2_5_VL = {
    "model_type": "qwen2_5_vl",
    "image_token_id": 151655,
    "hidden_act": "silu",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "max_window_layers": 28,
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
    "sliding_window": 32768,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "vocab_size": 152064,
    "vision_config": {
        "depth": 32,
        "hidden_act": "silu",
        "hidden_size": 1280,
        "intermediate_size": 3420,
        "num_heads": 16,
        "in_chans": 3,
        "out_hidden_size": 3584,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "spatial_patch_size": 14,
        "window_size": 112,
        "fullatt_block_indexes": [7, 15, 23, 31],
        "tokens_per_second": 2,
        "temporal_patch_size": 2,
    },
}
QWEN3_VL = {
    "model_type": "qwen3_vl",
    "image_token_id": 151655,
    "text_config": {
        "head_dim": 128,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "model_type": "qwen3_vl_text",
        "num_attention_heads": 32,
        "num_hidden_layers": 36,
        "num_key_value_heads": 8,
        "rope_scaling": {
            "mrope_interleaved": True,
            "mrope_section": [24, 20, 20],
            "rope_type": "default",
        },
        "rope_theta": 5000000,
        "vocab_size": 151936,
    },
    "vision_config": {
        "deepstack_visual_indexes": [8, 16, 24],
        "depth": 27,
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_size": 1152,
        "intermediate_size": 4304,
        "model_type": "qwen3_vl",
        "num_heads": 16,
        "num_position_embeddings": 2304,
        "out_hidden_size": 4096,
        "patch_size": 16,
        "spatial_merge_size": 2,
    },
}
INTERNVL3 = {
    "model_type": "internvl",
    "downsample_ratio": 0.5,
    "image_seq_length": 256,
    "image_token_id": 151667,
    "projector_hidden_act": "gelu",
    "text_config": {
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "max_position_embeddings": 32768,
        "max_window_layers": 70,
        "model_type": "qwen2",
        "num_attention_heads": 28,
        "num_hidden_layers": 28,
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-06,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": False,
        "vocab_size": 151674,
    },
    "vision_config": {
        "attention_bias": True,
        "hidden_size": 1024,
        "image_size": [448, 448],
        "intermediate_size": 4096,
        "layer_norm_eps": 1e-06,
        "model_type": "internvl_vision",
        "num_attention_heads": 16,
        "num_hidden_layers": 24,
        "patch_size": [14, 14],
    },
    "vision_feature_layer": -1,
    "vision_feature_select_strategy": "default",
}
#: config.json, preprocessor_config.json, parameters of the published weights, those that are not
#: read, and the patches of an image of 1920 × 1080 pixels.
PUBLISHED = {
    "llava-1.5-7b": (
        LLAVA,
        {"crop_size": {"height": 336, "width": 336}, "size": {"shortest_edge": 336}},
        7_063_427_072,
        12_596_224 + 2 * 1024,  # CLIP's last block and final norm
        (24, 24),
    ),
    "internvl3-8b": (
        INTERNVL3,
        {"size": {"height": 448, "width": 448}, "max_patches": 12, "crop_to_patches": False},
        7_944_373_760,
        0,
        (32, 32),
    ),
    "qwen2.5-vl-7b": (
        QWEN2_5_VL,
        {"min_pixels": 3136, "max_pixels": 12845056, "patch_size": 14, "merge_size": 2},
        8_292_166_656,
        0,
        (78, 138),
    ),
    "qwen3-vl-8b": (
        QWEN3_VL,
        {"size": {"longest_edge": 16777216, "shortest_edge": 65536}, "patch_size": 16},
        8_767_123_696,
        0,
        (68, 120),
    ),
}


@pytest.mark.parametrize("name", first_fast(PUBLISHED))
def test_a_published_configuration_is_a_model_of_its_size(tmp_path, name):
    config, processor, parameters, unread, patches = PUBLISHED[name]
    folder = tmp_path / name
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    # InternVL3's class ties by default, and its weights hold another head
    names = {"lm_head.weight": "model-00004-of-00004.safetensors"}
    index = {"weight_map": names} if name == "internvl3-8b" else {"weight_map": {}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "preprocessor_config.json").write_text(json.dumps(CLIP | processor))
    run = run_of(folder)
    assert sum(info.parameters for info in layer_table(run)) == parameters - unread
    head = describe(run).image
    assert head.grid(1920, 1080) == patches and head.mean[0] == CLIP["image_mean"][0]
