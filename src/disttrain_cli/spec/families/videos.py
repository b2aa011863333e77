"""Numbers of a folder's video processor, as transformers writes them, and those of its classes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import ValidationError

from disttrain_cli.errors import SpecError
from disttrain_cli.spec.families.family import Fields
from disttrain_cli.spec.families.processors import (
    AGAIN,
    NESTED,
    image_processor_fields,
    refuse,
    refused,
    resample,
)
from disttrain_cli.spec.files import parse_json
from disttrain_cli.spec.video_processor import TEMPORAL, VideoProcessor

OWN = "video_preprocessor_config.json"
LARGEST = 2**40

#: Of the classes themselves. That of Qwen2-VL samples no frames unless it is told how many: two of
#: each second, as qwen-vl-utils does.
QWEN2_VIDEO = VideoProcessor(
    rule="qwen2_vl",
    min_pixels=128 * 28 * 28,
    max_pixels=768 * 28 * 28,
    most_frame_pixels=LARGEST,
)
QWEN3_VIDEO = VideoProcessor(
    rule="qwen3_vl",
    min_pixels=128 * 32 * 32,
    max_pixels=768 * 32 * 32,
    most_frame_pixels=LARGEST,
)
#: Tokens that the classes reckon with where they cap a frame's pixels.
TOKENS = {"qwen2_vl": 128_000, "qwen3_vl": 768}
CLASSES = {"qwen2_vl": "Qwen2VLVideoProcessor", "qwen3_vl": "Qwen3VLVideoProcessor"}


def video_processor_fields(folder: Path) -> tuple[Path, Fields]:
    """The video processor's file and its fields: those of the processor's file go before its own,
    and these before the image processor's, as in transformers.

    Raises:
        SpecError: there is none, or it cannot be read.
    """
    path = folder / NESTED
    whole = parse_json(path, "processor configuration", AGAIN) if path.exists() else None
    fields = whole.get("video_processor") if isinstance(whole, dict) else None
    if isinstance(fields, dict):
        return path, fields
    path = folder / OWN
    if not path.exists():
        return image_processor_fields(folder)
    fields = parse_json(path, "video processor configuration", AGAIN)
    if isinstance(fields, dict):
        return path, fields
    raise SpecError(
        f"The video processor configuration {path} must be a mapping",
        f"given: {type(fields).__name__}",
        AGAIN,
    )


def video_budget(default: VideoProcessor, path: Path, fields: Fields) -> VideoProcessor:
    """The processor of Qwen's models; `default` where the file does not say."""
    named = fields.get("video_processor_type", CLASSES[default.rule])
    if named != CLASSES[default.rule]:
        raise refused(path, "video_processor_type", named, CLASSES[default.rule])
    refuse(path, fields, "do_resize", True)
    refuse(path, fields, "do_center_crop", False)
    if fields.get("num_frames") is not None:
        raise refused(path, "num_frames", fields["num_frames"], "nothing: fps says how many")
    frames = fields.get("temporal_patch_size", TEMPORAL)
    if frames != TEMPORAL:
        raise refused(path, "temporal_patch_size", frames, str(TEMPORAL))
    size = fields.get("size") or {}
    if not isinstance(size, dict):
        raise refused(path, "size", size, "shortest_edge and longest_edge")
    qwen2 = default.rule == "qwen2_vl"  # its class takes min_pixels and max_pixels, too
    least = (fields.get("min_pixels") if qwen2 else None) or size.get("shortest_edge")
    most = (fields.get("max_pixels") if qwen2 else None) or size.get("longest_edge")
    capped = fields.get("cap_pixels_per_frame")
    given: dict[str, Any] = {
        "fps": fields.get("fps"),
        "min_frames": fields.get("min_frames"),
        "max_frames": fields.get("max_frames"),
        "min_pixels": least,
        "max_pixels": most,
        "most_tokens": fields.get("max_video_tokens") or TOKENS[default.rule] if capped else None,
    }
    content = default.model_dump() | {name: one for name, one in given.items() if one is not None}
    try:
        return VideoProcessor.model_validate(content | {"resample": resample(path, fields)})
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "size"
        raise refused(path, where, content.get(where, size), first["msg"]) from None
