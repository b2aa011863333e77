"""diffusers' transformers that run whole (`library_generator`): what differs from family to family.

A family is one entry. Its pipeline in diffusers is the source: how it passes latents, time and
positions to its transformer, and which configuration's inputs nobody supplies here.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from disttrain_cli.models.configs.checks import refuse_dropout, wrong, wrong_field
from disttrain_cli.spec.runfile.model import ModuleSpec

#: How latents [N, C, H, W] are passed: as they are; with one frame, [N, C, 1, H, W]; as a list of
#: [C, 1, H, W]; as patches in raster order [N, P, C · patch · patch].
Layout = Literal["image", "video", "list", "patches"]
#: What is passed for a flow's time t of T: σ = t/T, t itself, or 1 − σ, the share of the image.
#: With the latter the model predicts the direction to the image, the negative of a flow's.
Time = Literal["sigma", "timestep", "clean"]
#: Returns the positions [K + P, axes] of K conditioning tokens and the P patches of a grid.
Positions = Callable[[int, tuple[int, int]], Tensor]

#: Multiple to which Z-Image pads its conditioning.
Z_IMAGE_PADDED = 32


def _grid(grid: tuple[int, int], *before: int, start: int = 0) -> list[Tensor]:
    """Return numbers before, rows and columns of the patches of a grid in raster order [P]."""
    rows, columns = (torch.arange(start, start + side) for side in grid)
    patches = len(rows) * len(columns)
    return [
        *(torch.full((patches,), number) for number in before),
        rows.repeat_interleave(len(columns)),
        columns.repeat(len(rows)),
    ]


def _positions(context: list[Tensor], patches: list[Tensor]) -> Tensor:
    return torch.cat([torch.stack(context, 1), torch.stack(patches, 1)]).float()


def _zero(context: int, grid: tuple[int, int]) -> Tensor:
    return _positions([torch.zeros(context)] * 3, _grid(grid, 0))


def _diagonal(context: int, grid: tuple[int, int]) -> Tensor:
    numbers = torch.arange(context)
    return _positions([numbers * 0, numbers, numbers], _grid(grid, 0))


def _longcat(context: int, grid: tuple[int, int]) -> Tensor:
    numbers = torch.arange(context)  # patches follow the longest prompt of its pipeline
    return _positions([numbers * 0, numbers, numbers], _grid(grid, 1, start=512))


def _flux2(context: int, grid: tuple[int, int]) -> Tensor:
    numbers = torch.arange(context)
    patches = _grid(grid, 0)
    return _positions([*[numbers * 0] * 3, numbers], [*patches, patches[0]])


@dataclass(frozen=True)
class Family:
    """Transformer of diffusers that runs whole.

    Attributes:
        model: its class.
        width: field of its configuration with the width of the conditioning.
        patch: latents per side of a patch, where they are packed before; 0: the configuration's.
        rounds_time: True if the class expects the time in its weights' precision.
        guided: True if `guidance_embeds` asks for a guidance scale, as diffusers' training gives.
    """

    model: str
    width: str
    layout: Layout = "image"
    time: Time = "sigma"
    patch: int = 0
    positions: Positions | None = None
    guided: bool = False
    rounds_time: bool = False


FAMILIES = {
    "flux2": Family(
        "Flux2Transformer2DModel", "joint_attention_dim", "patches", "sigma", 1, _flux2, True
    ),
    "z_image": Family("ZImageTransformer2DModel", "cap_feat_dim", "list", "clean", 2),
    "wan": Family("WanTransformer3DModel", "text_dim", "video", "timestep"),
    "skyreels_v2": Family("SkyReelsV2Transformer3DModel", "text_dim", "video", "timestep"),
    "chroma": Family(
        "ChromaTransformer2DModel", "joint_attention_dim", "patches", "sigma", 2, _zero
    ),
    "ovis_image": Family(
        "OvisImageTransformer2DModel", "joint_attention_dim", "patches", "sigma", 2, _diagonal
    ),
    "longcat_image": Family(
        "LongCatImageTransformer2DModel", "joint_attention_dim", "patches", "sigma", 2, _longcat
    ),
    "hunyuan_image": Family(
        "HunyuanImageTransformer2DModel", "text_embed_dim", time="timestep", rounds_time=True
    ),
    "sana": Family("SanaTransformer2DModel", "caption_channels", time="timestep"),
    "prx": Family("PRXTransformer2DModel", "context_in_dim"),
}

#: Fields that ask for inputs that nobody supplies: a picture to start from, second text encoders,
#: a second time, the size of the images before they are cut; or for positions of one size alone.
_UNFED = (
    "image_dim",
    "added_kv_proj_dim",
    "pos_embed_seq_len",
    "siglip_feat_dim",
    "text_embed_2_dim",
    "use_meanflow",
    "inject_sample_info",
    "resolution_embeds",
    "interpolation_scale",
)


def patch_in(family: Family, config: dict[str, Any]) -> int:
    """Return the latents per side of a patch."""
    own = config.get("patch_size", 1)
    return family.patch or int(own[-1] if isinstance(own, (list, tuple)) else own)


def check_library_generator(
    name: str, family: Family, config: dict[str, Any], spec: ModuleSpec, side: int
) -> None:
    """Raise SpecError for what the class would build, and could not compute from the inputs here.

    Values that the class refuses itself, or that fit no other of its values, are found when the
    model is built and run without memory.
    """
    for field in (*_UNFED, *(() if family.guided else ("guidance_embeds",))):
        if config.get(field):
            raise wrong(name, field, config[field], "nothing: this version does not feed it")
    refuse_dropout(name, "dropout", config.get("dropout"))
    if not isinstance(config[family.width], int) or config[family.width] < 1:
        raise wrong(name, family.width, config[family.width], "1 or more")
    own = config.get("patch_size", 1)
    sides = own if isinstance(own, (list, tuple)) else [own]
    if any(not isinstance(one, int) or one < 1 for one in sides) or len(set(sides[-2:])) > 1:
        raise wrong(name, "patch_size", own, "1 or more, the same for rows and columns")
    if family.layout == "video" and sides[0] != 1:
        raise wrong(name, "patch_size", own, "1 frame per patch: latents have one frame")
    if family.layout == "patches" and sides[-1] != 1:
        raise wrong(name, "patch_size", own, "1: its patches are its channels")
    if family.layout == "list":
        _check_z_image(name, config, spec, side)


def _check_z_image(name: str, config: dict[str, Any], spec: ModuleSpec, side: int) -> None:
    for field, only in {"all_patch_size": [2], "all_f_patch_size": [1]}.items():
        if config[field] is None or list(config[field]) != only:
            raise wrong(name, field, config[field], f"{only}, the patches of its pipeline")
    patches, lengths = side // 2, config["axes_lens"]
    context = math.ceil(spec.context_tokens / Z_IMAGE_PADDED) * Z_IMAGE_PADDED
    if not isinstance(lengths, (list, tuple)) or len(lengths) != 3 or min(lengths[1:]) < patches:
        allowed = f"three numbers, the last two {patches} or more: patches per side of image_size"
        raise wrong(name, "axes_lens", lengths, allowed)
    if context + 2 > lengths[0]:
        allowed = f"{(lengths[0] - 2) // Z_IMAGE_PADDED * Z_IMAGE_PADDED} or fewer: axes_lens[0] is"
        raise wrong_field(name, "context_tokens", spec.context_tokens, f"{allowed} {lengths[0]}")
