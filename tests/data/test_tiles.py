"""Tiles of images of many sizes, pixel for pixel those of transformers' image processors."""

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from disttrain_cli.data.decoding import decode_tiles
from disttrain_cli.spec.heads import ImageInput
from tests.data.test_parts import picture
from tests.data.tiled import FAMILIES, PATCH, TILE, head_of, written

RAW = {"do_rescale": False, "do_normalize": False, "return_tensors": "np"}
#: By name: family, numbers that differ from its usual ones, arguments of a call.
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "internvl": ("internvl", {}, {"crop_to_patches": True}),
    "internvl, several at least": (
        "internvl",
        {"min_patches": 3, "max_patches": 8, "resample": 2},
        {"crop_to_patches": True},
    ),
    "internvl, never cut": ("internvl", {"max_patches": 1}, {"crop_to_patches": True}),
    "internvl, no squares": (
        "internvl",
        {"size": {"height": TILE, "width": TILE + 2 * PATCH}},
        {"crop_to_patches": True},
    ),
    "idefics3": ("idefics3", {}, {"return_row_col_info": True}),
    "idefics3, no whole tiles": (
        "idefics3",
        {"size": {"longest_edge": 57}},
        {"return_row_col_info": True},
    ),
    "idefics3, never cut": (
        "idefics3",
        {"do_image_splitting": False},
        {"return_row_col_info": True},
    ),
    "llava_next": ("llava_next", {}, {}),
    "llava_onevision": ("llava_onevision", {"resample": 2}, {}),
}


def sizes() -> list[tuple[int, int]]:
    """Widths and heights: odd ones, whole tiles, long and narrow ones."""
    random = np.random.default_rng(3)
    drawn = [(int(w), int(h)) for w, h in random.integers(4, 260, (24, 2))]
    return [(16, 16), (32, 16), (48, 96), (17, 16), (4, 300), (300, 5), *drawn]


def ours(head: ImageInput, file: bytes, parts: int) -> list[Any]:
    assert head.processor is not None and head.processor.fixed_px is not None
    outs = [(part, np.zeros((3, *head.processor.fixed_px), np.uint8)) for part in range(parts)]
    decode_tiles(file, head, parts, outs[::-1])
    return [out for _, out in outs]


@pytest.mark.parametrize("case", CASES)
def test_tiles_of_any_size_are_the_processors(tmp_path: Path, case: str) -> None:
    family, fields, call = CASES[case]
    processor = FAMILIES[family][0](**fields)
    head = head_of(written(tmp_path / "words", processor), family)
    for size in sizes():
        file = picture(*size)
        found = processor.image_processor([Image.open(io.BytesIO(file))], **RAW, **call)
        theirs = found["pixel_values"].reshape(-1, *found["pixel_values"].shape[-3:])
        (texts,) = head.written([size])
        assert len(texts) - 1 == len(theirs), size
        for tile, expected in zip(ours(head, file, len(theirs)), theirs, strict=True):
            assert np.array_equal(tile, expected), size


def test_one_of_several_images_is_filled_up_to_a_square(tmp_path: Path) -> None:
    """With the processor's mean, cut down to a byte."""
    processor = FAMILIES["llava_onevision"][0](image_mean=[0.1, 0.5, 0.9])
    head = head_of(written(tmp_path / "words", processor), "llava_onevision")
    for size in sizes():
        files = [picture(*size), picture(20, 30)]
        images = [Image.open(io.BytesIO(file)) for file in files]
        theirs = processor.image_processor([images], **RAW)["pixel_values"]
        for file, expected in zip(files, theirs, strict=True):
            (tile,) = ours(head, file, 1)
            assert np.array_equal(tile, expected[0]), size


def test_an_image_that_becomes_other_parts_than_indexed_is_refused(tmp_path: Path) -> None:
    head = head_of(written(tmp_path / "words", FAMILIES["internvl"][0]()), "internvl")
    with pytest.raises(ValueError, match="an image of 7 parts, 3 when it was indexed"):
        ours(head, picture(50, 30), 3)
    decode_tiles(picture(50, 30), head, 0, ())  # for its errors alone
    with pytest.raises(ValueError, match="truncated png"):
        decode_tiles(picture(50, 30)[:-20], head, 0, ())


def test_a_grey_encoder_reads_tiles_too(tmp_path: Path) -> None:
    head = head_of(written(tmp_path / "words", FAMILIES["llava_next"][0]()), "llava_next")
    grey = head.model_copy(update={"channels": 1, "mean": (0.5,), "std": (0.5,)})
    outs = [(part, np.zeros((1, TILE, TILE), np.uint8)) for part in range(3)]
    decode_tiles(picture(40, 16), grey, 3, outs)
    assert all(out.any() for _, out in outs)
