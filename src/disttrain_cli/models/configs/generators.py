"""Checks of diffusers' U-Net, and what is common to all generators.

Checks of transformer generators are in `transformers` and `library_generators`, of their VAEs in
`vaes`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from disttrain_cli.errors import SpecError
from disttrain_cli.models.configs.checks import (
    MISTAKES,
    arguments_of,
    check_counts,
    check_dropout,
    check_numbers,
    refuse_missing,
    refuse_unknown,
    refused,
    wrong,
    wrong_field,
)
from disttrain_cli.models.configs.library_generators import (
    FAMILIES,
    check_library_generator,
    patch_in,
)
from disttrain_cli.models.configs.transformers import (
    FLUX_PATCH,
    check_flux,
    check_lumina2,
    check_pixart,
    check_qwen_image,
    check_sd3,
    check_side,
)
from disttrain_cli.models.configs.vaes import CLASS, channels_field, latents_of, make_vae, vae_class
from disttrain_cli.spec.runfile.model import ModuleSpec

_UNET_BLOCKS = {
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
    "mid_block_type": ("UNetMidBlock2D", "UNetMidBlock2DCrossAttn"),
}
# Options of UNet2DConditionModel.forward whose inputs are not supplied.
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

#: SDXL's size conditioning: original height and width, crop's top and left, target height and
#: width.
TIME_IDS = 6


#: Classes of diffusers by architecture.
CLASSES = {
    "unet2d_condition": "UNet2DConditionModel",
    "pixart": "PixArtTransformer2DModel",
    "sd3": "SD3Transformer2DModel",
    "flux": "FluxTransformer2DModel",
    "lumina2": "Lumina2Transformer2DModel",
    "qwen_image": "QwenImageTransformer2DModel",
    **{name: family.model for name, family in FAMILIES.items()},
}
#: Architectures whose channels are those of a patch, folded together, and not those of a latent.
_PACKED = {
    "flux",
    "qwen_image",
    *(name for name, family in FAMILIES.items() if family.layout == "patches"),
}


def known_fields(class_name: str) -> dict[str, Any]:
    """Return the arguments of a diffusers class or an architecture, with their defaults."""
    return arguments_of(_class_of(class_name))


def whole_model(
    module: str,
    class_name: str,
    config: dict[str, Any],
    section: str = "config",
    without: AbstractContextManager[Any] | None = None,
) -> Any:
    """Return a model of a diffusers class, or of an architecture's, without memory for its weights.

    Args:
        without: in which it is built; None: all its tensors are on the meta device.

    Raises:
        SpecError: diffusers rejects the configuration.
    """
    try:
        with without or torch.device("meta"):
            return _class_of(class_name)(**config)
    except (*MISTAKES, RuntimeError, AssertionError) as error:
        raise refused(module, class_name, error, section) from None


def _class_of(name: str) -> Any:
    import diffusers

    return getattr(diffusers, CLASSES.get(name, name))


def denoised(vae: dict[str, Any] | None, image_size: int) -> tuple[int, int]:
    """Return channels and side of the denoised tensor: square images, or their latents."""
    if vae is None:
        return 3, image_size
    channels, factor = latents_of(vae)
    return channels, image_size // factor


def patch_of(architecture: str, config: Any) -> int:
    """Return the side of a patch of the denoised tensor; 1 for a generator without patches."""
    if architecture in FAMILIES:
        return patch_in(FAMILIES[architecture], config)
    own = config.get("patch_size") if isinstance(config, dict) else None
    return int(FLUX_PATCH if architecture == "flux" else own or 1)


def read_unet(
    name: str, architecture: str, spec: ModuleSpec, fields: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """Return all arguments of the U-Net and of its VAE.

    `fields` of a `config.json` are overridden by the run file's.

    Raises:
        SpecError: a field of the run file is unknown, or a value is wrong.
    """
    return _read(name, architecture, spec, fields, _check_unet)


def read_pixart(
    name: str, architecture: str, spec: ModuleSpec, fields: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """Return all arguments of PixArt's transformer and of its VAE, as `read_unet` does."""
    if (
        "use_additional_conditions" not in spec.config
        and fields.get("use_additional_conditions") is None
        and fields
    ):
        # diffusers' default for published models
        fields = fields | {"use_additional_conditions": fields.get("sample_size", 128) == 128}
    config, vae = _read(name, architecture, spec, fields, check_pixart)
    if fields and "interpolation_scale" not in spec.config:
        config["interpolation_scale"] = _pixart_scale(fields, config)
    return config, vae


def _pixart_scale(fields: dict[str, Any], config: dict[str, Any]) -> int | float:
    """Return the `interpolation_scale` that reproduces the published positions at the run's size.

    diffusers derives positions from the configured `sample_size`, not from the actual size of its
    input.
    """
    base, patch = fields.get("sample_size", 128), config["patch_size"]
    scale = fields.get("interpolation_scale") or max(base // 64, 1)
    ours = scale * (config["sample_size"] // patch) / (base // patch)
    return int(ours) if ours == int(ours) else ours


def read_sd3(
    name: str, architecture: str, spec: ModuleSpec, fields: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """Return all arguments of SD3's transformer and of its VAE, as `read_unet` does."""
    return _read(name, architecture, spec, fields, check_sd3)


def read_flux(
    name: str, architecture: str, spec: ModuleSpec, fields: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """Return all arguments of Flux's transformer and of its VAE, as `read_unet` does."""
    return _read(name, architecture, spec, fields, check_flux)


def read_lumina2(
    name: str, architecture: str, spec: ModuleSpec, fields: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """Return all arguments of Lumina 2's transformer and of its VAE, as `read_unet` does."""
    config, vae = _read(name, architecture, spec, fields, check_lumina2)
    numbers = config["axes_lens"][0]
    if spec.context_tokens >= numbers:
        raise wrong_field(
            name,
            "context_tokens",
            spec.context_tokens,
            f"less than {numbers}, the first of config.axes_lens: tokens that have a position",
        )
    return config, vae


def read_qwen_image(
    name: str, architecture: str, spec: ModuleSpec, fields: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """Return all arguments of Qwen-Image's transformer and of its VAE, as `read_unet` does."""
    return _read(name, architecture, spec, fields, check_qwen_image)


def read_library_generator(
    name: str, architecture: str, spec: ModuleSpec, fields: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """Return all arguments of a transformer that runs whole and of its VAE, as `read_unet` does."""
    family = FAMILIES[architecture]

    def check(name: str, config: dict[str, Any], image_size: int, side: int) -> None:
        check_library_generator(name, family, config, spec, side)
        check_side(name, image_size, side, patch_in(family, config))

    return _read(name, architecture, spec, fields, check)


def with_folder(name: str, spec: ModuleSpec, fields: dict[str, Any]) -> ModuleSpec:
    """Return the spec with a folder's VAE fields (`config.json`), overridden by the run file's."""
    fields = fields | (spec.vae or {})
    known = {CLASS, *known_fields(vae_class(name, fields))}
    own = set(spec.vae or {})
    return spec.model_copy(
        update={"vae": {k: v for k, v in fields.items() if k in known or k in own}}
    )


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
    vae = None if spec.vae is None else make_vae(name, spec.vae, spec.image_size)
    channels, side = denoised(vae, spec.image_size)
    if spec.config.get("sample_size") not in (None, side):
        allowed = (
            f"{side}, the side of "
            + ("image_size" if vae is None else "the VAE's latents")
            + ", or nothing"
        )
        raise wrong(name, "sample_size", spec.config["sample_size"], allowed)
    given = {**fields, **spec.config}
    config = {**defaults, **{k: v for k, v in given.items() if k in defaults}}
    refuse_missing(name, config, "config")
    config |= {"sample_size": side} if "sample_size" in defaults else {}
    check_dropout(name, "dropout", config.get("dropout", 0.0))
    why = "RGB images are denoised" if vae is None else f"vae.{channels_field(vae)}"
    _check_channels(name, architecture, config, channels, why)
    check(name, config, spec.image_size, side)
    return config, vae


def _check_channels(
    name: str, architecture: str, config: dict[str, Any], channels: int, why: str
) -> None:
    """Raise SpecError for other channels than the denoised tensor's; complete `out_channels`."""
    single = channels
    if architecture in _PACKED and (pixels := patch_of(architecture, config) ** 2) > 1:
        channels, why = channels * pixels, f"{pixels} times {channels}, {why}"
    if config["in_channels"] != channels:
        raise wrong(name, "in_channels", config["in_channels"], f"{channels}: {why}")
    variance = architecture == "pixart"
    if architecture == "qwen_image":  # its outputs are counted before they are folded
        channels, why = single, "those of a latent, before they are folded into patches"
    elif architecture not in ("unet2d_condition", "pixart") and not config.get("out_channels"):
        if "out_channels" in config:
            config["out_channels"] = channels
        return
    out = config["out_channels"]
    if out != channels and not (variance and out in (2 * channels, None)):
        twice = f", or {2 * channels} with a variance" if variance else ""
        raise wrong(name, "out_channels", out, f"{channels}: {why}{twice}")


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
    check_counts(name, config, "config")
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
    """Return the width of SDXL's pooled vector per image.

    It is the added embedding's input without the embedded time ids.
    """
    width = config["projection_class_embeddings_input_dim"] or 0
    return int(width - TIME_IDS * (config["addition_time_embed_dim"] or 0))
