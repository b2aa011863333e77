"""A profile of other data: everything that follows from the sizes moves with them, the dataset
stays the same."""

import pytest

from disttrain_cli.api.presets import preset_text
from disttrain_cli.profiling.recorded_data import with_data
from disttrain_cli.spec.runfile import read_run
from disttrain_cli.spec.whole import write_whole
from tests.commands.conftest import make_profile
from tests.profiling.recorded import sequences_with, with_layers


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    write_whole(folder / "disttrain.yaml", preset_text("tiny"))
    return read_run(folder / "disttrain.yaml")


def test_everything_follows_the_sizes(run):
    planned = with_layers(make_profile(run.file), run)
    few, many = (with_data(planned, run, sequences_with(images)) for images in (2, 6))
    for name, factor in (("image_encoder", 3.0), ("llm", 1.0), ("image_generator", 1.0)):
        before, after = few.modules[name], many.modules[name]
        assert after.work_per_sequence == before.work_per_sequence.scaled(factor)
        if name == "image_encoder":  # every tensor inside it belongs to the images
            assert after.cut_bytes_per_sequence == pytest.approx(
                [factor * size for size in before.cut_bytes_per_sequence]
            )
        else:
            assert after.cut_bytes_per_sequence == before.cut_bytes_per_sequence
    assert few.data.images_per_sequence.mean == 2.0 and many.data.images_per_sequence.max == 7.0
    assert many.data.images == 6 * planned.data.sequences
    assert many.data.image_tokens == 6 * 16 // 4 * planned.data.sequences
    assert many.data.text_tokens == (200 - 24) * planned.data.sequences
    assert (
        many.data.fingerprint == planned.data.fingerprint
        and many.data.samples == planned.data.samples
    )


def test_the_largest_work_known_stays(run):
    planned = with_layers(make_profile(run.file), run)
    seen = with_data(planned, run, sequences_with(2))
    most, known = (one.modules["image_encoder"].max_work_per_sequence for one in (seen, planned))
    assert most.items == max(3, known.items) and most.tokens == max(48, known.tokens)
    assert most.sum_length_sq == max(3 * 256, known.sum_length_sq)
