"""Defaults of transformers' processor classes, for fields that a folder omits.

Only fields that are read here. `tests/spec/test_class_defaults.py` compares them with the installed
library's classes, which need torch to be imported.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from disttrain_cli.errors import SpecError

_CLIP = {
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
}
_HALVES = {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}
_EVERY = {
    "do_resize": True,
    "do_rescale": True,
    "rescale_factor": 1 / 255,
    "do_normalize": True,
    "resample": 3,
}
_CROPPED = {
    **_EVERY,
    **_CLIP,
    "size": {"shortest_edge": 224},
    "do_center_crop": True,
    "crop_size": {"height": 224, "width": 224},
}
_SPLIT = {
    **_EVERY,
    **_HALVES,
    "resample": 1,
    "size": {"longest_edge": 4 * 364},
    "max_image_size": {"longest_edge": 364},
    "do_image_splitting": True,
}
_VIDEO = {**_EVERY, "temporal_patch_size": 2, "merge_size": 2, "min_frames": 4, "max_frames": 768}

#: By class of an image processor.
IMAGE_PROCESSORS: Mapping[str, Mapping[str, Any]] = {
    "CLIPImageProcessor": _CROPPED,
    "LlavaImageProcessor": {**_CROPPED, "do_pad": False},
    "LlavaNextImageProcessor": {
        **_CROPPED,
        "image_grid_pinpoints": [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]],
    },
    "SiglipImageProcessor": {**_EVERY, **_HALVES, "size": {"height": 224, "width": 224}},
    "LlavaOnevisionImageProcessor": {
        **_EVERY,
        **_CLIP,
        "size": {"height": 384, "width": 384},
        "image_grid_pinpoints": [
            [384 * rows, 384 * columns] for rows in range(1, 7) for columns in range(1, 7)
        ],
    },
    "GotOcr2ImageProcessor": {
        **_EVERY,
        **_CLIP,
        "size": {"height": 384, "width": 384},
        "min_patches": 1,
        "max_patches": 12,
    },
    "Idefics3ImageProcessor": _SPLIT,
    "SmolVLMImageProcessor": _SPLIT,
    "Qwen2VLImageProcessor": {
        **_EVERY,
        **_CLIP,
        "size": {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 1280},
        "patch_size": 14,
        "temporal_patch_size": 2,
        "merge_size": 2,
    },
}

#: By class of a video processor.
VIDEO_PROCESSORS: Mapping[str, Mapping[str, Any]] = {
    "Qwen2VLVideoProcessor": {
        **_VIDEO,
        **_CLIP,
        "size": {"shortest_edge": 128 * 28 * 28, "longest_edge": 768 * 28 * 28},
        "patch_size": 14,
        "max_video_tokens": 128_000,
    },
    "Qwen3VLVideoProcessor": {
        **_VIDEO,
        **_HALVES,
        "size": {"shortest_edge": 128 * 32 * 32, "longest_edge": 768 * 32 * 32},
        "patch_size": 16,
        "fps": 2,
        "max_video_tokens": 768,
    },
}


def named_class(fields: Mapping[str, Any]) -> str:
    """Return the class named in an image processor's file, as AutoImageProcessor reads it.

    Empty if the file names none.
    """
    old = str(fields.get("feature_extractor_type") or "")
    given = fields.get("image_processor_type") or old.replace("FeatureExtractor", "ImageProcessor")
    return str(given).removesuffix("Fast").removesuffix("Pil")


def class_of(path: Path, fields: Mapping[str, Any], known: tuple[str, ...]) -> str:
    """Return the class of a family's image processor: the first of `known` if the file names none.

    Raises:
        SpecError: the file names a class that is not one of `known`.
    """
    name = named_class(fields) or known[0]
    if name in known:
        return name
    raise SpecError(
        f"{path}: image_processor_type {name!r} is not this family's",
        f"allowed: {', '.join(known)}",
        "Download the folder again; or train the modules by their own folders (model.modules).",
    )


def completed(fields: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return a processor's fields with its class's defaults for those that are missing or null."""
    return {**defaults, **{name: value for name, value in fields.items() if value is not None}}
