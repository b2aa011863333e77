"""Tiny random models of every decoder family of transformers, and their documents."""

import inspect

import torch

LENGTHS = [5, 1, 9, 3]
VOCABULARY = 100

#: Fields of a tiny configuration, for those that a family has.
TINY = dict(
    hidden_size=64, intermediate_size=96, num_hidden_layers=4, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16, vocab_size=VOCABULARY, moe_intermediate_size=32,
    num_experts=4, num_local_experts=4, n_routed_experts=4, num_experts_per_tok=2,
    num_experts_per_token=2, n_group=1, topk_group=1, n_shared_experts=1,
    shared_expert_intermediate_size=32, max_position_embeddings=128, sliding_window=4,
    q_lora_rank=24, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=16,
    first_k_dense_replace=1, linear_num_key_heads=2, linear_num_value_heads=4,
    linear_key_head_dim=16, linear_value_head_dim=16, ffn_hidden_size=96, n_embd=64, n_layer=4,
    n_head=4, ffn_dim=96, word_embed_proj_dim=64, decoder_layers=4,
)  # fmt: skip
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
#: Fields that the general ones do not fit.
OF_FAMILY = {
    "dots1": {"n_routed_experts": 4},
    "cohere_compass_text": {
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "rope_parameters": {
            name: {"rope_type": "default", "rope_theta": 1e4}
            for name in ("sliding_attention", "full_attention")
        },
    },
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
    return fields | dropout | TOKENS | OF_FAMILY.get(name, {})


def reference(model, ids, labels):
    """Return the loss and the gradients of a model that sees one document at a time."""
    total = torch.zeros(())
    for part, wanted in zip(ids.split(LENGTHS), labels.split(LENGTHS), strict=True):
        logits = model(input_ids=part[None], use_cache=False).logits[0].float()
        total = total + torch.nn.functional.cross_entropy(logits, wanted, reduction="sum")
    total.backward()
    return total.detach()


FAMILIES = [
    "llama",
    "gemma2",
    "cohere",
    "qwen3_moe",
    "phi3",
    "olmo2",
    "deepseek_v3",
    "laguna",
    "apertus",
    "gpt_neox",
    "granite",
    "minimax_m2",
    "youtu",
    "beam",
]
REFUSED = {"hrm_text": "no layers", "gpt2": "no embed_tokens"}
