"""Tiny random models of every decoder family of transformers, and their documents."""

import copy
import inspect

import torch

from disttrain_cli.models.configs.decoders import published_class_of

LENGTHS = [5, 1, 9, 3]
VOCABULARY = 100

#: Fields of a tiny configuration, for those that a family has.
# fmt: off
TINY = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": VOCABULARY,
    "moe_intermediate_size": 32, "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4,
    "num_experts_per_tok": 2, "num_experts_per_token": 2, "n_group": 1, "topk_group": 1,
    "n_shared_experts": 1, "shared_expert_intermediate_size": 32, "max_position_embeddings": 128,
    "sliding_window": 4, "q_lora_rank": 24, "kv_lora_rank": 16, "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8, "v_head_dim": 16, "first_k_dense_replace": 1,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
    "linear_value_head_dim": 16, "linear_num_heads": 2, "linear_head_dim": 16,
    "ffn_hidden_size": 96, "n_embd": 64, "n_layer": 4, "n_head": 4,
    "ffn_dim": 96, "word_embed_proj_dim": 64, "decoder_layers": 4,
}
# fmt: on
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
MROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}}
#: Fields that the general ones do not fit.
OF_FAMILY = {
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "deepseek_v2": {
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
    },
    "ministral": {"head_dim": 16},
    "nemotron": {"num_key_value_heads": 2},
    "qwen2_5_vl_text": MROPE,
    "qwen3_vl_text": MROPE,
    "glm4v_text": MROPE,
    "cohere_compass_text": {
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "rope_parameters": {
            name: {"rope_type": "default", "rope_theta": 1e4}
            for name in ("sliding_attention", "full_attention")
        },
    },
    "falcon_h1": {
        "embedding_multiplier": 3.0,
        "lm_head_multiplier": 2.0,
        "mamba_d_ssm": 64,
        "mamba_n_heads": 4,
        "mamba_d_head": 16,
        "mamba_d_state": 8,
        "mamba_chunk_size": 16,
    },
    "nemotron_h": {
        "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"],
        "moe_shared_expert_intermediate_size": 32,
        "ssm_state_size": 8,
        "mamba_num_heads": 4,
        "mamba_head_dim": 16,
        "n_groups": 2,
        "chunk_size": 16,
    },
    "llama4_text": {"floor_scale": 3, "attn_scale": 0.5, "no_rope_layers": [1, 0, 1, 0]},
    "gemma4_text": {
        "num_kv_shared_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": VOCABULARY,
    },
}


def given(config, field):
    try:
        return getattr(config, field)
    except (AttributeError, RuntimeError):  # differs by layer, or missing
        return None


def fields_of(name):
    """Return a family's tiny configuration as the fields of a run file or config.json."""
    from transformers import CONFIG_MAPPING

    usual = CONFIG_MAPPING[name]()
    known = {*inspect.get_annotations(type(usual)), *type(usual).attribute_map}
    fields = {k: v for k, v in TINY.items() if k in known and given(usual, k) is not None}
    dropout = {
        k: 0.0
        for k in usual.to_dict()
        if ("dropout" in k or k.endswith("pdrop") or k == "layerdrop")
        and isinstance(getattr(usual, k), float)
    }
    if "kv_lora_rank" in fields:  # every head has keys and values of its own
        fields |= {"num_key_value_heads": 4}
        fields.pop("head_dim", None)
    tokens = {field: token for field, token in TOKENS.items() if field in known}
    return fields | dropout | tokens | OF_FAMILY.get(name, {})


def library_model(config, layers):
    """Return the library's own model with the weights of pipeline layers, and its head.

    The head is None unless it is that of a class that has none.
    """
    plain = copy.deepcopy(config)
    plain._attn_implementation, plain.tie_word_embeddings = "eager", False
    model = published_class_of(type(config))(plain).eval()
    weights = {
        path: tensor.detach()
        for layer in layers
        for path, tensor in layer.to_published(dict(layer.named_parameters())).items()
    }
    head = None
    if model.get_output_embeddings() is None:  # the LLM of a whole model
        weights = {path.removeprefix("model."): tensor for path, tensor in weights.items()}
        weight = weights.pop("lm_head.weight")
        head = torch.nn.Linear(*weight.shape[::-1], bias=False)
        head.weight = torch.nn.Parameter(weight)
    assert not model.load_state_dict(weights, strict=False).unexpected_keys
    return model, head


def reference(model, ids, labels, lengths, head=None):
    """Return the loss of a model that sees one document at a time, after its backward.

    `head` is that of a class that has none.
    """
    total = torch.zeros(())
    for part, wanted in zip(ids.split(lengths), labels.split(lengths), strict=True):
        made = model(input_ids=part[None], use_cache=False)
        logits = head(made.last_hidden_state)[0] if "logits" not in made else made.logits[0]
        total = total + torch.nn.functional.cross_entropy(logits.float(), wanted, reduction="sum")
    total.backward()
    return total.detach()


#: Families that run; those of the library's pipeline plans, and those of `configs.decoders`.
# fmt: off
FAMILIES = [
    "afmoe", "apertus", "arcee", "aria_text", "axk1", "bailing_hybrid", "beam", "cohere",
    "cohere2", "cohere2_moe", "cohere_compass_text", "cwm", "deepseek_v2", "deepseek_v3",
    "dots1", "ernie4_5", "ernie4_5_moe", "exaone4", "exaone_moe", "falcon_h1", "flex_olmo",
    "flint", "gemma", "gemma2", "gemma3_text", "gemma4_text", "gemma4_unified_text", "glm",
    "glm4", "glm4_moe", "glm4_moe_lite", "glm4v_text", "gpt_neox", "gpt_oss", "granite",
    "granite_swa", "granitemoe", "helium", "hy_v3", "hyperclovax", "internlm3", "iquestcoder",
    "jais2", "kimi_linear", "kolibri1", "laguna", "lfm2", "llama", "llama4_text", "mellum",
    "mimo_v2_flash", "minicpm3", "minimax", "minimax_m2", "ministral",
    "ministral3", "mistral", "mixtral", "muse_glimmer_text", "muse_spark_text", "nemotron",
    "nemotron_h", "olmo", "olmo2", "olmo3", "olmo_hybrid", "olmoe", "persimmon", "phi", "phi3",
    "phi4_multimodal", "qwen2", "qwen2_5_vl_text", "qwen2_moe", "qwen3", "qwen3_5_moe_text",
    "qwen3_5_text", "qwen3_moe", "qwen3_next", "qwen3_vl_text", "seed_oss", "smollm3",
    "solar_open", "stablelm", "starcoder2", "vaultgemma", "youtu",
]
# fmt: on
#: Those that do not, with a word of the reason.
REFUSED = {
    "axk2": "computes with its attention mask",
    "deepseek_v32": "computes with its attention mask",
    "deepseek_v4": "its classes fail",
    "doge": "computes with its attention mask",
    "dots3_note_text": "computes with its attention mask",
    "gemma3n_text": "its classes fail",
    "glm_moe_dsa": "computes with its attention mask",
    "gpt2": "no pipeline plan",
    "hrm_text": "no layers",
    "hy_v4": "its classes fail",
    "inkling_text": "numbers the rows of a batch",
    "longcat_flash": "its classes fail",
    "minimax_m3_vl_text": "numbers the rows of a batch",
    "nanochat": "no pipeline plan",
}
