"""Content parts of a turn: texts, and images, videos and clips, each with the name of its file.

Supported are the formats of transformers (`image`, `url`, `path` or `base64` of a part), OpenAI
(`image_url`), Anthropic (`source`), qwen-vl-utils (parts without a `type`) and of datasets whose
parts have the `index` of one of the record's images. A null key counts as absent: tables give every
part the keys of all.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from disttrain_cli.data.sources.pixel_budgets import KEYS as BUDGET_KEYS
from disttrain_cli.data.sources.pixel_budgets import budget_of
from disttrain_cli.data.sources.samples import DATA, PartFile, clean, holds

#: Types of parts by the type of their file.
MEDIA_OF = {key: media for media in ("image", "video", "audio") for key in (media, f"{media}_url")}
TYPES = ("text", *MEDIA_OF)
#: Keys that name a part's file, besides that of its type.
NAMES = ("url", "path", "base64", "source")
#: Keys of a part that are read.
READ = frozenset(("type", "index", *TYPES, *NAMES)) | BUDGET_KEYS
#: Keys of a video that select its frames or their size (qwen-vl-utils).
OF_FRAMES = (
    *("fps", "sample_fps", "raw_fps", "nframes", "num_frames", "min_frames", "max_frames"),
    *("video_start", "video_end", "start", "end", "total_pixels", "min_pixels", "max_pixels"),
    *("resized_height", "resized_width"),
)


def read_part(part: Any, where: str) -> str | PartFile:
    """Return the text of a part, or its file.

    Raises:
        ValueError: it is not valid, or has a meaning that is not supported.
    """
    if isinstance(part, str):
        return clean(part)
    fields = part if isinstance(part, dict) else {}
    types = [key for key in TYPES if holds(fields.get(key))]
    type_ = fields.get("type") or (types[0] if len(types) == 1 else "text" if not types else None)
    if type_ == "text" and isinstance(text := fields.get("text"), str):
        if other := next((key for key in types if key != "text"), None):
            raise ValueError(f"{where} has a part with `text` and `{other}`: write two parts")
        return clean(text)
    if not isinstance(type_, str) or type_ == "text":
        raise ValueError(f"{where} has a part that is neither a text nor an image, video or clip")
    if type_ not in MEDIA_OF:
        raise ValueError(f"{where} has a part of the type {type_!r}, which is not supported")
    media = MEDIA_OF[type_]
    if other := next((key for key in types if MEDIA_OF.get(key) != media), None):
        raise ValueError(f"{where} has a part with `{type_}` and `{other}`: write two parts")
    chosen = [key for key in OF_FRAMES if fields.get(key) is not None] if media == "video" else []
    if chosen:
        raise ValueError(
            f"{where} has a video with `{chosen[0]}`, which is not supported (data.video is)"
        )
    file = _file(fields, media, where)
    return file._replace(budget=budget_of(fields, where)) if media == "image" else file


def _file(part: Mapping[str, Any], media: str, where: str) -> PartFile:
    """Return the file named by an image or video part."""
    keys = [key for key in (media, f"{media}_url", *NAMES) if holds(part.get(key))]
    names = {_name(part[key], key, where) for key in keys}
    if len(names) > 1:
        named = ", ".join(f"`{key}`" for key in keys)
        raise ValueError(f"{where} has a part that names several files: {named}")
    index = part.get("index")
    if index is None or names:
        return PartFile(media, next(iter(names), ""))
    if isinstance(index, bool) or not isinstance(index, int | float) or index % 1:
        raise ValueError(f"{where} has a part with the index {index!r}, which is not a number")
    return PartFile(media, place=int(index))


def _name(value: Any, key: str, where: str) -> str:
    """Return the name of a file at a key of a part, or the data URI that contains it."""
    if key == "base64" and isinstance(value, str):
        return value if value.startswith(DATA) else f"{DATA};base64,{value}"
    if isinstance(value, dict):
        if value.get("bytes"):
            raise ValueError(
                f"{where} has bytes at `{key}`: they are read from a column of images, not in parts"
            )
        if key == "source" and value.get("type") == "base64":
            return _name(value.get("data"), "base64", where)
        value = value.get("url") or value.get("path")
    if isinstance(value, list):
        raise ValueError(f"{where} has a file given as a list of frames, which is not supported")
    if not isinstance(value, str):
        raise ValueError(f"{where} has at `{key}` neither a name nor a data URI")
    return value
