"""Audio clips in the sizes of the data: drawn, packed, sampled, and shared out over an audio
unit."""

from pathlib import Path

import numpy as np
import pytest

from disttrain_cli.data.distribution import draw
from disttrain_cli.data.epochs.mixture import Mixture
from disttrain_cli.data.indexing.building import open_index
from disttrain_cli.data.ordering.assigning import assign, count_costs
from disttrain_cli.data.ordering.loads import replica_loads
from disttrain_cli.data.packing import SequenceStream, pack
from disttrain_cli.data.sizes import sizes_of, sizes_of_sample
from disttrain_cli.data.statistics import describe_data, mean_and_max_work, size_sample
from disttrain_cli.errors import SpecError
from disttrain_cli.spec.heads import AudioInput
from disttrain_cli.spec.index import AUDIO, IMAGE, TARGET
from disttrain_cli.spec.runfile.data import DistributionSpec
from tests.data.dataset import make_layout, unit
from tests.data.test_distribution import INPUTS, make_run
from tests.heads import with_heads

AUDIO_INPUT = AudioInput(module="ear", mel_bins=80, frames=3000, merge=4)
HEARING = with_heads(INPUTS, "audio", AUDIO_INPUT)
ASKED = {
    "images_per_sequence": 4,
    "generated_per_sequence": 4,
    "clips_per_sequence": 3,
    "min_side_px": 256,
}


def test_clips_are_drawn_beside_images_and_change_none_of_their_sizes() -> None:
    spec = DistributionSpec(sequences=500, **ASKED)
    drawn, deaf = draw(spec, HEARING), draw(spec, INPUTS)
    assert [(drawn.kinds == kind).sum() for kind in (IMAGE, TARGET, AUDIO)] == [2000, 2000, 1500]
    assert set(drawn.tokens[drawn.kinds == AUDIO]) == {1500 // 4}
    assert (drawn.grids[drawn.kinds == AUDIO] == 1).all() and not (deaf.kinds == AUDIO).any()
    images, same = (sizes.grids.prod(axis=1)[sizes.kinds == IMAGE] for sizes in (drawn, deaf))
    assert sorted(images) == sorted(same)
    assert (np.add.reduceat(drawn.tokens, drawn.segment_start[:-1]) == 8190).all()


def test_clips_that_do_not_fit_are_named(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="30 audio clips × 3"):
        open_index(make_run(tmp_path, clips_per_sequence=30), HEARING)


def test_packing_statistics_and_sample_count_clips(tmp_path: Path) -> None:
    epoch = pack(Mixture(open_index(make_run(tmp_path, sequences=2000, **ASKED), HEARING), 0), 0)
    data = describe_data(epoch)
    assert (
        data.clips == epoch.items["audio"].counts.sum() == 6000 and len(data.sample.clips) == 1024
    )
    mean, most = mean_and_max_work(epoch)["ear"]
    assert mean == (3, 4500, 3 * 1500**2) and most.items == epoch.items["audio"].counts.max() > 8
    # Far less than the 3 % of a mean of as many drawn by chance.
    assert np.mean(data.sample.clips) == pytest.approx(3.0, rel=0.01)
    assert np.mean(data.sample.targets) == pytest.approx(4.0, rel=0.01)
    assert np.mean([sum(images) for images in data.sample.images]) == pytest.approx(
        epoch.items["image"].grid.prod(axis=1).sum() / 2000, rel=0.01
    )
    assert (
        sizes_of_sample(size_sample(epoch, 2000)).items["audio"].counts.tolist()
        == epoch.items["audio"].counts.tolist()
    )


def test_a_profile_without_clips_has_none(tmp_path: Path) -> None:
    sample = size_sample(pack(Mixture(open_index(make_run(tmp_path, sequences=20), INPUTS), 0), 0))
    assert sample.clips == [] and sizes_of_sample(sample).items["audio"].counts.tolist() == [0] * 20


def test_every_replica_of_an_audio_unit_gets_its_even_share(tmp_path: Path) -> None:
    index = open_index(make_run(tmp_path, sequences=200, **ASKED), HEARING)
    sizes = sizes_of(SequenceStream(Mixture(index, 0)).batch(0, 48))
    layout = make_layout(
        [unit("e", ["encoder"], 3), unit("a", ["ear"], 5), unit("l", ["llm", "generator"], 4)],
        2,
        48,
    )
    costs = count_costs(sizes, HEARING)
    assert costs["ear"].tolist() == (sizes.items["audio"].counts * 1500).tolist()
    assignment = assign(costs, layout, "llm", "paper")
    places = assignment.positions
    loads = replica_loads(sizes, HEARING, layout, assignment)["ear"]
    clips = sizes.items["audio"].counts[places].sum(axis=(1, 2))
    assert loads[..., 0].sum(axis=1).tolist() == clips.tolist()
    assert (np.ptp(loads[..., 0], axis=1) <= 1).all() and clips.sum() == sizes.items[
        "audio"
    ].counts.sum() > 100
    assert np.array_equal(loads[..., 1], 1500 * loads[..., 0])
    with_llm = make_layout(
        [unit("e", ["encoder"], 3), unit("l", ["ear", "llm", "generator"], 4)], 2, 48
    )
    own = replica_loads(sizes, HEARING, with_llm, assignment)["ear"]
    assert np.array_equal(own[..., 0], sizes.items["audio"].counts[places].sum(axis=2))
