"""Checks of the decoders' configurations."""

from __future__ import annotations

from typing import Any, NamedTuple

from disttrain_cli.models.configs.checks import check_widths, refuse_dropout, wrong
from disttrain_cli.spec.inputs import Positions
from disttrain_cli.spec.runfile.model import ModuleSpec


class Family(NamedTuple):
    """Location of a decoder family's classes in transformers."""

    file: str  # module in `transformers.models`
    prefix: str  # prefix of its layers' class names
    config: str
    published: str  # class with embedding and head
    mrope: bool = False


#: Decoder families by `model_type`. The LLM of a whole vision-language model is published as the
#: text-only LLM of its family: for text tokens all three M-RoPE positions are equal.
FAMILIES = {
    "llama": Family("llama", "Llama", "LlamaConfig", "LlamaForCausalLM"),
    "mistral": Family("mistral", "Mistral", "MistralConfig", "MistralForCausalLM"),
    "qwen2": Family("qwen2", "Qwen2", "Qwen2Config", "Qwen2ForCausalLM"),
    "qwen3": Family("qwen3", "Qwen3", "Qwen3Config", "Qwen3ForCausalLM"),
    "qwen2_5_vl_text": Family(
        "qwen2_5_vl", "Qwen2_5_VL", "Qwen2_5_VLTextConfig", "Qwen2ForCausalLM", mrope=True
    ),
    "qwen3_vl_text": Family(
        "qwen3_vl", "Qwen3VLText", "Qwen3VLTextConfig", "Qwen3ForCausalLM", mrope=True
    ),
}

#: Attention types of a decoder's blocks (`layer_types`).
FULL, SLIDING = "full_attention", "sliding_attention"

# RoPE types whose frequencies depend on the longest sample of a batch, hence on the layout. For
# "dynamic" this holds only in samples longer than `max_position_embeddings`.
_BY_LONGEST = ("longrope",)
DYNAMIC = "dynamic"


def head_width(config: Any) -> int:
    """Return the width of an attention head: `head_dim`, or the hidden size over the heads."""
    given = getattr(config, "head_dim", None)
    return int(given or config.hidden_size // config.num_attention_heads)


def windows_of(config: Any, longest: int) -> list[int]:
    """Return each block's attention window in tokens, for samples of at most `longest`.

    Empty if no block has a window that limits attention.
    """
    window = min(getattr(config, "sliding_window", None) or longest, longest)
    blocks = config.num_hidden_layers
    same = {"llama": FULL, "mistral": SLIDING, "qwen3_vl_text": FULL}.get(config.model_type)
    types = config.layer_types if same is None else [same] * blocks
    windows = [window if kind == SLIDING else longest for kind in types]
    return windows if min(windows) < longest else []


def positions_of(config: Any) -> Positions:
    """Return the kind of a decoder's position ids."""
    family = FAMILIES.get(config.model_type)
    return "mrope" if family and family.mrope else "1d"


def check_decoder(name: str, spec: ModuleSpec, config: Any) -> None:
    """Raise SpecError unless the configuration of a decoder family is supported."""
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
    if positions_of(config) == "mrope":
        _check_sections(name, config)
    if config.model_type in ("llama", "qwen3_vl_text"):
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


def check_length(name: str, config: Any, longest: int) -> None:
    """Raise SpecError if rotary positions would depend on the longest sample of a batch."""
    most = config.max_position_embeddings
    if config.rope_parameters["rope_type"] == DYNAMIC and longest > most:
        raise wrong(
            name,
            "rope_parameters.rope_type",
            DYNAMIC,
            f"it with a data.sequence_length of at most {most} (max_position_embeddings), not"
            f" {longest}; in longer samples it would depend on the layout",
        )


def _check_sections(name: str, config: Any) -> None:
    """Raise SpecError unless M-RoPE's sections (time, rows, columns) sum to half a head."""
    sections, half = config.rope_parameters.get("mrope_section"), head_width(config) // 2
    if sections is None and half == 64:
        return  # the classes' defaults
    given = isinstance(sections, (list, tuple)) and [isinstance(one, int) for one in sections]
    if given != [True] * 3 or min(sections) < 0 or sum(sections) != half:
        raise wrong(
            name,
            "rope_parameters.mrope_section",
            sections,
            f"three numbers that make half the head width together ({half})",
        )
