"""Tiny configurations of any family of the installed transformers."""

from typing import Any

from transformers import CONFIG_MAPPING

TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
#: Sizes by field, for every configuration that has the field as a number.
SIZES = TOKENS | {
    "vocab_size": 99,
    "hidden_size": 64,
    "n_embd": 64,
    "embed_dim": 64,
    "word_embed_proj_dim": 64,
    "out_hidden_size": 64,
    "vision_hidden_size": 64,
    "mm_hidden_size": 64,
    "projection_dim": 32,
    "intermediate_size": 96,
    "ffn_dim": 96,
    "ffn_hidden_size": 96,
    "moe_intermediate_size": 48,
    "shared_expert_intermediate_size": 32,
    "num_hidden_layers": 4,
    "n_layer": 4,
    "decoder_layers": 4,
    "encoder_layers": 2,
    "num_layers": 2,
    "depth": 2,
    "num_attention_heads": 4,
    "num_heads": 4,
    "n_head": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "num_experts_per_token": 2,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "max_position_embeddings": 128,
    "sliding_window": 4,
    "image_size": 32,
    "patch_size": 8,
}
_PER_LAYER_INPUT = {"vocab_size_per_layer_input": 99, "hidden_size_per_layer_input": 8}
_TWO_WIDTHS = {
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "per_layer_config": {"3": {"head_dim": 32}},
}
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_IMAGE_VOCABULARY = {"vocabulary_map": {"<image>": 3}}
#: Fields that a family needs in addition, by `model_type`.
MORE: dict[str, dict[str, Any]] = {
    "chameleon": _IMAGE_VOCABULARY,
    "cohere_compass_text": {"rope_parameters": {"full_attention": _ROPE}},
    "deepseek_ocr2_text": {
        "num_experts_per_tok": 2,
        "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
    },
    "diffusion_gemma_text": _TWO_WIDTHS
    | {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32},
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "dots3_note_text": {
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "layer_types": ["indexed_attention", "indexed_attention", "sliding_attention"],
        "num_hidden_layers": 3,
        "per_layer_config": {"2": {"num_attention_heads": 2, "num_key_value_heads": 2}},
        "head_dim": 16,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "index_n_heads": 2,
        "index_head_dim": 16,
        "shared_experts_intermediate_size": 32,
    },
    "dots3_note_audio_encoder": {"adapter_input_size": 64, "adapter_out_dim": 64},
    "dots3_note_vision_encoder": {"adapter_in_dim": 64, "adapter_out_dim": 64},
    "emu3": _IMAGE_VOCABULARY,
    "emu3_vqgan": {"codebook_size": 32, "base_channels": 32, "hidden_size": 32},
    "ernie4_5_vl_moe_text": {
        "moe_num_experts": 4,
        "moe_intermediate_size": [32, 32],
        "moe_k": 2,
        "rope_parameters": _ROPE | {"mrope_section": [3, 3, 2]},
    },
    "florence_vision": {
        "depths": [1, 1],
        "patch_size": [7, 3],
        "patch_stride": [4, 2],
        "patch_padding": [3, 1],
        "patch_prenorm": [False, True],
        "embed_dim": [32, 64],
        "num_heads": [2, 4],
        "num_groups": [2, 4],
        "projection_dim": 64,
    },
    "gemma3n_text": _PER_LAYER_INPUT
    | {
        "intermediate_size": 96,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 2,
        "activation_sparsity_pattern": [0.0] * 4,
        "laurel_rank": 4,
    },
    "gemma4_text": _PER_LAYER_INPUT | _TWO_WIDTHS,
    "glm5_next_text": {"num_key_value_heads": 4, "qk_rope_head_dim": 0},
    "granite4_vision": {
        "deepstack_layer_map": [[-1, 0]],
        "spatial_target_layers": [1],
        "downsample_rate": "1/2",
    },
    "hunyuan_vl_text": {"head_dim": 16},
    "inkling2_vision": {"text_hidden_size": 64},
    "janus_vqgan": {"num_embeddings": 32, "base_channels": 32, "latent_channels": 32},
    "ministral": {"head_dim": 16},
    "molmo2_adapter": {"vision_feature_layer": [3, 2], "text_hidden_size": 64},
    "muse_spark": {"projector_hidden_size": 64},
    "muse_spark_audio": {"hidden_sizes": [16, 16, 32, 32]},
    "muse_spark_text": {"moe_hidden_size": 64},
    "qwen4_exp_text": {
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 64,
        "indexer_budget": 8,
        "indexer_compress_ratio": 2,
        "ple_layer_ids": [1],
        "ple_embed_dim": 16,
        "ngram_size": 2,
        "heads_per_ngram": 2,
        "ngram_vocab_size_base": 64,
        "make_ngram_vocab_size_divisible_by": 8,
        "split_ngram_parts": 4,
    },
    "radio": {"video_temporal_patch_size": 2},
}
#: Fields that some classes tie to others; left at their defaults, in this order, where the class
#: refuses the sizes above.
_LEFT_OUT = (
    "head_dim",
    "num_hidden_layers",
    "num_layers",
    "depth",
    "hidden_size",
    "out_hidden_size",
    "num_heads",
    "embed_dim",
    "image_size",
    "patch_size",
)


def tiny(model_type: str) -> Any:
    """A small configuration of a family."""
    return _small(CONFIG_MAPPING[model_type])


def _small(kind: type) -> Any:
    default: Any = kind()
    fields = {name: size for name, size in SIZES.items() if name in TOKENS or _sized(default, name)}
    for name in getattr(kind, "sub_configs", None) or {}:
        if (part := getattr(default, name, None)) is not None:
            fields[name] = _small(type(part)).to_dict()
    fields |= MORE.get(default.model_type, {})
    for left_out in _LEFT_OUT:
        try:
            return kind(**fields)
        except Exception:
            fields.pop(left_out, None)
    return kind(**fields)


def _sized(default: Any, name: str) -> bool:
    try:
        value = getattr(default, name, None)
    except Exception:  # a property that raises, or a field with a value per layer
        return False
    return isinstance(value, int) and not isinstance(value, bool)
