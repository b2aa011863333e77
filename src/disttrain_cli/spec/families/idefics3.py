"""Idefics3 and SmolVLM: a tower like SigLIP's, pixel shuffle, one linear, and a decoder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from disttrain_cli.spec.families.family import Family, Fields, Module, only
from disttrain_cli.spec.families.tilings import longest_edge


def _joins(path: Path, config: Fields) -> dict[str, dict[str, Any]]:
    merge = only(path, config, "scale_factor", {side: side for side in range(1, 17)})
    return {"vision": {"merge": merge, "projector": "linear"}}


def _family(name: str, *processors: str) -> Family:
    return Family(
        modules={
            "vision": Module(
                "encoder",
                "vision_config",
                architecture=f"{name}_vision",
                names={"": "model.vision_model."},
                joint={"linear": "model.connector.modality_projection.proj"},
            ),
            "llm": Module(
                "llm",
                "text_config",
                default="llama",
                names={"model": "model.text_model", "lm_head": "lm_head"},
            ),
        },
        joins=_joins,
        processor=longest_edge,
        image_processors=processors,
        defaults={"scale_factor": 2, "image_token_id": 128257},
    )


IDEFICS3 = _family("idefics3", "Idefics3ImageProcessor")
SMOLVLM = _family("smolvlm", "SmolVLMImageProcessor", "Idefics3ImageProcessor")
