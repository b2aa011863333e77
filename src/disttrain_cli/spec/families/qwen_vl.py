"""Qwen2.5-VL and Qwen3-VL (dense): a tower with its own merger, and a decoder with M-RoPE.

The merger's output has the LLM's width. Images keep their aspect ratio within a budget of pixels.
Published folders of Qwen2.5-VL have the LLM's fields at the top level of config.json.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from disttrain_cli.spec.families.family import Family, Fields, Module
from disttrain_cli.spec.families.processors import budget
from disttrain_cli.spec.families.videos import video_budget
from disttrain_cli.spec.video_processor import VideoRule


def _joins(path: Path, config: Fields) -> dict[str, dict[str, Any]]:
    return {"vision": {"projector": "none"}}


def _family(model_type: str, video: VideoRule) -> Family:
    return Family(
        modules={
            "vision": Module(
                "encoder",
                "vision_config",
                architecture=f"{model_type}_vision",
                names={"": "model.visual."},
                mergers=("merger", "deepstack_merger_list"),
            ),
            "llm": Module(
                "llm",
                "text_config",
                architecture=f"{model_type}_text",
                names={"model": "model.language_model", "lm_head": "lm_head"},
                flat=True,
            ),
        },
        joins=_joins,
        processor=budget,
        image_processors=("Qwen2VLImageProcessor",),
        defaults={"image_token_id": 151655, "video_token_id": 151656},
        video=partial(video_budget, video),
    )


QWEN2_5_VL = _family("qwen2_5_vl", "qwen2_vl")
QWEN3_VL = _family("qwen3_vl", "qwen3_vl")
