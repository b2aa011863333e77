"""InternVL in its Transformers form: a tower, pixel shuffle, a projector, and a decoder.

The projector has two layers after a norm.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from disttrain_cli.errors import SpecError
from disttrain_cli.spec.families.family import Family, Fields, Module, feature_layer, only
from disttrain_cli.spec.families.tilings import nearest_ratio


def _joins(path: Path, config: Fields) -> dict[str, dict[str, Any]]:
    only(path, config, "vision_feature_select_strategy", {"default": "default"})
    only(path, config, "projector_hidden_act", {"gelu": "gelu"})
    layer = feature_layer(path, config)
    return {
        "vision": {
            "merge": _merge(path, config["downsample_ratio"]),
            "projector": "norm_mlp",
            **({} if layer == -1 else {"feature_layer": layer}),  # the last one is normalised
        }
    }


def _merge(path: Path, ratio: Any) -> int:
    """Return the patches per side of a row, from pixel shuffle's ratio of sides."""
    if isinstance(ratio, (int, float)) and 0 < ratio <= 1 and (1 / ratio).is_integer():
        return int(1 / ratio)
    raise SpecError(
        f"{path}: downsample_ratio {ratio!r} is not supported",
        "allowed: one over a whole number",
        "Train its modules by their own folders (model.modules), or another model.",
    )


FAMILY = Family(
    modules={
        "vision": Module(
            "encoder",
            "vision_config",
            architecture="internvl_vision",
            names={"": "model.vision_tower."},
            joint={
                "merged_norm": "model.multi_modal_projector.layer_norm",
                "mlp.0": "model.multi_modal_projector.linear_1",
                "mlp.2": "model.multi_modal_projector.linear_2",
            },
        ),
        "llm": Module(
            "llm",
            "text_config",
            default="qwen2",
            names={"model": "model.language_model", "lm_head": "lm_head"},
        ),
    },
    joins=_joins,
    processor=nearest_ratio,
    image_processors=("GotOcr2ImageProcessor",),
    defaults={
        "vision_feature_select_strategy": "default",
        "projector_hidden_act": "gelu",
        "vision_feature_layer": -1,
        "downsample_ratio": 0.5,
        "image_token_id": 151667,
    },
)
