"""Checks of the frozen VAEs of generators, and the size and scale of their latents."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from disttrain_cli.errors import SpecError
from disttrain_cli.models.configs.checks import (
    arguments_of,
    check_counts,
    check_numbers,
    refuse_missing,
    refuse_unknown,
    wrong,
)

#: Field of `config.json`, and of `vae` in the run file, with the class of diffusers.
CLASS = "_class_name"


@dataclass(frozen=True)
class Vae:
    """Class of diffusers that converts images to latents and back.

    Attributes:
        channels: field of its configuration with the channels of its latents.
        factor: returns the pixels per side of a latent.
        video: True if an image is a video of one frame.
        packed: latents per side that are one for the generator, their channels folded together.
        random: True if its encoder predicts a distribution of latents.
    """

    channels: str
    factor: Callable[[Mapping[str, Any]], int]
    video: bool = False
    packed: int = 1
    random: bool = True


def _halvings(config: Mapping[str, Any]) -> int:
    """Return the down-sampling of an encoder whose every block but the last halves its images."""
    return int(2 ** (len(config["block_out_channels"]) - 1))


VAES = {
    "AutoencoderKL": Vae("latent_channels", _halvings),
    "AutoencoderKLFlux2": Vae("latent_channels", _halvings, packed=2),
    "AutoencoderKLQwenImage": Vae(
        "z_dim", lambda config: int(2 ** len(config["temperal_downsample"])), video=True
    ),
    "AutoencoderKLWan": Vae(
        "z_dim", lambda config: int(config["scale_factor_spatial"]), video=True
    ),
    "AutoencoderKLHunyuanImage": Vae(
        "latent_channels", lambda config: int(config["spatial_compression_ratio"])
    ),
    "AutoencoderDC": Vae(
        "latent_channels",
        lambda config: int(2 ** (len(config["encoder_block_out_channels"]) - 1)),
        random=False,
    ),
}


def vae_class(name: str, fields: Mapping[str, Any]) -> str:
    """Return the class of a VAE; without a name it is an AutoencoderKL.

    Raises:
        SpecError: the class is not supported.
    """
    given = fields.get(CLASS, "AutoencoderKL")
    if given not in VAES:
        raise wrong(name, CLASS, given, ", ".join(VAES), "vae")
    return str(given)


def latents_of(config: Mapping[str, Any]) -> tuple[int, int]:
    """Return the channels of a VAE's latents, as its generator sees them, and pixels per side."""
    vae = VAES[config[CLASS]]
    return config[vae.channels] * vae.packed**2, vae.factor(config) * vae.packed


def channels_field(config: Mapping[str, Any]) -> str:
    """Return the field with the channels of a VAE's latents."""
    return VAES[config[CLASS]].channels


def make_vae(name: str, fields: Mapping[str, Any], image_size: int) -> dict[str, Any]:
    """Return all arguments of a VAE, and its class.

    Raises:
        SpecError: a field is unknown, or a value is wrong.
    """
    import diffusers

    class_name = vae_class(name, fields)
    own = {field: value for field, value in fields.items() if field != CLASS}
    known = arguments_of(getattr(diffusers, class_name))
    refuse_unknown(name, class_name, own, known, "vae")
    check_numbers(name, own, "vae")
    config = {**known, **own, CLASS: class_name}
    refuse_missing(name, config, "vae")
    pixels = 3 * (config.get("patch_size") or 1) ** 2 if class_name == "AutoencoderKLWan" else 3
    for field in ("in_channels", "out_channels", "input_channels"):
        if config.get(field, pixels) != pixels:
            raise wrong(name, field, config[field], f"{pixels}: RGB images are encoded", "vae")
    channels = config[VAES[class_name].channels]
    if not isinstance(channels, int) or channels < 1:
        raise wrong(name, VAES[class_name].channels, channels, "1 or more", "vae")
    if config.get("dropout"):
        raise wrong(name, "dropout", config["dropout"], "0: a VAE is frozen", "vae")
    check_counts(name, config, "vae")
    _check_scale(name, config, channels)
    if "down_block_types" in config and class_name != "AutoencoderDC":
        _check_blocks(name, config)
    try:
        factor = latents_of(config)[1]
        fits = image_size % factor == 0
    except (TypeError, ValueError, ZeroDivisionError, OverflowError) as error:
        what = f"model.modules.{name}.vae does not fit {class_name}"
        raise SpecError(what, f"its down-sampling: {error}") from None
    if not fits:
        what = f"model.modules.{name}.image_size does not fit the VAE's down-sampling"
        raise SpecError(what, f"given: {image_size}; allowed: multiples of {factor}")
    return config


def scale_of(config: Mapping[str, Any]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return scaling and shift of latents z · scaling after − shift: one, or one per channel."""
    mean, std = config.get("latents_mean"), config.get("latents_std")
    if mean is not None and std is not None:
        return tuple(1 / one for one in std), tuple(mean)
    return (config.get("scaling_factor") or 1.0,), (config.get("shift_factor") or 0.0,)


def _check_scale(name: str, config: Mapping[str, Any], channels: int) -> None:
    for field in ("latents_mean", "latents_std"):
        given = config.get(field)
        if "scaling_factor" in config and given is not None:
            raise wrong(name, field, given, "nothing: latents are scaled by scaling_factor", "vae")
        if field in config and "scaling_factor" not in config:
            positive = field == "latents_std"
            if (
                not isinstance(given, (list, tuple))
                or len(given) != channels
                or any(not isinstance(one, (int, float)) or one <= 0 < positive for one in given)
            ):
                allowed = f"{channels} {'positive ' if positive else ''}numbers, one per channel"
                raise wrong(name, field, given, allowed, "vae")
    scaling, shift = config.get("scaling_factor", 1.0), config.get("shift_factor")
    if not isinstance(scaling, (int, float)) or not 0.0 < scaling < math.inf:
        raise wrong(name, "scaling_factor", scaling, "a positive number", "vae")
    if shift is not None and (not isinstance(shift, (int, float)) or not math.isfinite(shift)):
        raise wrong(name, "shift_factor", shift, "a number, or nothing", "vae")


def _check_blocks(name: str, config: Mapping[str, Any]) -> None:
    for field, of in {"down_block_types": "DownEncoder", "up_block_types": "UpDecoder"}.items():
        given, block = config.get(field), f"{of}Block2D"
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
