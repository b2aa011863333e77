"""Checks of the transformer generators: diffusers' PixArt, SD3, Flux, Lumina 2, Qwen-Image."""

from __future__ import annotations

from typing import Any

from disttrain_cli.errors import SpecError
from disttrain_cli.models.configs.checks import wrong

#: Latents per side of Flux's patches, which are folded into its channels.
FLUX_PATCH = 2


def check_pixart(name: str, config: dict[str, Any], image_size: int, side: int) -> None:
    for field, allowed in {
        "norm_type": ("ada_norm_single",),
        "attention_type": ("default",),
        "activation_fn": ("gelu", "gelu-approximate", "geglu"),
    }.items():
        if config[field] not in allowed:
            raise wrong(name, field, config[field], ", ".join(allowed))
    # sinusoids of two axes; a third of the width for each additional size condition
    width = _check_transformer(
        name, config, image_size, side, multiple=12 if config["use_additional_conditions"] else 4
    )
    if config["cross_attention_dim"] is None:
        raise wrong(
            name, "cross_attention_dim", None, "a number: images are conditioned by cross-attention"
        )
    if config["caption_channels"] is not None and config["cross_attention_dim"] != width:
        raise wrong(
            name,
            "cross_attention_dim",
            config["cross_attention_dim"],
            f"{width}, the width to which caption_channels are projected",
        )


def check_sd3(name: str, config: dict[str, Any], image_size: int, side: int) -> None:
    width = _check_transformer(name, config, image_size, side, multiple=4)  # sinusoids of two axes
    for field in ("joint_attention_dim", "pooled_projection_dim", "pos_embed_max_size"):
        _check_positive(name, config, field)
    if config["qk_norm"] not in (None, "rms_norm", "layer_norm"):
        raise wrong(name, "qk_norm", config["qk_norm"], "rms_norm, layer_norm, or nothing")
    if config["caption_projection_dim"] != width:
        raise wrong(
            name,
            "caption_projection_dim",
            config["caption_projection_dim"],
            f"{width}, num_attention_heads times attention_head_dim: both streams have one width",
        )
    if (patches := side // config["patch_size"]) > config["pos_embed_max_size"]:
        raise wrong(
            name,
            "pos_embed_max_size",
            config["pos_embed_max_size"],
            f"{patches} or more, the patches per side of image_size {image_size}",
        )
    dual, blocks = config["dual_attention_layers"], range(config["num_layers"])
    if not isinstance(dual, (list, tuple)) or any(number not in blocks for number in dual):
        raise wrong(name, "dual_attention_layers", dual, f"a list of blocks below {len(blocks)}")


def check_flux(name: str, config: dict[str, Any], image_size: int, side: int) -> None:
    _check_transformer(name, config, image_size, side, multiple=2)
    for field in ("joint_attention_dim", "pooled_projection_dim", "num_single_layers"):
        _check_positive(name, config, field)
    if config["patch_size"] != 1:
        raise wrong(name, "patch_size", config["patch_size"], "1: its patches are its channels")
    check_side(name, image_size, side, FLUX_PATCH)
    head = config["attention_head_dim"]
    _check_axes(name, config, "axes_dims_rope", head, "attention_head_dim")


def check_qwen_image(name: str, config: dict[str, Any], image_size: int, side: int) -> None:
    _check_transformer(name, config, image_size, side, multiple=2)
    _check_positive(name, config, "joint_attention_dim")
    for field in ("guidance_embeds", "zero_cond_t", "use_additional_t_cond", "use_layer3d_rope"):
        if config[field]:
            raise wrong(name, field, config[field], "false: no picture to edit is given")
    head = config["attention_head_dim"]
    _check_axes(name, config, "axes_dims_rope", head, "attention_head_dim")


def check_lumina2(name: str, config: dict[str, Any], image_size: int, side: int) -> None:
    """Raise SpecError for values that diffusers builds silently and cannot compute."""
    for field in ("hidden_size", "num_layers", "multiple_of", "cap_feat_dim"):
        _check_positive(name, config, field)
    if not isinstance(config["num_refiner_layers"], int) or config["num_refiner_layers"] < 0:
        raise wrong(name, "num_refiner_layers", config["num_refiner_layers"], "0 or more")
    _check_positive(name, config, "num_attention_heads")
    heads, width = config["num_attention_heads"], config["hidden_size"]
    groups = heads if config["num_kv_heads"] is None else config["num_kv_heads"]
    if not isinstance(groups, int) or groups < 1 or heads % groups:
        allowed = f"a divisor of num_attention_heads ({heads}), or nothing"
        raise wrong(name, "num_kv_heads", groups, allowed)
    if width % heads:
        allowed = f"a multiple of num_attention_heads ({heads})"
        raise wrong(name, "hidden_size", width, allowed)
    _check_axes(name, config, "axes_dim_rope", width // heads, "hidden_size / num_attention_heads")
    _check_patches(name, config, image_size, side)
    lengths, patches = config["axes_lens"], side // config["patch_size"]
    if (
        not isinstance(lengths, (list, tuple))
        or len(lengths) != 3
        or any(not isinstance(length, int) for length in lengths)
        or min(lengths[1:]) < patches
    ):
        allowed = f"three numbers, the last two {patches} or more: patches per side of image_size"
        raise wrong(name, "axes_lens", lengths, f"{allowed} {image_size}")


def _check_transformer(
    name: str, config: dict[str, Any], image_size: int, side: int, multiple: int
) -> int:
    """Check fields that all transformers share; return the width of their blocks."""
    for field in ("num_attention_heads", "attention_head_dim", "num_layers"):
        _check_positive(name, config, field)
    width = int(config["num_attention_heads"] * config["attention_head_dim"])
    if width % multiple:
        raise wrong(
            name,
            "attention_head_dim",
            config["attention_head_dim"],
            f"times num_attention_heads ({config['num_attention_heads']}) a multiple of {multiple}",
        )
    _check_patches(name, config, image_size, side)
    return width


def _check_patches(name: str, config: dict[str, Any], image_size: int, side: int) -> None:
    _check_positive(name, config, "patch_size")
    check_side(name, image_size, side, config["patch_size"])


def check_side(name: str, image_size: int, side: int, patch: int) -> None:
    """Raise SpecError if patches do not divide the side of the denoised tensor."""
    if side % patch:
        per_latent = image_size // side
        raise SpecError(
            f"model.modules.{name}.image_size does not fit the patches",
            f"given: {image_size}; allowed: multiples of {per_latent * patch}: {per_latent} pixels"
            f" per latent times patches of {patch}",
        )


def _check_axes(name: str, config: dict[str, Any], field: str, width: int, known_as: str) -> None:
    """Raise SpecError unless the rotary axes' widths sum to the head's width."""
    axes = config[field]
    if (
        not isinstance(axes, (list, tuple))
        or len(axes) != 3
        or any(not isinstance(axis, int) or axis < 2 or axis % 2 for axis in axes)
        or sum(axes) != width
    ):
        allowed = f"three even numbers whose sum is {known_as} ({width})"
        raise wrong(name, field, axes, allowed)


def _check_positive(name: str, config: dict[str, Any], field: str) -> None:
    if not isinstance(config[field], int) or config[field] < 1:
        raise wrong(name, field, config[field], "1 or more")
