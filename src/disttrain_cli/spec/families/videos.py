"""Fields of a folder's video processor, as transformers writes them, and its classes' defaults."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import ValidationError

from disttrain_cli.errors import SpecError
from disttrain_cli.spec.families.defaults import VIDEO_PROCESSORS, completed
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
from disttrain_cli.spec.video_processor import TEMPORAL, VideoProcessor, VideoRule

OWN = "video_preprocessor_config.json"
LARGEST = 2**40

CLASSES = {"qwen2_vl": "Qwen2VLVideoProcessor", "qwen3_vl": "Qwen3VLVideoProcessor"}


def video_processor_fields(folder: Path) -> tuple[Path, Fields]:
    """Return the video processor's file and its fields.

    The processor's file has priority over the video processor's own, and that over the image
    processor's, as in transformers.

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


def completed_video(rule: VideoRule, fields: Fields) -> Fields:
    """Return a video processor's fields, completed with its class's defaults."""
    return completed(fields, VIDEO_PROCESSORS[CLASSES[rule]])


def video_budget(rule: VideoRule, path: Path, fields: Fields) -> VideoProcessor:
    """Return the video processor rule of Qwen's models.

    Qwen2-VL's class samples no frames unless their number is specified: two per second, as in
    qwen-vl-utils.
    """
    named = fields.get("video_processor_type", CLASSES[rule])
    if named != CLASSES[rule]:
        raise refused(path, "video_processor_type", named, CLASSES[rule])
    fields = completed_video(rule, fields)
    refuse(path, fields, "do_resize", True)
    refuse(path, fields, "do_center_crop", False)
    if fields.get("num_frames") is not None:
        raise refused(path, "num_frames", fields["num_frames"], "nothing: fps says how many")
    frames = fields["temporal_patch_size"]
    if frames != TEMPORAL:
        raise refused(path, "temporal_patch_size", frames, str(TEMPORAL))
    size = fields["size"]
    if not isinstance(size, dict):
        raise refused(path, "size", size, "shortest_edge and longest_edge")
    qwen2 = rule == "qwen2_vl"  # its class also accepts min_pixels and max_pixels
    content: dict[str, Any] = {
        "rule": rule,
        "resample": resample(path, fields),
        "fps": fields.get("fps", 2.0),
        "min_frames": fields["min_frames"],
        "max_frames": fields["max_frames"],
        "min_pixels": (fields.get("min_pixels") if qwen2 else None) or size.get("shortest_edge"),
        "max_pixels": (fields.get("max_pixels") if qwen2 else None) or size.get("longest_edge"),
        "most_frame_pixels": LARGEST,
        "most_tokens": fields["max_video_tokens"] if fields.get("cap_pixels_per_frame") else None,
    }
    try:
        return VideoProcessor.model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "size"
        raise refused(path, where, content.get(where, size), first["msg"]) from None
