"""Numbers of image processors that cut images: what they mean, and what is refused by name."""

import json
from functools import partial

import pytest

from disttrain_cli.errors import SpecError
from disttrain_cli.spec.families.defaults import IMAGE_PROCESSORS
from disttrain_cli.spec.families.tilings import joined, longest_edge, nearest_ratio
from disttrain_cli.spec.image_processor import ImageProcessor
from disttrain_cli.spec.tiling import LongestEdge, NearestRatio

INTERNVL = {**IMAGE_PROCESSORS["GotOcr2ImageProcessor"], "size": {"height": 448, "width": 448}}
IDEFICS = IMAGE_PROCESSORS["Idefics3ImageProcessor"]
LLAVA = {
    **IMAGE_PROCESSORS["LlavaNextImageProcessor"],
    "size": {"shortest_edge": 336},
    "crop_size": {"height": 336, "width": 336},
    "image_grid_pinpoints": [[336, 672], [672, 336]],
}
onevision = partial(joined, vision_aspect_ratio="anyres_max_9")
next_ = partial(joined, vision_aspect_ratio=None)


@pytest.mark.parametrize(
    ("read", "given", "fields", "said"),
    [
        (nearest_ratio, INTERNVL, {"do_resize": False}, "do_resize"),
        (nearest_ratio, INTERNVL, {"size": {"shortest_edge": 448}}, "size"),
        (nearest_ratio, INTERNVL, {"max_patches": 0}, "max_patches"),
        (nearest_ratio, INTERNVL, {"min_patches": "two"}, "min_patches"),
        (longest_edge, IDEFICS, {"size": {"height": 9, "width": 9}}, "a longest_edge"),
        (longest_edge, IDEFICS, {"max_image_size": 364}, "max_image_size"),
        (longest_edge, IDEFICS, {"do_resize": False}, "do_resize"),
        (next_, LLAVA, {"crop_size": {"height": 224, "width": 224}}, "one side for images and"),
        (next_, LLAVA, {"image_grid_pinpoints": [[336, 500]]}, "image_grid_pinpoints"),
        (next_, LLAVA, {"image_grid_pinpoints": []}, "image_grid_pinpoints"),
        (next_, LLAVA, {"image_grid_pinpoints": "(1x1),...,(6x6)"}, "image_grid_pinpoints"),
        (partial(joined, vision_aspect_ratio="anyres"), LLAVA, {}, "vision_aspect_ratio"),
        (onevision, LLAVA, {"image_mean": "grey"}, "image_mean"),
    ],
)
def test_what_no_rule_takes_is_refused_by_name(tmp_path, read, given, fields, said):
    path = tmp_path / "preprocessor_config.json"
    assert read(path, given) if said != "vision_aspect_ratio" else True
    with pytest.raises(SpecError) as refused:
        read(path, {**given, **fields})
    assert said in f"{refused.value.what}\n{refused.value.why}"


def test_the_folder_says_what_is_written_around_tiles_and_how_many_placeholders(tmp_path):
    path = tmp_path / "preprocessor_config.json"
    words = {
        "fake_image_token": {"content": "<fake>"},
        "extra_special_tokens": {"start_image_token": "<begin>", "global_image_token": "<all>"},
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(words))
    assert nearest_ratio(path, INTERNVL).tiling == NearestRatio(most=12, begin="<begin>")
    rule = LongestEdge(longest_px=1456, around="<fake>", whole="<all>")
    found = longest_edge(path, IDEFICS)
    assert found.tiling == rule and found.tokens is None
    (tmp_path / "processor_config.json").write_text("{}")
    assert longest_edge(path, IDEFICS).tokens == 169 and nearest_ratio(path, INTERNVL).tokens == 256
    (tmp_path / "processor_config.json").write_text('{"image_seq_len": 64}')
    assert longest_edge(path, IDEFICS).tokens == 64
    rule = longest_edge(path, IDEFICS).tiling
    texts = rule.written(rule.cut((800, 1000), (364, 364), alone=True))
    assert texts[:5] == (
        "<fake><row_1_col_1>",
        "<fake><row_1_col_2>",
        "<fake><row_1_col_3>",
        "<fake><row_1_col_4>",
        "\n<fake><row_2_col_1>",
    )
    assert texts[-2:] == ("\n\n<fake><all>", "<fake>") and len(texts) == 4 * 4 + 2


def test_a_picture_too_narrow_for_whole_tiles_is_named():
    """As int(49 * (1 / 49)) is 0."""
    tile = {"resize": "tiles", "height_px": 49, "width_px": 49}
    processor = ImageProcessor(**tile, tiling=LongestEdge(longest_px=49))
    assert processor.misfit(1, 5000) == "an image of 1 × 5000 pixels is too narrow to be cut"
    assert processor.misfit(5000, 1) is None
    with pytest.raises(ValueError, match="tiles need a tiling"):
        ImageProcessor(**tile)
    with pytest.raises(ValueError, match="tiles need a tiling"):
        ImageProcessor(**{**tile, "resize": "stretch"}, tiling=NearestRatio(most=2))
