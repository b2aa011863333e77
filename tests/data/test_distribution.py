"""Every shipped distribution: sizes that fit, means as asked for, marginals as stated, equal on
every machine."""

from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from disttrain_cli.data.distribution import draw, image_sizes, read_distribution
from disttrain_cli.data.epochs.mixture import Mixture
from disttrain_cli.data.index.sample_index import read_index
from disttrain_cli.data.indexing.building import build_index, open_index
from disttrain_cli.data.ordering.assigning import assign, count_costs
from disttrain_cli.data.ordering.loads import replica_loads
from disttrain_cli.data.packing import SequenceStream, pack
from disttrain_cli.data.sizes import sizes_of
from disttrain_cli.data.statistics import describe_data
from disttrain_cli.errors import DataError, SpecError
from disttrain_cli.spec.heads import ImageInput, TargetInput
from disttrain_cli.spec.image_processor import ImageProcessor
from disttrain_cli.spec.index import IMAGE, SAMPLE_SPECIALS, TARGET, TEXT
from disttrain_cli.spec.inputs import ModelInputs
from disttrain_cli.spec.joined_tiles import JoinedTiles
from disttrain_cli.spec.runfile import Run, RunFile
from disttrain_cli.spec.runfile.data import DistributionSpec
from disttrain_cli.spec.tiling import LongestEdge, NearestRatio
from tests.cases import first_fast
from tests.data.dataset import PROPERTY, make_layout, unit

NAMES = [
    entry.name.removesuffix(".yaml")
    for entry in (files("disttrain_cli") / "templates" / "distributions").iterdir()
]
WHOLE = [name for name in NAMES if read_distribution(name).document_tokens is None]
INPUTS = ModelInputs(
    llm="llm",
    vocabulary=32_000,
    sequence_length=8192,
    heads=[
        ImageInput(module="encoder", patch_px=14, merge=2, max_pixels=512 * 512),
        TargetInput(module="generator", size_px=512, context_tokens=77, latent_pixels=4096),
    ],
)


def make_run(folder: Path, **distribution: Any) -> Run:
    file = RunFile.model_validate(
        {
            "name": "t",
            "model": {"modules": {"llm": {"kind": "llm", "architecture": "llama"}}},
            "data": {"distribution": distribution},
            "train": {"global_batch_size": 48, "steps": 2},
        }
    )
    return Run(path=folder / "disttrain.yaml", file=file)


@pytest.mark.parametrize("name", WHOLE)
@pytest.mark.parametrize(("read", "generated"), [(8, 8), (16, 16), (1, 0), (0, 2.5)])
def test_means_are_exact_and_every_document_fills_its_sequence(
    name: str, read: float, generated: float
) -> None:
    spec = DistributionSpec(
        name=name, images_per_sequence=read, generated_per_sequence=generated, sequences=1000
    )
    drawn = draw(spec, INPUTS)
    lengths = np.add.reduceat(drawn.tokens, drawn.segment_start[:-1]) + SAMPLE_SPECIALS
    assert set(lengths) == {INPUTS.sequence_length} and len(lengths) == 1000
    assert (drawn.kinds == IMAGE).sum() == 1000 * read and (
        drawn.kinds == TARGET
    ).sum() == 1000 * generated
    assert (drawn.tokens[drawn.kinds == TARGET] == 77).all() and (drawn.tokens > 0).all()
    assert (
        drawn.tokens[drawn.kinds == IMAGE].tolist()
        == (drawn.grids.prod(axis=1)[drawn.kinds == IMAGE] // 4).tolist()
    )
    assert (drawn.kinds[drawn.segment_start[1:] - 1] == TEXT).all()


LONG = INPUTS.model_copy(update={"sequence_length": 131_072})


def test_long_documents_are_as_long_as_stated_and_fill_the_sequences(tmp_path: Path) -> None:
    spec = {"name": "long-documents", "images_per_sequence": 64, "generated_per_sequence": 0}
    drawn = draw(DistributionSpec(**spec, sequences=2000), LONG)
    lengths = np.add.reduceat(drawn.tokens, drawn.segment_start[:-1]) + SAMPLE_SPECIALS
    assert lengths.max() == 131_072 and (drawn.tokens > 0).all()
    assert 0 <= lengths.sum() - 2000 * 131_072 < 131_072
    assert ((lengths >= 8192) & (lengths <= 65_536)).mean() == pytest.approx(0.61, abs=0.02)
    assert (lengths == 131_072).mean() == pytest.approx(0.05, abs=0.01)
    form = read_distribution("long-documents").document_tokens
    assert form is not None
    mean = form.median * np.exp(form.sigma**2 / 2)
    assert mean == pytest.approx(38_136, rel=1e-3)
    images = drawn.kinds == IMAGE
    assert images.sum() == 2000 * 64
    document = np.repeat(np.arange(len(lengths)), np.diff(drawn.segment_start))
    counts = np.bincount(document[images], minlength=len(lengths))
    long = lengths > np.median(lengths)  # pictures go with the length
    each = counts[long].sum() / lengths[long].sum(), counts[~long].sum() / lengths[~long].sum()
    assert each[0] == pytest.approx(each[1], rel=0.1)
    index = open_index(make_run(tmp_path, **spec, sequences=200), LONG)
    packing = pack(Mixture(index, 0), 0)
    assert packing.fill_fraction > 0.98
    assert packing.tokens.max() <= 131_072 and len(index) > 3 * len(packing)
    work = packing.length_sq / 131_072**2  # of attention, from sequence to sequence
    assert work.max() == 1.0 and work.min() < 0.3


def test_long_videos_are_minutes_of_pairs_of_frames(tmp_path: Path) -> None:
    spec = {"name": "long-videos", "images_per_sequence": 640, "generated_per_sequence": 0}
    head = ImageInput(module="image_encoder", patch_px=16, merge=2, max_pixels=512 * 512)
    inputs = LONG.model_copy(update={"heads": [head]})
    drawn = draw(DistributionSpec(**spec, sequences=500), inputs)
    frames = drawn.kinds == IMAGE
    assert frames.sum() == 500 * 640
    each = drawn.tokens[frames].mean()  # 390 seconds of two frames, with timestamps
    form = read_distribution("long-videos").document_tokens
    assert form is not None
    mean = form.median * np.exp(form.sigma**2 / 2)
    assert mean == pytest.approx(390 * (each + 8), rel=0.03)
    lengths = np.add.reduceat(drawn.tokens, drawn.segment_start[:-1]) + SAMPLE_SPECIALS
    assert (lengths == 131_072).mean() == pytest.approx(0.11, abs=0.03)
    packing = pack(Mixture(open_index(make_run(tmp_path, **spec, sequences=100), inputs), 0), 0)
    assert packing.fill_fraction > 0.95 and packing.tokens.max() <= 131_072


TILE = {"resize": "tiles", "height_px": 448, "width_px": 448}
SIDES = (448, 896, 1344)
TILINGS = {
    "nearest ratio": NearestRatio(most=12),
    "longest edge": LongestEdge(longest_px=4 * 448),
    "joined": JoinedTiles(
        resolutions=tuple(
            (448 * rows, 448 * columns) for rows in (1, 2, 3) for columns in (1, 2, 3)
        ),
        background=(1, 2, 3),
        most_tiles=4,
    ),
}


@pytest.mark.parametrize("rule", first_fast(TILINGS))
def test_images_that_are_cut_come_in_parts(rule: str) -> None:
    processor = ImageProcessor(**TILE, tiling=TILINGS[rule])
    eye = ImageInput(
        module="encoder", patch_px=14, merge=2, max_pixels=448 * 448, processor=processor
    )
    inputs = INPUTS.model_copy(update={"heads": [eye, INPUTS.heads[1]]})
    asked = {"images_per_sequence": 1, "generated_per_sequence": 2, "min_side_px": 400}
    drawn = draw(DistributionSpec(sequences=200, **asked), inputs)
    lengths = np.add.reduceat(drawn.tokens, drawn.segment_start[:-1]) + SAMPLE_SPECIALS
    assert set(lengths) == {INPUTS.sequence_length}
    tiles = drawn.kinds == IMAGE
    assert (drawn.kinds == TARGET).sum() == 400 and (drawn.grids[tiles] == 32).all()
    begins = tiles & (np.roll(drawn.kinds, 1) == TEXT)  # a caption goes before an image
    assert begins.sum() == 200 and 2 * 200 < tiles.sum() < 20 * 200
    if rule != "joined":
        assert (drawn.tokens[tiles] == 256).all()
    else:  # the whole image has no newline, the others lose what held no image
        assert (drawn.tokens[begins] == 256).all() and drawn.tokens[tiles].max() <= 256 + 16


@given(st.floats(0, 3), st.floats(0, 10), st.integers(1, 60), st.integers(300, 2000))
@PROPERTY
def test_whatever_is_asked_for_fits_or_is_refused(
    read: float, generated: float, sequences: int, length: int
) -> None:
    spec = DistributionSpec(
        images_per_sequence=read, generated_per_sequence=generated, sequences=sequences
    )
    inputs = INPUTS.model_copy(update={"sequence_length": length})
    try:
        drawn = draw(spec, inputs)
    except SpecError as error:
        assert f"data.sequence_length = {length:,}" in error.why
    else:
        lengths = np.add.reduceat(drawn.tokens, drawn.segment_start[:-1]) + SAMPLE_SPECIALS
        assert lengths.tolist() == [length] * sequences
        assert (drawn.kinds == IMAGE).sum() == round(read * sequences)


def test_laion_like_counts_are_as_skewed_as_stated() -> None:
    mean, pages_of = 4.0, 2.5
    drawn = draw(DistributionSpec(images_per_sequence=mean, generated_per_sequence=mean), INPUTS)
    document = np.repeat(np.arange(len(drawn.segment_start) - 1), np.diff(drawn.segment_start))
    for kind in (IMAGE, TARGET):
        counts = np.bincount(document[drawn.kinds == kind], minlength=4096)
        assert counts.var() == pytest.approx(mean * (1 + pages_of), rel=0.1)


def test_laion_like_image_sizes() -> None:
    """The counts that the file states, in millions of 413."""
    sizes = image_sizes(read_distribution("laion-like"), 200_000)
    for side, counts in ((sizes.min(axis=1), (211, 67, 9.6)), (sizes.max(axis=1), (268, 112, 26))):
        for pixels, millions in zip((256, 512, 1024), counts, strict=True):
            assert 413 * (side >= pixels).mean() == pytest.approx(
                millions, rel=0.12 if pixels == 1024 else 0.02
            )
    ratio = sizes[:, 0] / sizes[:, 1]
    assert (
        0.48 < ratio.min() < 0.52
        and 1.92 < ratio.max() < 2.08
        and np.median(ratio) == pytest.approx(1, abs=0.02)
    )
    assert image_sizes(read_distribution("laion-like"), 5000, 1024).min() >= 1024


def test_the_same_sizes_on_every_machine() -> None:
    drawn = draw(DistributionSpec(sequences=100), INPUTS)
    assert drawn.tokens[:12].tolist() == [171, 77, 54, 77, 533, 77, 95, 77, 731, 77, 97, 16]
    again = draw(DistributionSpec(sequences=100), INPUTS)
    assert again.fingerprint == drawn.fingerprint and np.array_equal(again.tokens, drawn.tokens)
    other = INPUTS.model_copy(update={"sequence_length": 4096})
    changed = [
        draw(DistributionSpec(sequences=100, min_side_px=256), INPUTS),
        draw(DistributionSpec(sequences=100, images_per_sequence=7.9), INPUTS),
        draw(DistributionSpec(sequences=100), other),
    ]
    assert len({drawn.fingerprint, *(one.fingerprint for one in changed)}) == 4


def test_packing_statistics_and_ordering_work_on_drawn_sizes(tmp_path: Path) -> None:
    index = open_index(make_run(tmp_path, sequences=200, min_side_px=512), INPUTS)
    data = describe_data(pack(Mixture(index, 0), 0))
    assert (data.samples, data.sequences, data.fill_fraction, data.skipped) == (200, 200, 1.0, 0)
    assert (
        data.images_per_sequence.mean == 8
        and data.targets == 1600
        and data.fingerprint == index.fingerprint
    )
    assert len(data.sample.tokens) == 200 and set(data.sample.length_sq) == {8192**2}
    batch = SequenceStream(Mixture(index, 0)).batch(0, 48)
    layout = make_layout(
        [unit("e", ["encoder"], 3), unit("l", ["llm"], 4), unit("g", ["generator"], 5)], 2, 48
    )
    sizes = sizes_of(batch)
    loads = replica_loads(
        sizes, INPUTS, layout, assign(count_costs(sizes, INPUTS), layout, "llm", "paper")
    )
    assert loads["encoder"].sum(axis=(0, 1))[0] == len(batch.items["image"].segment)


def test_a_model_without_encoder_or_generator_has_none_of_their_images(tmp_path: Path) -> None:
    inputs = INPUTS.model_copy(update={"heads": []})
    index = open_index(make_run(tmp_path, sequences=10), inputs)
    assert index.kinds.tolist() == [TEXT] * 10 and set(index.tokens) == {8190}


@pytest.mark.parametrize(
    ("asked", "named"),
    [
        (
            {"images_per_sequence": 64, "min_side_px": 512},
            ["64 images read × 3", "8 images generated × 9", "data.sequence_length = 8,192"],
        ),
        ({"images_per_sequence": 900}, ["900 images read"]),
        ({"name": "../presets/tiny"}, ["'../presets/tiny'", "laion-like"]),
    ],
)
def test_what_cannot_be_drawn(tmp_path: Path, asked: dict[str, Any], named: list[str]) -> None:
    with pytest.raises(SpecError) as refused:
        open_index(make_run(tmp_path, **asked), INPUTS)
    for word in named:
        assert word in str(refused.value)


def test_sizes_are_not_data(tmp_path: Path) -> None:
    for use in (read_index, build_index):
        with pytest.raises(DataError, match=r"data\.distribution has sizes only"):
            use(make_run(tmp_path), INPUTS)
