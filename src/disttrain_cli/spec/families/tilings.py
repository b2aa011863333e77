"""Tiling rules of image processors, read from their folders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from disttrain_cli.spec.families.family import Fields
from disttrain_cli.spec.families.processors import NESTED, refuse, refused, resample, sides, whole
from disttrain_cli.spec.files import parse_json
from disttrain_cli.spec.image_processor import ImageProcessor
from disttrain_cli.spec.joined_tiles import JoinedTiles
from disttrain_cli.spec.tiling import LongestEdge, NearestRatio

SIDES, MOST_TILES = ("height", "width"), "anyres_max_"
AGAIN = "Download the folder again."
#: Files that name a tokenizer's special tokens.
NAMES = ("tokenizer_config.json", "special_tokens_map.json")


def nearest_ratio(path: Path, fields: Fields) -> ImageProcessor:
    """Return InternVL's processor rule; it always cuts, regardless of `crop_to_patches`."""
    refuse(path, fields, "do_resize", True)
    height, width = sides(path, "size", fields["size"], "height", "width")
    if height is None or width is None:
        raise refused(path, "size", fields["size"], "height and width")
    least = whole(path, "min_patches", fields["min_patches"])
    most = whole(path, "max_patches", fields["max_patches"])
    names = _special_tokens(path.parent)
    return ImageProcessor(
        resize="tiles",
        resample=resample(path, fields),
        height_px=height,
        width_px=width,
        tokens=_tokens(path.parent, "image_seq_length", 256),
        tiling=NearestRatio(
            least=least,
            most=most,
            begin=names.get("start_image_token", "<img>"),
            end=names.get("end_image_token", "</img>"),
        ),
    )


def longest_edge(path: Path, fields: Fields) -> ImageProcessor:
    """Return the processor rule of Idefics3 and SmolVLM."""
    refuse(path, fields, "do_resize", True)
    tile = _longest(path, "max_image_size", fields["max_image_size"])
    names = _special_tokens(path.parent)
    return ImageProcessor(
        resize="tiles",
        resample=resample(path, fields),
        height_px=tile,
        width_px=tile,
        tokens=_tokens(path.parent, "image_seq_len", 169),
        tiling=LongestEdge(
            longest_px=_longest(path, "size", fields["size"]),
            splits=bool(fields["do_image_splitting"]),
            around=names.get("fake_image_token", "<fake_token_around_image>"),
            whole=names.get("global_image_token", "<global-img>"),
        ),
    )


def joined(path: Path, fields: Fields, vision_aspect_ratio: str | None) -> ImageProcessor:
    """Return the processor rule of LLaVA-NeXT, or of LLaVA-OneVision.

    The latter's config.json has `vision_aspect_ratio`.
    """
    refuse(path, fields, "do_resize", True)
    tile, size = _tile(path, fields), fields["size"]
    given = fields["image_grid_pinpoints"]
    pairs = given if isinstance(given, list) else []
    if not pairs or not all(
        isinstance(one, (list, tuple))
        and len(one) == 2
        and all(isinstance(side, int) and side >= tile and side % tile == 0 for side in one)
        for one in pairs
    ):
        allowed = f"heights and widths of whole tiles of {tile} pixels, as size {size} says"
        raise refused(path, "image_grid_pinpoints", given, allowed)
    tokens = None
    background = most = None
    if vision_aspect_ratio is not None:
        background = _background(path, fields["image_mean"])
        most = _most(path, vision_aspect_ratio)
        tokens = _tokens(path.parent, "num_image_tokens")
    return ImageProcessor(
        resize="tiles",
        resample=resample(path, fields),
        height_px=tile,
        width_px=tile,
        tokens=tokens,
        tiling=JoinedTiles(
            resolutions=tuple((height, width) for height, width in pairs),
            background=background,
            most_tiles=most,
        ),
    )


def _tile(path: Path, fields: Fields) -> int:
    """Return the common side of resized images and tiles."""
    size = fields["size"]
    names = ("shortest_edge",) if isinstance(size, dict) and "shortest_edge" in size else SIDES
    given = {*sides(path, "size", size, *names)}
    if fields.get("do_center_crop"):
        given |= {*sides(path, "crop_size", fields.get("crop_size"), *SIDES)}
    tile = next(iter(given))
    if len(given) != 1 or tile is None:
        raise refused(path, "size", size, "one side for images and tiles, that of crop_size")
    return tile


def _background(path: Path, mean: Any) -> tuple[int, ...]:
    """Return the mean as bytes."""
    given = mean if isinstance(mean, (list, tuple)) else ()
    if len(given) != 3 or not all(isinstance(one, (int, float)) and 0 <= one <= 1 for one in given):
        raise refused(path, "image_mean", mean, "a number for each of RGB, 0 to 1")
    return tuple(int(one * 255) for one in given)


def _most(path: Path, ratio: str) -> int:
    number = ratio.removeprefix(MOST_TILES)
    if not ratio.startswith(MOST_TILES) or not number.isdecimal():
        raise refused(path, "vision_aspect_ratio", ratio, f"{MOST_TILES}N")
    return whole(path, "vision_aspect_ratio", int(number))


def _longest(path: Path, field: str, given: Any) -> int:
    edge = given.get("longest_edge") if isinstance(given, dict) else None
    if edge is None:
        raise refused(path, field, given, "a longest_edge")
    return whole(path, f"{field}.longest_edge", edge)


def _tokens(folder: Path, field: str, default: int | None = None) -> int | None:
    """Return the placeholders that the processor writes per tile, if the folder specifies them."""
    path = folder / NESTED
    fields = parse_json(path, "processor configuration", AGAIN) if path.exists() else None
    given = fields.get(field, default) if isinstance(fields, dict) else None
    return None if given is None else whole(path, field, given)


def _special_tokens(folder: Path) -> dict[str, str]:
    """Return the texts of the tokenizer's special tokens, by their names."""
    found: dict[str, str] = {}
    for path in (folder / name for name in NAMES):
        fields = parse_json(path, "tokenizer configuration", AGAIN) if path.exists() else {}
        for named in (fields, fields.get("extra_special_tokens")):
            tokens = named.items() if isinstance(named, dict) else ()
            texts = {
                name: one.get("content") if isinstance(one, dict) else one for name, one in tokens
            }
            found |= {
                name: text
                for name, text in texts.items()
                if name.endswith("_token") and isinstance(text, str)
            }
    return found
