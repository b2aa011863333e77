"""Sizes that content parts state of their images, by qwen-vl-utils' keys, in every form of
conversations."""

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from PIL import Image
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

from disttrain_cli.data.index.sample_index import Index
from disttrain_cli.data.indexing.building import build_index
from disttrain_cli.data.modalities.images import Images
from disttrain_cli.data.reading import ShardReader
from disttrain_cli.data.tokenizer import read_tokenizer
from disttrain_cli.spec.heads import ImageInput, TargetInput
from disttrain_cli.spec.image_processor import ImageProcessor, PixelBudget
from disttrain_cli.spec.inputs import ModelInputs
from disttrain_cli.spec.tiling import NearestRatio
from tests.data.dataset import PROPERTY, make_run, write_tar
from tests.data.sources.talks import FORMS, talk, write

BUDGET = ImageProcessor(resize="budget", min_pixels=1024, max_pixels=4096)
#: Of a token 16 x 16 pixels; an image has at most 16 tokens, of the processor 4 at least.
HEAD = ImageInput(module="e", patch_px=8, merge=2, max_pixels=4096, processor=BUDGET)
OTHERS = {
    "stretch": ImageProcessor(resize="stretch", height_px=32, width_px=32),
    "crop": ImageProcessor(resize="crop", height_px=32, width_px=32, shortest_px=32),
    "tiles": ImageProcessor(resize="tiles", height_px=32, width_px=32, tiling=NearestRatio(most=4)),
}
PIXELS = np.random.default_rng(0).integers(0, 256, (40, 48, 3), np.uint8)


def png() -> bytes:
    file = io.BytesIO()
    Image.fromarray(PIXELS).save(file, "PNG")
    return file.getvalue()


PNG = png()
#: Height and width of an image of 40 x 48 pixels by what its part states.
SIZES: list[tuple[dict[str, Any], tuple[int, int]]] = [
    ({}, (32, 48)),
    ({"min_pixels": 256, "max_pixels": 256}, (16, 16)),
    ({"max_pixels": 512}, (16, 16)),
    ({"max_pixels": 1100.0}, (16, 32)),
    ({"min_pixels": 3000}, (64, 64)),
    ({"resized_height": 16, "resized_width": 32}, (16, 32)),
    ({"resized_height": 60, "resized_width": 3}, (64, 16)),
    ({"resized_height": 64, "resized_width": 64, "max_pixels": 256}, (64, 64)),
    ({"min_pixels": None, "max_pixels": None, "resized_height": None}, (32, 48)),
    ({"max_pixels": 10**9}, (32, 48)),
]
BAD = {
    "messages[0] has an image with `max_pixels` '512': a whole number": {"max_pixels": "512"},
    "`max_pixels` 0: a whole": {"max_pixels": 0},
    "`min_pixels` -3: a whole": {"min_pixels": -3},
    "`min_pixels` 3.5: a whole": {"min_pixels": 3.5},
    "`max_pixels` True: a whole": {"max_pixels": True},
    "`resized_height` [16]: a whole": {"resized_height": [16], "resized_width": 16},
    f"`max_pixels` {10**30}: a whole": {"max_pixels": 10**30},
    "an image with `resized_height` 16: `resized_height` and `resized_width` go together": {
        "resized_height": 16
    },
    "`max_pixels` 100: a token of the image covers 256 pixels": {"max_pixels": 100},
    "`min_pixels` must not be more than `max_pixels`": {"min_pixels": 600, "max_pixels": 512},
    "`min_pixels` 5000: an image has at most 4096 pixels": {"min_pixels": 5000},
    "an image has at most 4096 pixels": {"resized_height": 80, "resized_width": 64},
    "16 × 4000 pixels: one side is more than 200 times": {
        "resized_height": 4000,
        "resized_width": 16,
    },
}


def indexed(folder: Path, head: ImageInput = HEAD, **data: Any) -> tuple[Index, ShardReader]:
    inputs = ModelInputs(llm="llm", vocabulary=261, sequence_length=128, heads=[head])
    run = make_run(folder, [{"path": "data"}], max_bad_fraction=1.0, **data)
    index = build_index(run, inputs)
    return index, ShardReader(index, read_tokenizer(run))


@pytest.mark.parametrize("form", FORMS)
def test_images_have_the_size_that_their_part_states(tmp_path: Path, form: str) -> None:
    """Two images of each conversation: the order of the statements is that of the images."""
    many = [[{}, keys] for keys, _ in SIZES] if form != "beside" else [[keys] for keys, _ in SIZES]
    write(tmp_path / "data", form, many, PNG)
    index, reader = indexed(tmp_path)
    assert not index.skipped
    for row, (_, size) in enumerate(SIZES):
        first, last = index.segment_start[row : row + 2].tolist()
        images = [at for at in range(first, last) if index.kinds[at]]
        assert len(images) == len(many[row])
        assert (index.grids[images[-1]] * 8).tolist() == list(size)
        assert index.tokens[images[-1]] == size[0] * size[1] // 256
        assert [(index.grids[at] * 8).tolist() for at in images[:-1]] == [[32, 48]] * (
            len(images) - 1
        )
        assert (HEAD.grids([index.numbers_of(images[-1])])[0] * 8).tolist() == list(size)
        out = np.zeros((3, *size), np.uint8)
        grid = tuple(index.grids[images[-1]].tolist())
        Images().decode(reader.file(row, images[-1]), HEAD, grid, out)
        expected = Image.fromarray(PIXELS).resize(size[::-1], Image.Resampling.BICUBIC)
        assert np.array_equal(out.transpose(1, 2, 0), np.asarray(expected))
        reader.texts(row)


@pytest.mark.parametrize("form", ["lines", "tar", "inside image_url"])
def test_what_is_no_size_is_skipped_by_name(tmp_path: Path, form: str) -> None:
    write(tmp_path / "data", form, [*([one] for one in BAD.values()), [{}]], PNG)
    index, _ = indexed(tmp_path)
    assert len(index) == 1
    for skipped, reason in zip(index.skipped, BAD, strict=True):
        assert reason in skipped.reason


def test_statements_go_with_the_mark_of_their_part(tmp_path: Path) -> None:
    """Among marks in texts, and parts that have the index of their image."""
    small, tall = {"max_pixels": 256}, {"resized_height": 64, "resized_width": 16}
    marked = [{"type": "text", "text": "<image> and <image>"}, {"type": "image", **small}]
    indexed_ = [{"type": "image", "index": 1, **tall}, {"type": "image", "index": 0}]
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "p.png").write_bytes(PNG)
    records = [
        {"images": ["p.png"] * 3, "messages": talk(*marked)},
        {"images": ["p.png"] * 2, "messages": talk(*indexed_)},
    ]
    (folder / "a.jsonl").write_text("\n".join(map(json.dumps, records)))
    index, _ = indexed(tmp_path)
    assert index.tokens[index.kinds > 0].tolist() == [6, 6, 1, 4, 6]


def test_stated_sizes_are_not_left_unread(tmp_path: Path) -> None:
    write(tmp_path / "data", "lines", [[{**SIZES[1][0], "other": 3}]], PNG)
    index, _ = indexed(tmp_path)
    assert index.unread_keys == [{"part key `other`": 1}]


@pytest.mark.parametrize("rule", OTHERS)
def test_models_without_a_budget_refuse_one_by_name(tmp_path: Path, rule: str) -> None:
    write(tmp_path / "data", "lines", [[{"max_pixels": 512}], [{}]], PNG)
    index, _ = indexed(tmp_path, HEAD.model_copy(update={"processor": OTHERS[rule]}))
    (skipped,) = index.skipped
    assert skipped.reason == (
        "an image with `max_pixels` 512: the model's image processor resizes all images by one rule"
    )
    assert len(index) == 1


def test_towers_without_a_published_processor_have_one_too(tmp_path: Path) -> None:
    write(tmp_path / "data", "lines", [[keys] for keys, _ in SIZES[1:]], PNG)
    index, _ = indexed(tmp_path, HEAD.model_copy(update={"processor": None}))
    assert not index.skipped
    got = (index.grids[index.kinds > 0] * 8).tolist()
    assert got == [list(size) for _, size in SIZES[1:]][:7] + [[32, 48]] * 2


@pytest.mark.parametrize("size", [(1, 201), (700, 3), (1, 200)])
def test_sides_too_unlike_are_refused_where_the_processor_refuses(
    tmp_path: Path, size: tuple[int, int]
) -> None:
    file = io.BytesIO()
    Image.new("RGB", size).save(file, "PNG")
    write(tmp_path / "data", "lines", [[{}]], file.getvalue())
    write_tar(tmp_path / "data2" / "0.tar", [("b.png", PNG), ("b.txt", b"words")])
    inputs = ModelInputs(llm="llm", vocabulary=261, sequence_length=128, heads=[HEAD])
    sources = [{"path": "data"}, {"path": "data2"}]
    skipped = build_index(make_run(tmp_path, sources, max_bad_fraction=1.0), inputs).skipped
    expected = (
        f"an image of {size[0]} × {size[1]} pixels: one side is more than 200 times the other"
    )
    assert [one.reason for one in skipped] == [expected] * (max(size) > 200)


def test_segments_of_tars_state_them_too(tmp_path: Path) -> None:
    segments = [
        {"type": "image", "file": "p.png", "max_pixels": 256},
        {"type": "text", "value": "A"},
    ]
    drawn = [{**segments[0], "generate": True}, segments[1]]
    filmed = [{**segments[0], "type": "video"}, segments[1]]
    files = [
        (f"{key}.json", {"segments": one})
        for key, one in (("a", segments), ("b", drawn), ("c", filmed))
    ]
    members = [(name, json.dumps(value).encode()) for name, value in files]
    write_tar(tmp_path / "data" / "0.tar", [*members, ("p.png", PNG)])
    target = TargetInput(module="g", size_px=16, context_tokens=4, latent_pixels=4)
    inputs = ModelInputs(llm="llm", vocabulary=261, sequence_length=128, heads=[HEAD, target])
    index = build_index(make_run(tmp_path, [{"path": "data"}], max_bad_fraction=1.0), inputs)
    assert [index.keys[0], index.tokens[0]] == ["a", 1]
    assert [one.key for one in index.skipped] == ["b", "c"]
    assert "images to generate have no separate pixel budget" in index.skipped[0].reason
    assert index.skipped[1].reason == "segments[0] has a pixel budget, which only images have"


def test_equal_conversations_about_an_image_of_two_sizes_are_no_duplicates(tmp_path: Path) -> None:
    many: list[list[dict[str, Any]]] = [[{}], [{"max_pixels": 256}], [{"max_pixels": 300}], [{}]]
    write(tmp_path / "data", "lines", many, PNG)
    index, _ = indexed(tmp_path, deduplicate=True)
    assert index.repeated is not None
    assert index.repeated.tolist() == [False, False, True, True]


@PROPERTY
@given(
    size=st.tuples(st.integers(1, 3000), st.integers(1, 3000)),
    bounds=st.tuples(st.integers(256, 4096), st.integers(256, 4096)),
)
def test_sizes_are_those_of_smart_resize(size: tuple[int, int], bounds: tuple[int, int]) -> None:
    assume(max(size) <= 200 * min(size))
    least, most = sorted(bounds)
    (width, height) = HEAD.budgeted(size, PixelBudget(least, most))
    assert (-height, -width) == smart_resize(*size[::-1], 16, least, most)
