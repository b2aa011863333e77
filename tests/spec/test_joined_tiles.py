"""Places of the rows of LLaVA-NeXT's and LLaVA-OneVision's tiles, as transformers' models join
them."""

from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from disttrain_cli.spec.heads import ImageInput
from disttrain_cli.spec.image_processor import ImageProcessor
from disttrain_cli.spec.joined_tiles import JoinedTiles, tokens
from disttrain_cli.spec.places import together

SIDE, PATCH = 4, 4  # tokens per side of a tile, pixels per token
TILE = SIDE * PATCH
RESOLUTIONS = tuple(
    (height * TILE, width * TILE) for height in range(1, 4) for width in range(1, 4)
)
NEWLINE = -7


def head_of(**fields):
    tiling = JoinedTiles(**{"resolutions": RESOLUTIONS} | fields)
    processor = ImageProcessor(resize="tiles", height_px=TILE, width_px=TILE, tiling=tiling)
    return ImageInput(module="eye", patch_px=PATCH, max_pixels=TILE * TILE, processor=processor)


def joined(family, size, tiles, most=9):
    """The library's order of the features of an image's tiles, which are numbered; interpolated
    where they are more than of `most` tiles."""
    from transformers.models.llava_next import modeling_llava_next as next_
    from transformers.models.llava_onevision import modeling_llava_onevision as onevision

    config = SimpleNamespace(
        vision_config=SimpleNamespace(image_size=TILE, patch_size=PATCH),
        image_grid_pinpoints=[list(one) for one in RESOLUTIONS],
    )
    features = torch.arange(float(tiles * SIDE**2)).reshape(1, tiles, SIDE**2, 1)
    sizes, newline = torch.tensor([[size[1], size[0]]]), torch.tensor([float(NEWLINE)])
    model = SimpleNamespace(config=config)
    if family == "next":
        found = next_.LlavaNextModel.pack_image_features(model, features, sizes, "full", newline)
    else:
        found = onevision.LlavaOnevisionModel.pack_image_features(
            model, features, sizes, newline, f"anyres_max_{most}"
        )
    return found[0][0][:, 0].numpy()


def ours(head, size, parts):
    """What lies at the places of the tokens of an image."""
    at, shares = together(head.places(size, parts))
    own = np.arange(parts * SIDE**2).reshape(parts, -1)
    each = np.concatenate([own, np.full((parts, SIDE), NEWLINE)], axis=1).reshape(-1, 1)
    made = np.zeros(len(np.unique(at[at >= 0])))
    np.add.at(made, at[at >= 0], (each * shares)[at >= 0])
    return made


@pytest.mark.parametrize("family", ["next", "onevision"])
def test_the_joined_picture_is_the_librarys(family):
    random = np.random.default_rng(0)
    head = head_of(**({"background": (1, 2, 3), "most_tiles": 9} if family == "onevision" else {}))
    for size in [(1, 300), (300, 1), (48, 48), *random.integers(1, 200, (60, 2)).tolist()]:
        parts = len(head.written([tuple(size)])[0]) - 1
        assert (ours(head, tuple(size), parts) == joined(family, size, parts)).all(), size
        check_tokens(head, size, parts, len(joined(family, size, parts)))


def check_tokens(head, size, parts, tokens):
    sizes = np.array([size] * parts)
    assert head.tokens_of(sizes, np.arange(parts), np.full(parts, parts)).sum() == tokens
    assert head.rows("tokens").of(SIDE**2) == SIDE**2 + SIDE == len(head.places(size, parts)[0].at)


def test_one_of_several_images_is_a_square_with_one_newline():
    head = head_of(background=(1, 2, 3), most_tiles=9)
    assert head.written([(30, 30), (90, 10)]) == [("", "")] * 2
    assert (ours(head, (90, 10), 1) == joined("onevision", (90, 10), 1)).all()
    assert ours(head, (90, 10), 1)[-1] == NEWLINE


@pytest.mark.parametrize("most", [1, 3, 4])
def test_features_of_large_pictures_are_interpolated(most):
    random = np.random.default_rng(most)
    head, fewer = head_of(background=(1, 2, 3), most_tiles=most), 0
    for size in [(48, 48), (300, 90), *random.integers(20, 200, (60, 2)).tolist()]:
        parts = len(head.written([tuple(size)])[0]) - 1
        found = ours(head, tuple(size), parts)
        np.testing.assert_allclose(found, joined("onevision", size, parts, most), rtol=1e-5)
        check_tokens(head, size, parts, len(found))
        fewer += len(found) < len(joined("onevision", size, parts))
    assert fewer > 20


def test_features_too_narrow_to_be_interpolated_are_refused_by_name():
    head = head_of(resolutions=((TILE, 10 * TILE),), background=(1, 2, 3), most_tiles=1)
    with pytest.raises(ValueError, match=r"2 × 40 features, too narrow .*\(anyres_max_1\)"):
        head.written([(960, 40)])
    assert head.written([(960, 80)]) and head.written([(960, 40), (30, 30)])  # none of two is cut


def test_large_pictures_have_as_many_tokens_as_the_processor_counts():
    """Of LLaVA-OneVision 7B: 27 tokens per side of a tile, up to 6 × 6 tiles, anyres_max_9."""
    from transformers import LlavaOnevisionProcessor

    side, tile = 27, 27 * 14
    sides = range(tile, 7 * tile, tile)
    resolutions = [[height, width] for height in sides for width in sides]
    processor = SimpleNamespace(
        image_processor=SimpleNamespace(image_grid_pinpoints=resolutions),
        num_image_tokens=side**2,
        vision_aspect_ratio="anyres_max_9",
    )
    processor._get_unpadded_features = partial(
        LlavaOnevisionProcessor._get_unpadded_features, processor
    )
    rule = JoinedTiles(
        resolutions=tuple(map(tuple, resolutions)), background=(1, 2, 3), most_tiles=9
    )
    for width, height in [(1280, 720), (1920, 1080), (1080, 1920), (3840, 2160), (4000, 300)]:
        cut = rule.cut((width, height), (tile, tile), True)
        expected = LlavaOnevisionProcessor._get_number_of_features(
            processor, height, width, tile, tile
        )
        assert sum(tokens((width, height), cut, side, rule)) == expected
