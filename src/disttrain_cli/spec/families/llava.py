"""LLaVA 1.5: a CLIP or SigLIP tower, a two-layer projector, and a decoder.

The tower's inner block `vision_feature_layer` is read; `vision_feature_select_strategy` says
whether its first row, CLIP's class token, is dropped. Images have one size.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from disttrain_cli.spec.families.family import Family, Fields, Module, feature_layer, only
from disttrain_cli.spec.families.processors import cropped_or_stretched
from disttrain_cli.spec.image_processor import ImageProcessor

#: Towers, and which strategy reads exactly their patches: CLIP's first row is a class token,
#: SigLIP's is a patch.
STRATEGY = {"clip_vision_model": "default", "siglip_vision_model": "full"}


def _joins(path: Path, config: Fields) -> dict[str, dict[str, Any]]:
    tower = config["vision_config"].get("model_type", "clip_vision_model")
    only(path, {"model_type": tower}, "model_type", tower, dict.fromkeys(STRATEGY))
    strategy = STRATEGY[tower]
    only(path, config, "vision_feature_select_strategy", "default", {strategy: strategy})
    only(path, config, "projector_hidden_act", "gelu", {"gelu": "gelu"})
    only(path, config, "multimodal_projector_bias", True, {True: True})
    return {"vision": {"feature_layer": feature_layer(path, config, -2)}}


def _processor(path: Path, fields: Fields) -> ImageProcessor:
    siglip = "Siglip" in str(
        fields.get("image_processor_type", fields.get("feature_extractor_type"))
    )
    return cropped_or_stretched(path, fields, crop=not siglip)


FAMILY = Family(
    published="transformers:LlavaForConditionalGeneration",
    modules={
        "vision": Module(
            "encoder",
            "vision_config",
            default="clip_vision_model",
            names={"": "model.vision_tower."},
            joint={
                "mlp.0": "model.multi_modal_projector.linear_1",
                "mlp.2": "model.multi_modal_projector.linear_2",
            },
        ),
        "llm": Module(
            "llm",
            "text_config",
            default="llama",
            names={"model": "model.language_model", "lm_head": "lm_head"},
        ),
    },
    joins=_joins,
    processor=_processor,
    image_token=("image_token_index", "image_token_id"),
)
