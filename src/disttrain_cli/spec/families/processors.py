"""Numbers of a folder's image processor, as transformers writes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

from disttrain_cli.errors import SpecError
from disttrain_cli.spec.families.family import Fields
from disttrain_cli.spec.files import parse_json
from disttrain_cli.spec.image_processor import Filter, ImageProcessor

#: Files of a processor; the first may hold the image processor's numbers in a field of that name.
NESTED, OWN = "processor_config.json", "preprocessor_config.json"
AGAIN = "Download the folder again, with the files of its processor."


def image_processor_fields(folder: Path) -> tuple[Path, Fields]:
    """The image processor's file and its fields.

    Raises:
        SpecError: there is none, or it cannot be read.
    """
    for name in (OWN, NESTED):
        path = folder / name
        if not path.exists():
            continue
        fields = parse_json(path, "image processor configuration", AGAIN)
        if name == NESTED:
            fields = fields.get("image_processor") if isinstance(fields, dict) else fields
        if isinstance(fields, dict):
            return path, fields
        if name == OWN:
            raise SpecError(
                f"The image processor configuration {path} must be a mapping",
                f"given: {type(fields).__name__}",
                AGAIN,
            )
    raise SpecError(
        f"{folder} says nothing of its image processor (model.folder)",
        f"needed: {OWN}, or {NESTED} with image_processor",
        AGAIN,
    )


def resample(path: Path, fields: Fields, default: Filter = "bicubic") -> Filter:
    """The filter that PIL's number names."""
    names, given = get_args(Filter), fields.get("resample", names_index(default))
    if given is None:
        return default
    if isinstance(given, int) and not isinstance(given, bool) and 0 <= given < len(names):
        name: Filter = names[given]
        return name
    raise refused(path, "resample", given, f"0 to {len(names) - 1}: {', '.join(names)}")


def names_index(name: Filter) -> int:
    """PIL's number of a filter."""
    return get_args(Filter).index(name)


def cropped_or_stretched(path: Path, fields: Fields, crop: bool) -> ImageProcessor:
    """The processor of CLIP (shorter side, then the middle) or SigLIP (one size); `crop`: whether
    the middle is taken where the file does not say so."""
    refuse(path, fields, "do_resize", True)
    refuse(path, fields, "do_pad", False)
    size, how = fields.get("size"), resample(path, fields)
    shortest = size if isinstance(size, int) else _sides(path, "size", size, "shortest_edge")[0]
    if not fields.get("do_center_crop", crop):
        if shortest is not None:
            raise refused(path, "do_center_crop", False, "true, where size is a shortest_edge")
        height, width = _sides(path, "size", size, "height", "width")
        return ImageProcessor(resize="stretch", resample=how, height_px=height, width_px=width)
    cut = fields.get("crop_size", size)
    height, width = (
        (cut, cut) if isinstance(cut, int) else _sides(path, "crop_size", cut, "height", "width")
    )
    if shortest is None and _sides(path, "size", size, "height", "width") == (height, width):
        return ImageProcessor(resize="stretch", resample=how, height_px=height, width_px=width)
    if shortest is None or None in (height, width) or shortest < max(height, width):
        raise refused(path, "size", size, "a shortest_edge of at least crop_size")
    return ImageProcessor(
        resize="crop", resample=how, height_px=height, width_px=width, shortest_px=shortest
    )


def budget(path: Path, fields: Fields, least: int, most: int) -> ImageProcessor:
    """The processor of Qwen's models: whole blocks within a pixel budget; `least` and `most` where
    the file does not say them."""
    refuse(path, fields, "do_resize", True)
    size = fields.get("size") or {}
    if not isinstance(size, dict):
        raise refused(path, "size", size, "shortest_edge and longest_edge")
    # numbers of their own go before those of size, as in transformers' class
    first = fields.get("min_pixels") or size.get("shortest_edge") or size.get("min_pixels") or least
    last = fields.get("max_pixels") or size.get("longest_edge") or size.get("max_pixels") or most
    for field, value in (("min_pixels", first), ("max_pixels", last)):
        if not isinstance(value, int) or value < 1:
            raise refused(path, field, value, "a number of pixels")
    if first > last:
        raise refused(path, "min_pixels", first, f"at most max_pixels ({last})")
    return ImageProcessor(
        resize="budget",
        resample=resample(path, fields),
        min_pixels=first,
        max_pixels=last,
        patch_px=fields.get("patch_size"),
        merge=fields.get("merge_size"),
    )


def refuse(path: Path, fields: Fields, field: str, only: bool) -> None:
    """Raise SpecError where a switch has the other value."""
    if bool(fields.get(field, only)) != only:
        raise refused(path, field, fields[field], str(only).lower())


def refused(path: Path, field: str, given: Any, allowed: str) -> SpecError:
    """The error of a field of the image processor."""
    return SpecError(
        f"{path}: {field} is not what this family's image processor does here",
        f"given: {given!r}; allowed: {allowed}",
        "Correct it, or train the modules by their own folders (model.modules).",
    )


def _sides(path: Path, field: str, given: Any, *names: str) -> tuple[Any, ...]:
    """Values of a size by name; None where it has them not."""
    if not isinstance(given, dict):
        raise refused(path, field, given, f"a mapping with {' and '.join(names)}")
    return tuple(given.get(name) for name in names)
