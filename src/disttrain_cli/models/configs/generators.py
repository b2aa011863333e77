"""Checks of the generators' configurations: diffusers' U-Net and PixArt, their VAE and their noise
schedule."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

from pydantic import ValidationError

from disttrain_cli.errors import SpecError
from disttrain_cli.models.configs.checks import (
    check_dropout,
    check_numbers,
    numbers_in,
    refuse_unknown,
    wrong,
)
from disttrain_cli.models.noise import Noise
from disttrain_cli.spec.runfile.model import ModuleSpec, NoiseSpec

_UNET_BLOCKS = {
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
    "mid_block_type": ("UNetMidBlock2D", "UNetMidBlock2DCrossAttn"),
}
# Parts of UNet2DConditionModel.forward that need inputs which nothing here supplies.
_UNET_UNSUPPORTED = (
    "center_input_sample",
    "encoder_hid_dim_type",
    "encoder_hid_dim",
    "class_embed_type",
    "num_class_embeds",
    "time_embedding_act_fn",
    "time_cond_proj_dim",
    "class_embeddings_concat",
)

#: What SD XL embeds of an image's size: original height and width, crop's top and left, target
#: height and width.
TIME_IDS = 6


def known_fields(class_name: str) -> dict[str, Any]:
    """Arguments of a class of diffusers, with their defaults."""
    import diffusers

    made = getattr(
        diffusers,
        {"unet2d_condition": "UNet2DConditionModel", "pixart": "PixArtTransformer2DModel"}.get(
            class_name, class_name
        ),
    )
    arguments = inspect.signature(made.__init__).parameters
    return {name: argument.default for name, argument in arguments.items() if name != "self"}


def latent_side(vae: dict[str, Any], image_size: int) -> int:
    """Side of the latents of square images: every block of the encoder but the last halves it."""
    return int(image_size // 2 ** (len(vae["block_out_channels"]) - 1))


def read_unet(
    name: str, architecture: str, spec: ModuleSpec, fields: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """All arguments of the U-Net and of its VAE, of a `config.json`'s fields and the run file's
    over them.

    Raises:
        SpecError: a field of the run file is unknown, or a value is wrong.
    """
    return _read(name, architecture, spec, fields, _check_unet)


def read_pixart(
    name: str, architecture: str, spec: ModuleSpec, fields: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """All arguments of PixArt's transformer and of its VAE, as `read_unet` does."""
    if (
        "use_additional_conditions" not in spec.config
        and fields.get("use_additional_conditions") is None
        and fields
    ):
        # diffusers' own rule
        fields = fields | {"use_additional_conditions": fields.get("sample_size", 128) == 128}
    return _read(name, architecture, spec, fields, _check_pixart)


def with_folder(spec: ModuleSpec, fields: dict[str, Any]) -> ModuleSpec:
    """The spec with the VAE of a folder's `config.json`, the run file's fields of it put over."""
    known = known_fields("AutoencoderKL")
    return spec.model_copy(
        update={"vae": {k: v for k, v in fields.items() if k in known} | (spec.vae or {})}
    )


def read_noise(name: str, spec: ModuleSpec, fields: dict[str, Any]) -> Noise:
    """The noise schedule of a `scheduler_config.json`'s fields and the run file's over them.

    Raises:
        SpecError: the schedule is not one that is trained here.
    """
    flow = str(fields.get("_class_name", "")).startswith("FlowMatch")
    given: dict[str, Any] = {
        "prediction": "flow" if flow else fields.get("prediction_type"),
        "betas": fields.get("beta_schedule"),
        "beta_start": fields.get("beta_start"),
        "beta_end": fields.get("beta_end"),
        "timesteps": fields.get("num_train_timesteps"),
    } | ({} if spec.noise is None else spec.noise.model_dump(exclude_none=True))
    try:
        checked = NoiseSpec.model_validate(
            {field: value for field, value in given.items() if value is not None}
        )
    except ValidationError as error:
        problem = error.errors()[0]
        raise wrong(
            name, str(problem["loc"][0]), problem["input"], problem["msg"], "noise"
        ) from None
    noise = Noise(**checked.model_dump(exclude_none=True))
    if noise.beta_start >= noise.beta_end:
        raise wrong(
            name, "beta_start", noise.beta_start, f"less than beta_end ({noise.beta_end})", "noise"
        )
    return noise


def _read(
    name: str,
    architecture: str,
    spec: ModuleSpec,
    fields: dict[str, Any],
    check: Callable[..., None],
) -> tuple[dict[str, Any], dict[str, Any] | None]:
    assert spec.image_size is not None
    defaults = known_fields(architecture)
    refuse_unknown(name, architecture, spec.config, defaults, "config")
    check_numbers(name, fields | spec.config)
    vae = None if spec.vae is None else _make_vae(name, spec.vae, spec.image_size)
    side = spec.image_size if vae is None else latent_side(vae, spec.image_size)
    if spec.config.get("sample_size") not in (None, side):
        allowed = (
            f"{side}, the side of "
            + ("image_size" if vae is None else "the VAE's latents")
            + ", or nothing"
        )
        raise wrong(name, "sample_size", spec.config["sample_size"], allowed)
    given = {**fields, **spec.config}
    config = {**defaults, **{k: v for k, v in given.items() if k in defaults}, "sample_size": side}
    check_dropout(name, "dropout", config["dropout"])
    channels, why = (
        (3, "RGB images are denoised")
        if vae is None
        else (vae["latent_channels"], "vae.latent_channels")
    )
    _check_channels(name, config, channels, why, variance=architecture == "pixart")
    check(name, config, spec.image_size, side)
    return config, vae


def _check_channels(
    name: str, config: dict[str, Any], channels: int, why: str, variance: bool
) -> None:
    if config["in_channels"] != channels:
        raise wrong(name, "in_channels", config["in_channels"], f"{channels}: {why}")
    out = config["out_channels"]
    if out != channels and not (variance and out in (2 * channels, None)):
        twice = f", or {2 * channels} with a variance" if variance else ""
        raise wrong(name, "out_channels", out, f"{channels}: {why}{twice}")


def _make_vae(name: str, fields: dict[str, Any], image_size: int) -> dict[str, Any]:
    refuse_unknown(name, "AutoencoderKL", fields, known_fields("AutoencoderKL"), "vae")
    check_numbers(name, fields, "vae")
    config = {**known_fields("AutoencoderKL"), **fields}
    for field in ("in_channels", "out_channels"):
        if config[field] != 3:
            raise wrong(name, field, config[field], "3: RGB images are encoded", "vae")
    for field in ("latents_mean", "latents_std"):
        if config[field] is not None:
            raise wrong(
                name, field, config[field], "nothing: latents are scaled by scaling_factor", "vae"
            )
    _check_counts(name, config, "vae")
    if not isinstance(config["latent_channels"], int) or config["latent_channels"] < 1:
        raise wrong(name, "latent_channels", config["latent_channels"], "1 or more", "vae")
    scaling, shift = config["scaling_factor"], config["shift_factor"]
    if not isinstance(scaling, (int, float)) or not 0.0 < scaling < math.inf:
        raise wrong(name, "scaling_factor", scaling, "a positive number", "vae")
    if shift is not None and (not isinstance(shift, (int, float)) or not math.isfinite(shift)):
        raise wrong(name, "shift_factor", shift, "a number, or nothing", "vae")
    for field, block in {
        "down_block_types": "DownEncoderBlock2D",
        "up_block_types": "UpDecoderBlock2D",
    }.items():
        given = config[field]
        if (
            not isinstance(given, (list, tuple))
            or not given
            or any(part != block for part in given)
        ):
            raise wrong(name, field, given, f"a list of {block}", "vae")
    depth = len(config["down_block_types"])
    for field in ("block_out_channels", "up_block_types"):
        if not isinstance(config[field], (list, tuple)) or len(config[field]) != depth:
            raise wrong(
                name, field, config[field], f"{depth}, one for each of down_block_types", "vae"
            )
    factor = 2 ** (depth - 1)
    if image_size % factor:
        what = f"model.modules.{name}.image_size does not fit the VAE's down-sampling"
        raise SpecError(
            what, f"given: {image_size}; allowed: multiples of {factor} ({depth} blocks)"
        )
    return config


def _check_counts(name: str, config: dict[str, Any], section: str) -> None:
    """What diffusers builds without a word, and cannot compute."""
    for field in ("layers_per_block", "norm_num_groups"):
        if any(value < 1 for value in numbers_in(config[field])):
            raise wrong(name, field, config[field], "1 or more", section)


def _check_unet(name: str, config: dict[str, Any], image_size: int, side: int) -> None:
    for field in _UNET_UNSUPPORTED:
        if config[field]:
            raise wrong(name, field, config[field], "nothing: this version does not feed it")
    for field, blocks in _UNET_BLOCKS.items():
        given = [config[field]] if field == "mid_block_type" else config[field]
        if not isinstance(given, (list, tuple)) or any(block not in blocks for block in given):
            raise wrong(name, field, config[field], ", ".join(blocks))
    for field, only in {"time_embedding_type": "positional", "attention_type": "default"}.items():
        if config[field] != only:
            raise wrong(name, field, config[field], only)
    _check_counts(name, config, "config")
    if not isinstance(config["cross_attention_dim"], int):
        raise wrong(
            name, "cross_attention_dim", config["cross_attention_dim"], "one number for all blocks"
        )
    if config["addition_embed_type"] not in (None, "text_time"):
        raise wrong(
            name, "addition_embed_type", config["addition_embed_type"], "text_time, or nothing"
        )
    if config["addition_embed_type"] == "text_time" and pooled_width(config) < 1:
        raise wrong(
            name,
            "projection_class_embeddings_input_dim",
            config["projection_class_embeddings_input_dim"],
            f"more than {TIME_IDS} times addition_time_embed_dim"
            f" ({config['addition_time_embed_dim']})",
        )
    depth = len(config["down_block_types"])
    factor = 2 ** (depth - 1) * (image_size // side)
    if image_size % factor:
        what = f"model.modules.{name}.image_size does not fit the U-Net's down-sampling"
        after = "" if image_size == side else f" after the VAE's by {image_size // side}"
        raise SpecError(
            what, f"given: {image_size}; allowed: multiples of {factor} ({depth} blocks{after})"
        )


def pooled_width(config: dict[str, Any]) -> int:
    """Width of SD XL's vector per image: what its added embedding reads besides the embedded time
    ids."""
    width = config["projection_class_embeddings_input_dim"] or 0
    return int(width - TIME_IDS * (config["addition_time_embed_dim"] or 0))


def _check_pixart(name: str, config: dict[str, Any], image_size: int, side: int) -> None:
    for field, allowed in {
        "norm_type": ("ada_norm_single",),
        "attention_type": ("default",),
        "activation_fn": ("gelu", "gelu-approximate", "geglu"),
    }.items():
        if config[field] not in allowed:
            raise wrong(name, field, config[field], ", ".join(allowed))
    for field in ("num_attention_heads", "attention_head_dim", "num_layers", "patch_size"):
        if not isinstance(config[field], int) or config[field] < 1:
            raise wrong(name, field, config[field], "1 or more")
    width = config["num_attention_heads"] * config["attention_head_dim"]
    # sinusoids of two axes; a third for each size told
    multiple = 12 if config["use_additional_conditions"] else 4
    if width % multiple:
        raise wrong(
            name,
            "attention_head_dim",
            config["attention_head_dim"],
            f"times num_attention_heads ({config['num_attention_heads']}) a multiple of {multiple}",
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
    if side % config["patch_size"]:
        raise wrong(
            name,
            "patch_size",
            config["patch_size"],
            f"a divisor of {side}, the side of what is denoised",
        )
