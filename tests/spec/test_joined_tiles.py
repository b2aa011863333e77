"""Places of the rows of LLaVA-NeXT's and LLaVA-OneVision's tiles, as transformers' models join
them."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from disttrain_cli.spec.heads import ImageInput
from disttrain_cli.spec.image_processor import ImageProcessor
from disttrain_cli.spec.joined_tiles import JoinedTiles

SIDE, PATCH = 4, 4  # tokens per side of a tile, pixels per token
TILE = SIDE * PATCH
RESOLUTIONS = tuple(
    (height * TILE, width * TILE) for height in range(1, 4) for width in range(1, 4)
)
NEWLINE = -7


def head_of(**fields):
    tiling = JoinedTiles(resolutions=RESOLUTIONS, **fields)
    processor = ImageProcessor(resize="tiles", height_px=TILE, width_px=TILE, tiling=tiling)
    return ImageInput(module="eye", patch_px=PATCH, max_pixels=TILE * TILE, processor=processor)


def joined(family, size, tiles):
    """The library's order of the features of an image's tiles, which are numbered."""
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
            model, features, sizes, newline, "anyres_max_9"
        )
    return found[0][0][:, 0].int().tolist()


def ours(head, size, parts):
    """What lies at the places of the tokens of an image."""
    places = head.places(size, parts)
    rows = np.concatenate(places)
    own = np.arange(parts * SIDE**2).reshape(parts, -1)
    each = np.concatenate([own, np.full((parts, SIDE), NEWLINE)], axis=1).reshape(-1)
    made = np.full(int((rows >= 0).sum()), -1)
    made[rows[rows >= 0]] = each[rows >= 0]
    return made.tolist()


@pytest.mark.parametrize("family", ["next", "onevision"])
def test_the_joined_picture_is_the_librarys(family):
    random = np.random.default_rng(0)
    head = head_of(**({"background": (1, 2, 3), "most_tiles": 9} if family == "onevision" else {}))
    for size in [(1, 300), (300, 1), (48, 48), *random.integers(1, 200, (60, 2)).tolist()]:
        parts = len(head.written([tuple(size)])[0]) - 1
        assert ours(head, tuple(size), parts) == joined(family, size, parts), size
        sizes = np.array([size] * parts)
        tokens = head.tokens_of(sizes, np.arange(parts), np.full(parts, parts))
        assert tokens.sum() == len(joined(family, size, parts))
        assert head.rows("tokens").of(SIDE**2) == SIDE**2 + SIDE == len(head.places(size, parts)[0])


def test_one_of_several_images_is_a_square_with_one_newline():
    head = head_of(background=(1, 2, 3), most_tiles=9)
    assert head.written([(30, 30), (90, 10)]) == [("", "")] * 2
    assert ours(head, (90, 10), 1) == joined("onevision", (90, 10), 1)
    assert ours(head, (90, 10), 1)[-1] == NEWLINE


def test_features_that_the_model_would_interpolate_are_refused_by_name():
    head = head_of(background=(1, 2, 3), most_tiles=4)
    assert head.written([(30, 30)])
    with pytest.raises(ValueError, match=r"12 × 12 features.*interpolate \(anyres_max_4\)"):
        head.written([(200, 200)])
    assert head.written([(200, 200), (30, 30)])  # none of several is cut
