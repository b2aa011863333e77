"""LLaVA 1.5, LLaVA-NeXT and LLaVA-OneVision: a CLIP or SigLIP tower, a two-layer projector, and a
decoder.

The tower's inner block `vision_feature_layer` is read; `vision_feature_select_strategy` says
whether its first row, CLIP's class token, is dropped. Images have one size, or are cut into tiles
whose rows are those of the joined picture, with a learned `image_newline` at their ends.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from disttrain_cli.spec.families.family import Family, Fields, Module, feature_layer, only
from disttrain_cli.spec.families.processors import (
    AGAIN,
    NESTED,
    cropped_or_stretched,
    refused,
)
from disttrain_cli.spec.families.tilings import joined
from disttrain_cli.spec.files import parse_json
from disttrain_cli.spec.image_processor import ImageProcessor

CONFIG = "config.json"
Processor = Callable[[Path, Fields], ImageProcessor]

#: Towers, and which strategy reads exactly their patches: CLIP's first row is a class token,
#: SigLIP's is a patch.
STRATEGY = {"clip_vision_model": "default", "siglip_vision_model": "full"}


class _Defaults(NamedTuple):
    """What a config.json means where it says nothing."""

    tower: str
    llm: str
    layer: int
    #: Heights and widths that images are cut at.
    resolutions: tuple[tuple[int, int], ...] = ()


LLAVA = _Defaults("clip_vision_model", "llama", -2)
NEXT = LLAVA._replace(
    resolutions=((336, 672), (672, 336), (672, 672), (1008, 336), (336, 1008)),
)
ONEVISION = _Defaults(
    "siglip_vision_model",
    "qwen2",
    -1,
    tuple((384 * rows, 384 * columns) for rows in range(1, 7) for columns in range(1, 7)),
)


def _joins(defaults: _Defaults, path: Path, config: Fields) -> dict[str, dict[str, Any]]:
    tower = config["vision_config"].get("model_type", defaults.tower)
    only(path, {"model_type": tower}, "model_type", tower, dict.fromkeys(STRATEGY))
    strategy = STRATEGY[tower]
    usual = STRATEGY[defaults.tower]
    only(path, config, "vision_feature_select_strategy", usual, {strategy: strategy})
    only(path, config, "projector_hidden_act", "gelu", {"gelu": "gelu"})
    only(path, config, "multimodal_projector_bias", True, {True: True})
    _check_placeholders(path.parent / NESTED, config["vision_config"], strategy)
    return {"vision": {"feature_layer": feature_layer(path, config, defaults.layer)}}


def _check_placeholders(path: Path, tower: Fields, strategy: str) -> None:
    """SpecError where the processor would write placeholders for other rows than the tower's."""
    said = parse_json(path, "processor configuration", AGAIN) if path.exists() else {}
    side, patch = (tower.get(field) for field in ("image_size", "patch_size"))
    expected = {
        "patch_size": patch,
        "vision_feature_select_strategy": strategy,
        "num_image_tokens": (side // patch) ** 2 if side and patch else None,
    }
    for field, value in expected.items() if isinstance(said, dict) else ():
        if value is not None and said.get(field) not in (value, None):
            raise refused(path, field, said[field], f"{value}, the tower's")


def _processor(path: Path, fields: Fields) -> ImageProcessor:
    siglip = "Siglip" in str(
        fields.get("image_processor_type", fields.get("feature_extractor_type"))
    )
    return cropped_or_stretched(path, fields, crop=not siglip)


def _tiles(defaults: _Defaults, path: Path, fields: Fields) -> ImageProcessor:
    file = path.parent / CONFIG
    config = parse_json(file, "model configuration", "Download the folder again.")
    usual = [list(one) for one in defaults.resolutions]
    resolutions = config.get("image_grid_pinpoints") or usual
    if (given := fields.get("image_grid_pinpoints")) != resolutions:
        raise refused(path, "image_grid_pinpoints", given, f"those of {CONFIG}: {resolutions}")
    if defaults is not ONEVISION:
        return joined(path, fields, None)
    return joined(path, fields, str(config.get("vision_aspect_ratio", "anyres_max_9")))


def _family(prefix: str, defaults: _Defaults, processor: Processor) -> Family:
    newline = {"image_newline": "model.image_newline"} if defaults.resolutions else {}
    return Family(
        published=f"transformers:{prefix}ForConditionalGeneration",
        modules={
            "vision": Module(
                "encoder",
                "vision_config",
                default=defaults.tower,
                names={"": "model.vision_tower."},
                joint={
                    "mlp.0": "model.multi_modal_projector.linear_1",
                    "mlp.2": "model.multi_modal_projector.linear_2",
                    **newline,
                },
            ),
            "llm": Module(
                "llm",
                "text_config",
                default=defaults.llm,
                names={"model": "model.language_model", "lm_head": "lm_head"},
            ),
        },
        joins=partial(_joins, defaults),
        processor=processor,
        image_token=("image_token_index", "image_token_id"),
    )


FAMILY = _family("Llava", LLAVA, _processor)
LLAVA_NEXT = _family("LlavaNext", NEXT, partial(_tiles, NEXT))
LLAVA_ONEVISION = _family("LlavaOnevision", ONEVISION, partial(_tiles, ONEVISION))
