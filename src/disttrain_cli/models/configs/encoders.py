"""Checks of the encoders' configurations."""

from __future__ import annotations

import math
from typing import Any

from disttrain_cli.models.configs.checks import (
    check_dropout,
    check_widths,
    refuse_dropout,
    wrong,
    wrong_field,
)
from disttrain_cli.spec.runfile.model import ModuleSpec


def check_vit(name: str, spec: ModuleSpec, config: Any) -> None:
    """Raise SpecError for unsupported values of ViTConfig."""
    _check_tower(name, spec, config)
    refuse_dropout(name, "attention_probs_dropout_prob", config.attention_probs_dropout_prob)
    check_dropout(name, "hidden_dropout_prob", config.hidden_dropout_prob)


def check_clip_or_siglip(name: str, spec: ModuleSpec, config: Any) -> None:
    """Raise SpecError for unsupported values of CLIPVisionConfig and SiglipVisionConfig."""
    _check_tower(name, spec, config)
    refuse_dropout(name, "attention_dropout", config.attention_dropout)


def check_internvl_vision(name: str, spec: ModuleSpec, config: Any) -> None:
    """Raise SpecError for unsupported values of InternVLVisionConfig."""
    _check_tower(name, spec, config, pairs=True)
    for field in ("hidden_dropout_prob", "attention_dropout", "projection_dropout"):
        refuse_dropout(name, field, getattr(config, field))
    for field, allowed in (
        ("norm_type", ("layer_norm", "rms_norm")),
        ("use_mask_token", (False,)),
        ("use_absolute_position_embeddings", (True,)),
    ):
        if (given := getattr(config, field)) not in allowed:
            raise wrong(name, field, given, " or ".join(str(value).lower() for value in allowed))


def check_qwen_vision(name: str, spec: ModuleSpec, config: Any) -> None:
    """Raise SpecError for unsupported values of Qwen2_5_VLVisionConfig."""
    _check_merging(name, spec, config, "window_size")
    if config.window_size % (config.patch_size * config.spatial_merge_size):
        raise wrong(
            name,
            "window_size",
            config.window_size,
            "a multiple of patch_size × spatial_merge_size "
            f"({config.patch_size * config.spatial_merge_size})",
        )
    _check_numbers_of_blocks(name, config, "fullatt_block_indexes")


def check_qwen3_vision(name: str, spec: ModuleSpec, config: Any) -> None:
    """Raise SpecError for unsupported values of Qwen3VLVisionConfig."""
    _check_merging(name, spec, config, "num_position_embeddings")
    if math.isqrt(config.num_position_embeddings) ** 2 != config.num_position_embeddings:
        raise wrong(
            name,
            "num_position_embeddings",
            config.num_position_embeddings,
            "a square number: of the positions of a square image",
        )
    _check_numbers_of_blocks(name, config, "deepstack_visual_indexes")
    levels = list(config.deepstack_visual_indexes)
    if levels != sorted(set(levels)):
        raise wrong(name, "deepstack_visual_indexes", levels, "ascending, each number once")


def _check_merging(name: str, spec: ModuleSpec, config: Any, *counts: str) -> None:
    """Check a tower with 2D rotary positions that merges `spatial_merge_size`² patches itself.

    `merge` must be `spatial_merge_size` or unset (1).
    """
    check_widths(
        name,
        config,
        "hidden_size",
        "num_heads",
        "hidden_act",
        "depth",
        "intermediate_size",
        "out_hidden_size",
        "patch_size",
        "spatial_merge_size",
        "temporal_patch_size",
        *counts,
    )
    _refuse_feature_layer(name, spec)
    if spec.merge not in (1, config.spatial_merge_size):
        raise wrong_field(
            name,
            "merge",
            spec.merge,
            f"{config.spatial_merge_size}, the tower's own (spatial_merge_size), or nothing",
        )
    if config.hidden_size // config.num_heads % 4:
        raise wrong(
            name,
            "hidden_size",
            config.hidden_size,
            f"a multiple of 4 × num_heads ({config.num_heads}), "
            "for rotary positions by row and column",
        )
    if config.in_channels != 3:
        raise wrong(name, "in_channels", config.in_channels, "3: images are read as RGB")


def _check_numbers_of_blocks(name: str, config: Any, field: str) -> None:
    given = getattr(config, field)
    if not all(0 <= index < config.depth for index in given):
        raise wrong(name, field, given, f"numbers of blocks, 0 to {config.depth - 1}")


def check_whisper(name: str, spec: ModuleSpec, config: Any) -> None:
    """Raise SpecError for unsupported values of WhisperConfig, whose encoder is used."""
    check_widths(
        name,
        config,
        "d_model",
        "encoder_attention_heads",
        "activation_function",
        "encoder_layers",
        "encoder_ffn_dim",
        "num_mel_bins",
        "max_source_positions",
    )
    _refuse_feature_layer(name, spec)
    for field in ("attention_dropout", "encoder_layerdrop"):
        refuse_dropout(name, field, getattr(config, field))
    for field in ("dropout", "activation_dropout"):
        check_dropout(name, field, getattr(config, field))
    if config.d_model < 4 or config.d_model % 2:
        raise wrong(
            name, "d_model", config.d_model, "even and at least 4, for sinusoidal positions"
        )
    if config.max_source_positions % spec.merge:
        allowed = (
            f"a divisor of {config.max_source_positions}, the positions of a clip"
            " (max_source_positions)"
        )
        raise wrong_field(name, "merge", spec.merge, allowed)


def side_of(given: Any) -> int:
    """Return the side of a square that a configuration gives as one number or as two equal ones."""
    return int(given[0] if isinstance(given, (list, tuple)) else given)


def _check_tower(name: str, spec: ModuleSpec, config: Any, pairs: bool = False) -> None:
    """Check a transformer over square patches with learned positions.

    `pairs`: its class gives sizes as (height, width).
    """
    check_widths(
        name,
        config,
        "hidden_size",
        "num_attention_heads",
        "hidden_act",
        "num_hidden_layers",
        "intermediate_size",
    )
    for field in ("image_size", "patch_size"):
        given = getattr(config, field)
        sides = tuple(given) if pairs else (given,)
        if not all(isinstance(side, int) and side >= 1 for side in sides) or len(set(sides)) != 1:
            raise wrong(name, field, given, "one positive number (squares)")
    if side_of(config.image_size) < side_of(config.patch_size):
        raise wrong(
            name, "image_size", config.image_size, f"at least patch_size ({config.patch_size})"
        )
    if config.num_channels != 3:
        raise wrong(name, "num_channels", config.num_channels, "3: images are read as RGB")
    if spec.feature_layer is not None and -spec.feature_layer > config.num_hidden_layers:
        raise wrong_field(
            name, "feature_layer", spec.feature_layer, f"-1 to -{config.num_hidden_layers}"
        )


def _refuse_feature_layer(name: str, spec: ModuleSpec) -> None:
    if spec.feature_layer is not None:
        raise wrong_field(
            name, "feature_layer", spec.feature_layer, "nothing: this class gives its last layer"
        )
