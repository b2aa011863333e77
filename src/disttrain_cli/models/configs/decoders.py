"""Checks of the decoders' configurations."""

from __future__ import annotations

from typing import Any

from disttrain_cli.models.configs.checks import check_widths, refuse_dropout, wrong
from disttrain_cli.spec.runfile.model import ModuleSpec

#: How transformers' file of each family calls its classes.
FAMILIES = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}

#: Kinds of attention that the blocks of a decoder may have (`layer_types`).
FULL, SLIDING = "full_attention", "sliding_attention"

# Rotary positions whose frequencies follow the longest sample of a batch: they would depend on the
# layout.
_BY_LONGEST = ("dynamic", "longrope")


def head_width(config: Any) -> int:
    """Values of one attention head: of its own field where the class has it, else the width over
    the heads."""
    given = getattr(config, "head_dim", None)
    return int(given or config.hidden_size // config.num_attention_heads)


def windows_of(config: Any, longest: int) -> list[int]:
    """Tokens that each block sees back in samples of at most `longest`; empty where all see
    everything."""
    window = min(getattr(config, "sliding_window", None) or longest, longest)
    blocks = config.num_hidden_layers
    same = {"llama": FULL, "mistral": SLIDING}.get(config.model_type)
    types = config.layer_types if same is None else [same] * blocks
    windows = [window if kind == SLIDING else longest for kind in types]
    return windows if min(windows) < longest else []


def check_decoder(name: str, spec: ModuleSpec, config: Any) -> None:
    """LlamaConfig, MistralConfig, Qwen2Config and Qwen3Config."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    own_head_width = getattr(config, "head_dim", None) is not None
    check_widths(
        name,
        config,
        "hidden_size",
        "num_attention_heads",
        "hidden_act",
        "num_hidden_layers",
        "intermediate_size",
        "num_key_value_heads",
        "vocab_size",
        *["head_dim"] * own_head_width,
        heads_divide_width=not own_head_width,
    )
    refuse_dropout(name, "attention_dropout", config.attention_dropout)
    rope = config.rope_parameters["rope_type"]
    fixed = ("default", *(kind for kind in ROPE_INIT_FUNCTIONS if kind not in _BY_LONGEST))
    if rope not in fixed:
        why = "; it follows the longest sample of a batch, so it would depend on the layout"
        raise wrong(
            name,
            "rope_parameters.rope_type",
            rope,
            ", ".join(fixed) + (why if rope in _BY_LONGEST else ""),
        )
    if config.num_attention_heads % config.num_key_value_heads:
        raise wrong(
            name,
            "num_key_value_heads",
            config.num_key_value_heads,
            f"a divisor of num_attention_heads ({config.num_attention_heads})",
        )
    if head_width(config) < 2 or head_width(config) % 2:
        raise wrong(name, "head_dim", head_width(config), "even, for rotary positions")
    if config.model_type == "llama":
        return
    types = config.layer_types if config.model_type != "mistral" else []
    if not set(types) <= {FULL, SLIDING}:
        raise wrong(name, "layer_types", types, f"{FULL} and {SLIDING}")
    window = config.sliding_window
    if window is not None and window < 1:
        raise wrong(name, "sliding_window", window, "1 or more, or nothing")
    if window is None and SLIDING in types:
        raise wrong(
            name, "sliding_window", None, f"a number of tokens: layer_types holds {SLIDING}"
        )
