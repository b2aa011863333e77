"""Checks of the decoders' configurations."""

from __future__ import annotations

import re
from importlib import import_module
from typing import Any, NamedTuple

from disttrain_cli.models.configs.checks import refuse_dropout, wrong
from disttrain_cli.spec.inputs import Positions
from disttrain_cli.spec.runfile.model import ModuleSpec


class Family(NamedTuple):
    """Facts about a decoder family that transformers' plans do not state."""

    published: str | None = None  # class with embedding and head, if not the library's own mapping
    mrope: bool = False
    # names of the embedding and the final norm, if there is no pipeline plan
    embedding: str = "embed_tokens"
    norm: str = "norm"
    # types of layers in which the vision tokens of an image see each other
    sees_vision: tuple[str, ...] = ()


#: By `model_type`. The LLM of a whole vision-language model is published as the text-only LLM of
#: its family: for text tokens all three M-RoPE positions are equal.
FAMILIES = {
    "qwen2_5_vl_text": Family("transformers:Qwen2ForCausalLM", mrope=True),
    "qwen3_vl_text": Family("transformers:Qwen3ForCausalLM", mrope=True),
    "gemma3_text": Family(sees_vision=("full_attention", "sliding_attention")),
    "gemma4_text": Family(sees_vision=("sliding_attention",)),
    "gemma4_unified_text": Family(sees_vision=("full_attention", "sliding_attention")),
    "llama4_text": Family(),
    "step3p5": Family(),
    "olmoe": Family(),
    "granitemoe": Family(),
    "stablelm": Family(),
    "nemotron": Family(),
    "lfm2": Family(norm="embedding_norm"),
    "lfm3": Family(norm="embedding_norm"),
    "falcon_h1": Family(norm="final_layernorm"),
    "persimmon": Family(norm="final_layernorm"),
    "nemotron_h": Family(embedding="embeddings", norm="norm_f"),
}


def parts_of(config: Any) -> tuple[str, str, str] | None:
    """Return a base model's names of embedding, layers and final norm; None if they are unknown."""
    plan = list(getattr(config, "base_model_pp_plan", None) or ())
    if plan:
        return plan[0], "layers", plan[-1]
    family = FAMILIES.get(config.model_type)
    return None if family is None else (family.embedding, "layers", family.norm)


def sees_vision(config: Any) -> list[bool]:
    """Return in which layers the vision tokens of an image see each other, before and after."""
    family, count = FAMILIES.get(config.model_type), int(config.num_hidden_layers)
    how = getattr(config, "use_bidirectional_attention", None)
    if family is None or not family.sees_vision or how not in (True, False, None, "vision"):
        return [False] * count
    if config.model_type.startswith("gemma4") and how != "vision":
        return [False] * count
    return [kind in family.sees_vision for kind in config.layer_types]


def plan_of(config: Any) -> dict[str, str] | None:
    """Return the TP plan of the family as which a decoder is published, if not its own."""
    import transformers

    family = FAMILIES.get(config.model_type)
    if family is None or family.published is None:
        return None
    plan: dict[str, str] = getattr(
        transformers, family.published.partition(":")[2]
    ).config_class.base_model_tp_plan
    return plan


def published_class_of(config_class: type) -> Any:
    """Return the class of a decoder with its head, or its base model if there is no other.

    Base models inside whole models alone are found next to them.
    """
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_MAPPING, PreTrainedModel

    for mapping in (MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_MAPPING):
        if config_class in mapping:
            return mapping[config_class]
    module = import_module(config_class.__module__.replace(".configuration_", ".modeling_"))
    for made in vars(module).values():
        own = isinstance(made, type) and issubclass(made, PreTrainedModel)
        if own and "forward" in vars(made) and made.config_class is config_class:
            return made
    raise KeyError(config_class)


# RoPE types whose frequencies depend on the longest sample of a batch, hence on the layout. For
# "dynamic" this holds only in samples longer than `max_position_embeddings`.
_BY_LONGEST = ("longrope",)
DYNAMIC = "dynamic"
#: Attention with a window, in `layer_types`.
SLIDING = "sliding_attention"
#: Fields that count something.
_COUNTS = (
    "hidden_size",
    "num_attention_heads",
    "num_hidden_layers",
    "intermediate_size",
    "num_key_value_heads",
    "vocab_size",
    "head_dim",
)
#: Fields with which the library adds a loss to the text's that is not trained here, and why not.
_UNTRAINED_LOSSES = {
    "output_router_logits": "false: auxiliary losses of routers are not trained",
    "z_loss_coefficient": "0: the loss on the logits' size is not trained",
}
#: Fields of dropout probabilities.
_DROPOUT = re.compile("^(?!classifier).*(dropout|pdrop|layerdrop)")


def head_width(config: Any) -> int:
    """Return the width of an attention head: `head_dim`, or the hidden size over the heads."""
    given = number_of(config, "head_dim")
    return int(given or config.hidden_size // config.num_attention_heads)


def positions_of(config: Any) -> Positions:
    """Return the kind of a decoder's position ids."""
    family, rope = FAMILIES.get(config.model_type), getattr(config, "rope_parameters", None) or {}
    return "mrope" if (family and family.mrope) or rope.get("mrope_section") else "1d"


def check_decoder(name: str, spec: ModuleSpec, config: Any) -> None:
    """Raise SpecError unless the configuration of a decoder is supported.

    Sizes that only its classes can judge are tried by `library_decoder`.
    """
    from transformers.activations import ACT2FN
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    heads, groups = (number_of(config, f"num_{one}_heads") for one in ("attention", "key_value"))
    for field in _COUNTS:
        if (value := number_of(config, field)) is not None and value < 1:
            raise wrong(name, field, value, "1 or more")
    activation = getattr(config, "hidden_act", None)
    if isinstance(activation, str) and activation not in ACT2FN:
        raise wrong(name, "hidden_act", activation, ", ".join(sorted(ACT2FN)))
    own_head_width = number_of(config, "head_dim")
    if own_head_width is None and heads and config.hidden_size % heads:
        raise wrong(
            name, "hidden_size", config.hidden_size, f"a multiple of num_attention_heads ({heads})"
        )
    for field in (one for one in vars(config) if _DROPOUT.search(one)):
        if isinstance(value := getattr(config, field), (int, float)):
            refuse_dropout(name, field, value)
    fixed = ("default", *(kind for kind in ROPE_INIT_FUNCTIONS if kind not in _BY_LONGEST))
    for rope in rope_types(config):
        if rope not in fixed:
            why = "; it follows the longest sample of a batch, so it would depend on the layout"
            raise wrong(
                name,
                "rope_parameters.rope_type",
                rope,
                ", ".join(fixed) + (why if rope in _BY_LONGEST else ""),
            )
    if heads and groups and heads % groups:
        raise wrong(
            name,
            "num_key_value_heads",
            groups,
            f"a divisor of num_attention_heads ({heads})",
        )
    if own_head_width is not None and (own_head_width < 2 or own_head_width % 2):
        raise wrong(name, "head_dim", own_head_width, "even, for rotary positions")
    for field, allowed in _UNTRAINED_LOSSES.items():
        if value := getattr(config, field, None):
            raise wrong(name, field, value, allowed)
    if positions_of(config) == "mrope":
        _check_sections(name, config)
    window, types = number_of(config, "sliding_window"), getattr(config, "layer_types", None)
    unused = getattr(config, "use_sliding_window", True) is False
    if window is not None and window < 1 and not unused:
        raise wrong(name, "sliding_window", window, "1 or more, or nothing")
    if window is None and SLIDING in (types or ()):
        raise wrong(
            name, "sliding_window", None, f"a number of tokens: layer_types holds {SLIDING}"
        )


def number_of(config: Any, field: str) -> int | None:
    """Return a field that is one whole number for all layers; None if it is not."""
    try:
        value = getattr(config, field, None)
    except (AttributeError, RuntimeError):  # a field of single layers
        return None
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def rope_types(config: Any) -> list[str]:
    """Return the kinds of a decoder's rotary positions, of each type of its layers."""
    rope = getattr(config, "rope_parameters", None) or {}
    of_types = [one for one in rope.values() if isinstance(one, dict)] or [rope]
    return [str(one.get("rope_type", "default")) for one in of_types]


def check_length(name: str, config: Any, longest: int) -> None:
    """Raise SpecError if rotary positions would depend on the longest sample of a batch."""
    most = config.max_position_embeddings
    if DYNAMIC in rope_types(config) and longest > most:
        raise wrong(
            name,
            "rope_parameters.rope_type",
            DYNAMIC,
            f"it with a data.sequence_length of at most {most} (max_position_embeddings), not"
            f" {longest}; in longer samples it would depend on the layout",
        )


def _check_sections(name: str, config: Any) -> None:
    """Raise SpecError unless M-RoPE's sections (time, rows, columns) sum to half a head.

    Of a head with partly rotary features half of those.
    """
    sections = config.rope_parameters.get("mrope_section")
    partly = getattr(config, "partial_rotary_factor", None)
    share = config.rope_parameters.get("partial_rotary_factor", partly)
    half = int(head_width(config) * (1.0 if share is None else share)) // 2
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
