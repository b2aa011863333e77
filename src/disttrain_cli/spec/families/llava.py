"""LLaVA 1.5, LLaVA-NeXT and LLaVA-OneVision: CLIP or SigLIP tower, two-layer projector, decoder.

The tower's inner block `vision_feature_layer` is read; `vision_feature_select_strategy` determines
whether its first row, CLIP's class token, is dropped. Images have one size, or are cut into tiles
whose rows are those of the joined picture, with a learned `image_newline` at their ends.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from disttrain_cli.spec.families.defaults import IMAGE_PROCESSORS, completed
from disttrain_cli.spec.families.family import Family, Fields, Module, feature_layer, only
from disttrain_cli.spec.families.processors import AGAIN, NESTED, cropped_or_stretched, refused
from disttrain_cli.spec.families.tilings import joined
from disttrain_cli.spec.files import parse_json
from disttrain_cli.spec.image_processor import ImageProcessor

CONFIG = "config.json"
Processor = Callable[[Path, Fields], ImageProcessor]

#: Towers, with the strategy that reads exactly their patches: CLIP's first row is a class token,
#: SigLIP's is a patch.
STRATEGY = {"clip_vision_model": "default", "siglip_vision_model": "full"}


#: Defaults of the whole configurations' classes.
LLAVA: Fields = {
    "image_token_index": 32000,
    "projector_hidden_act": "gelu",
    "vision_feature_select_strategy": "default",
    "vision_feature_layer": -2,
    "multimodal_projector_bias": True,
}
NEXT: Fields = {
    **LLAVA,
    "image_grid_pinpoints": IMAGE_PROCESSORS["LlavaNextImageProcessor"]["image_grid_pinpoints"],
}
ONEVISION: Fields = {
    **LLAVA,
    "image_token_index": 151646,
    "vision_feature_select_strategy": "full",
    "vision_feature_layer": -1,
    "image_grid_pinpoints": IMAGE_PROCESSORS["LlavaOnevisionImageProcessor"][
        "image_grid_pinpoints"
    ],
    "vision_aspect_ratio": "anyres_max_9",
}


def _joins(usual: str, path: Path, config: Fields) -> dict[str, dict[str, Any]]:
    tower = config["vision_config"].get("model_type", usual)
    only(path, {"model_type": tower}, "model_type", dict.fromkeys(STRATEGY))
    strategy = STRATEGY[tower]
    only(path, config, "vision_feature_select_strategy", {strategy: strategy})
    only(path, config, "projector_hidden_act", {"gelu": "gelu"})
    only(path, config, "multimodal_projector_bias", {True: True})
    _check_placeholders(path.parent / NESTED, config["vision_config"], strategy)
    return {"vision": {"feature_layer": feature_layer(path, config)}}


def _check_placeholders(path: Path, tower: Fields, strategy: str) -> None:
    """Raise SpecError if the processor's placeholders do not match the tower's rows."""
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


def _tiles(defaults: Fields, path: Path, fields: Fields) -> ImageProcessor:
    file = path.parent / CONFIG
    config = completed(parse_json(file, "model configuration", AGAIN), defaults)
    resolutions, given = config["image_grid_pinpoints"], fields["image_grid_pinpoints"]
    if given != resolutions:
        raise refused(path, "image_grid_pinpoints", given, f"those of {CONFIG}: {resolutions}")
    ratio = config.get("vision_aspect_ratio") if defaults is ONEVISION else None
    return joined(path, fields, None if ratio is None else str(ratio))


def _family(
    tower: str, llm: str, defaults: Fields, processor: Processor, processors: tuple[str, ...]
) -> Family:
    tiled = "image_grid_pinpoints" in defaults
    newline = {"image_newline": "model.image_newline"} if tiled else {}
    return Family(
        modules={
            "vision": Module(
                "encoder",
                "vision_config",
                default=tower,
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
                default=llm,
                names={"model": "model.language_model", "lm_head": "lm_head"},
            ),
        },
        joins=partial(_joins, tower),
        processor=processor,
        image_processors=processors,
        defaults=defaults,
        image_token=("image_token_index", "image_token_id"),
    )


FAMILY = _family(
    "clip_vision_model",
    "llama",
    LLAVA,
    cropped_or_stretched,
    ("LlavaImageProcessor", "CLIPImageProcessor", "SiglipImageProcessor"),
)
LLAVA_NEXT = _family(
    "clip_vision_model", "llama", NEXT, partial(_tiles, NEXT), ("LlavaNextImageProcessor",)
)
LLAVA_ONEVISION = _family(
    "siglip_vision_model",
    "qwen2",
    ONEVISION,
    partial(_tiles, ONEVISION),
    ("LlavaOnevisionImageProcessor",),
)
