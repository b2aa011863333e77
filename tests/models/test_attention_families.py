"""Stock models of transformers on packed samples against one sample at a time."""

from typing import Any

import pytest
import torch
from torch import Tensor

from disttrain_cli.errors import SpecError
from disttrain_cli.models.attention import Segments
from disttrain_cli.models.library_attention import packed
from disttrain_cli.models.masks import within

LENGTHS = [5, 1, 19, 8]
SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "attention_dropout": 0.0,
}
#: Multi-head latent attention: keys of width 12, values of 16 or 8.
LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "head_dim": 4,
}
LAYERS = ["full_attention", "sliding_attention", "sliding_attention"]
WINDOW: dict[str, Any] = {"head_dim": 8, "sliding_window": 4, "layer_types": LAYERS}
EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2}
VISION: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "image_size": 28,
    "patch_size": 14,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "gemma2": WINDOW | {"attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 8},
    "vaultgemma": WINDOW | {"attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 8},
    "gemma3_text": WINDOW | {"query_pre_attn_scalar": 8},
    "gemma4_text": WINDOW
    | {
        "num_hidden_layers": 5,
        "layer_types": [LAYERS[number] for number in (1, 0, 1, 1, 0)],
        "global_head_dim": 16,
        "num_global_key_value_heads": 1,
        "num_kv_shared_layers": 2,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 64,
    },
    "cohere2": WINDOW,
    "gpt_oss": WINDOW | EXPERTS | {"num_local_experts": 4},
    "mimo_v2_flash": WINDOW | EXPERTS | {"v_head_dim": 4, "n_routed_experts": 4},
    "phimoe": EXPERTS | {"sliding_window": 4, "num_local_experts": 4},
    "deepseek_v3": LATENT
    | EXPERTS
    | {
        "v_head_dim": 16,
        "n_routed_experts": 4,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
    },
    "minicpm3": LATENT | {"v_head_dim": 8},
    "youtu": LATENT | {"v_head_dim": 8},
    "llama4_text": EXPERTS
    | {
        "head_dim": 8,
        "intermediate_size_mlp": 48,
        "num_local_experts": 4,
        "attention_chunk_size": 4,
        "num_experts_per_tok": 1,
        "interleave_moe_layer_step": 1,
    },
}


def tiny(name: str, **sizes: Any) -> Any:
    from transformers import AutoModel
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    config = CONFIG_MAPPING[name](**sizes)
    torch.manual_seed(0)
    model = AutoModel.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.15)
    return model


def outputs(model: Any, ids: Tensor, **more: Tensor) -> Tensor:
    return model(
        input_ids=ids[None], use_cache=False, **{name: rows[None] for name, rows in more.items()}
    ).last_hidden_state[0]


def compare(model: Any, ids: Tensor, lengths: list[int], text: Any, **more: Tensor) -> None:
    """Outputs and gradients of all weights, packed and sample by sample."""
    each = [
        outputs(model, part, **{name: rows.split(lengths)[i] for name, rows in more.items()})
        for i, part in enumerate(ids.split(lengths))
    ]
    expected = torch.cat(each)
    seed = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1))
    weights = list(model.parameters())
    wanted = torch.autograd.grad((expected * seed).sum(), weights, allow_unused=True)
    packed(text)
    positions = torch.cat([torch.arange(length) for length in lengths])
    with within(Segments(lengths, ids.device)):
        made = outputs(model, ids, position_ids=positions, **more)
    torch.testing.assert_close(made, expected, rtol=1e-5, atol=1e-5)
    found = torch.autograd.grad((made * seed).sum(), weights, allow_unused=True)
    scale = max(float(one.abs().max()) for one in wanted if one is not None)
    for one, other in zip(found, wanted, strict=True):
        assert (one is None) == (other is None)
        if one is not None and other is not None:
            torch.testing.assert_close(one / scale, other / scale, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", FAMILIES)
def test_packed_samples_are_as_one_at_a_time(name: str) -> None:
    model = tiny(name, **SIZES | FAMILIES[name])
    ids = torch.randint(3, 64, (sum(LENGTHS),), generator=torch.Generator().manual_seed(0))
    compare(model, ids, LENGTHS, model.config)


@pytest.mark.parametrize(
    ("name", "kind", "vision", "kinds"),
    [
        ("gemma3", "gemma3_text", VISION, "token_type_ids"),
        ("gemma4", "gemma4_text", None, "mm_token_type_ids"),
        ("paligemma", "gemma2", VISION, "token_type_ids"),
    ],
)
def test_vision_tokens_and_prefixes_see_each_other(
    name: str, kind: str, vision: dict[str, Any] | None, kinds: str
) -> None:
    text = (
        SIZES | FAMILIES[kind] | {"use_bidirectional_attention": "vision" if not vision else None}
    )
    config = {"text_config": {"model_type": kind, **text}, "vision_config": vision}
    model = tiny(name, **config, **{} if vision else {"audio_config": None})
    lengths = [12, 1, 16]
    ids = torch.randint(3, 60, (sum(lengths),), generator=torch.Generator().manual_seed(0))
    if name != "paligemma":
        own = [0, 0, *[1] * 6, 0, 0, 0, 0, 1, 1, 1, 0, 0, 0, *[1] * 7, 0, 0, 0, 1]
    else:
        own = [*[0] * 6, *[1] * 6, 0, *[0] * 13, 1, 1, 1]
    compare(model, ids, lengths, model.config.get_text_config(), **{kinds: torch.tensor(own)})


def test_what_attention_does_not_compute_is_refused() -> None:
    model = tiny("olmo2", **SIZES | {"attention_dropout": 0.5}).train()
    packed(model.config)
    ids = torch.arange(3, 9)
    with within(Segments([6], ids.device)), pytest.raises(SpecError, match="dropout"):
        outputs(model, ids)
