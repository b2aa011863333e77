"""Fields of a folder's image processor, as transformers writes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

from disttrain_cli.errors import SpecError
from disttrain_cli.spec.families.family import Fields
from disttrain_cli.spec.files import parse_json
from disttrain_cli.spec.image_processor import Filter, ImageProcessor

#: Files of a processor; the first may hold the image processor's fields in a section of that name.
NESTED, OWN = "processor_config.json", "preprocessor_config.json"
MOST_PIXELS = 100_000_000  # of an image, as `data.max_image_pixels` allows
AGAIN = "Download the folder again, with the files of its processor."


def image_processor_fields(folder: Path) -> tuple[Path, Fields]:
    """Return the image processor's file and its fields.

    If both files exist, the nested fields have priority, as in transformers.

    Raises:
        SpecError: there is none, or it cannot be read.
    """
    for name in (NESTED, OWN):
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
        f"{folder} has no configuration of its image processor (model.folder)",
        f"needed: {OWN}, or {NESTED} with image_processor",
        AGAIN,
    )


def resample(path: Path, fields: Fields) -> Filter:
    """Return the filter of PIL's number."""
    names, given = get_args(Filter), fields["resample"]
    if isinstance(given, int) and not isinstance(given, bool) and 0 <= given < len(names):
        name: Filter = names[given]
        return name
    raise refused(path, "resample", given, f"0 to {len(names) - 1}: {', '.join(names)}")


def cropped_or_stretched(path: Path, fields: Fields) -> ImageProcessor:
    """Return the processor rule of CLIP (shorter side, then centre crop) or SigLIP (one size)."""
    refuse(path, fields, "do_resize", True)
    refuse(path, fields, "do_pad", False)
    size, how = fields["size"], resample(path, fields)
    shortest = sides(path, "size", size, "shortest_edge")[0]
    if not fields.get("do_center_crop"):
        if shortest is not None:
            raise refused(path, "do_center_crop", False, "true, where size is a shortest_edge")
        height, width = sides(path, "size", size, "height", "width")
        if height is None or width is None:
            raise refused(path, "size", size, "height and width")
        return ImageProcessor(resize="stretch", resample=how, height_px=height, width_px=width)
    height, width = sides(path, "crop_size", fields.get("crop_size"), "height", "width")
    if shortest is None and sides(path, "size", size, "height", "width") == (height, width):
        return ImageProcessor(resize="stretch", resample=how, height_px=height, width_px=width)
    if height is None or width is None or shortest is None or shortest < max(height, width):
        raise refused(path, "size", size, "a shortest_edge of at least crop_size")
    return ImageProcessor(
        resize="crop", resample=how, height_px=height, width_px=width, shortest_px=shortest
    )


def budget(path: Path, fields: Fields) -> ImageProcessor:
    """Return the processor rule of Qwen's models: whole blocks within a pixel budget."""
    refuse(path, fields, "do_resize", True)
    size = fields["size"]
    if not isinstance(size, dict):
        raise refused(path, "size", size, "shortest_edge and longest_edge")
    # min_pixels and max_pixels override size, as in transformers' class
    first = fields.get("min_pixels") or size.get("shortest_edge") or size.get("min_pixels")
    last = fields.get("max_pixels") or size.get("longest_edge") or size.get("max_pixels")
    first, last = whole(path, "min_pixels", first), whole(path, "max_pixels", last)
    if first > last:
        raise refused(path, "min_pixels", first, f"at most max_pixels ({last})")
    return ImageProcessor(
        resize="budget",
        resample=resample(path, fields),
        min_pixels=first,
        max_pixels=last,
        patch_px=whole(path, "patch_size", fields["patch_size"]),
        merge=whole(path, "merge_size", fields["merge_size"]),
    )


def refuse(path: Path, fields: Fields, field: str, only: bool) -> None:
    """Raise SpecError if a switch does not have the supported value."""
    if bool(fields.get(field, only)) != only:
        raise refused(path, field, fields[field], str(only).lower())


def refused(path: Path, field: str, given: Any, allowed: str) -> SpecError:
    """Return the error about a field of the image processor."""
    return SpecError(
        f"{path}: {field} differs from this family's image processor",
        f"given: {given!r}; allowed: {allowed}",
        "Correct it, or train the modules by their own folders (model.modules).",
    )


def whole(path: Path, field: str, given: Any) -> int:
    """Return an integer field of the image processor."""
    if isinstance(given, int) and not isinstance(given, bool) and 1 <= given <= MOST_PIXELS:
        return given
    raise refused(path, field, given, f"a whole number, 1 to {MOST_PIXELS:,}")


def sides(path: Path, field: str, given: Any, *names: str) -> tuple[int | None, ...]:
    """Return the values of a size by name; None for missing ones.

    A single number is the shortest edge, or both sides.
    """
    if not isinstance(given, dict):
        return (whole(path, field, given),) * len(names)
    return tuple(
        whole(path, f"{field}.{name}", given[name]) if given.get(name) is not None else None
        for name in names
    )
