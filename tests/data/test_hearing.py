"""A model that hears is given its clips: indexed, packed, shared over replicas, made into features
at their places."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from disttrain_cli.data.epochs.mixture import Mixture
from disttrain_cli.data.index.sample_index import Index
from disttrain_cli.data.indexing.building import build_index
from disttrain_cli.data.loader import Loader
from disttrain_cli.data.log_mel import SILENCE, decode_features
from disttrain_cli.data.ordering.orders import Orders
from disttrain_cli.data.packing import SequenceStream
from disttrain_cli.data.preparing import Prepared
from disttrain_cli.data.reading import ShardReader
from disttrain_cli.data.serving import wire
from disttrain_cli.data.tokenizer import ByteTokenizer
from disttrain_cli.spec.heads import AudioInput
from disttrain_cli.spec.index import AUDIO
from disttrain_cli.spec.runfile import Run
from tests.cases import first_fast
from tests.data.dataset import INPUTS, encoded, image, interleaved, make_layout, text, unit
from tests.data.serving.services import content
from tests.data.serving.test_wire import sent
from tests.data.sources.test_sounds import clip
from tests.data.test_clips import sound

EAR = AudioInput(module="ear", mel_bins=8, frames=60, merge=10)  # 0.6 s, 3 tokens
HEARING = INPUTS.model_copy(update={"heads": [*INPUTS.of("image"), EAR]})
FIELDS = {"audio", "image", "tokens", "layout", "labels"}
NO_FEATURES = np.zeros((0, 8, 60), np.float32)
MakeRun = Callable[..., Run]
LAYOUTS = [
    make_layout([unit("eye", ["encoder"], 1), unit("ear", ["ear"], 3), unit("llm", ["llm"], 2)], 2),
    make_layout([unit("both", ["encoder", "ear"], 3), unit("llm", ["llm"], 2)], 2),
    make_layout([unit("eye", ["encoder"], 2), unit("rest", ["ear", "llm"], 2)], 1),
    make_layout([unit("all", ["encoder", "ear", "llm"], 3)], 2),
]


def files(samples: int = 30) -> list[tuple[str, bytes]]:
    random, found = np.random.default_rng(5), []
    for number in range(samples):
        key, segments = f"{number:02d}", [text(f"of {number}")]
        for place in range(int(random.integers(0, 4))):
            name = f"{key}.{place}." + ("flac" if random.random() < 0.6 else "png")
            if name.endswith("flac"):
                found.append(
                    (name, sound("flac", 8_000, seconds=0.1 * (1 + place), hz=100.0 * (1 + number)))
                )
                segments.append(clip(name))
            else:
                found.append((name, encoded(20, 20 + number, ".png")))
                segments.append(image(name))
            segments.append(text("x" * place))
        found.append(interleaved(key, *segments))
    return found


@pytest.fixture
def heard(own_run: MakeRun) -> tuple[Run, Index]:
    run = own_run({"a.tar": files()})
    return run, build_index(run, HEARING)


def test_clips_are_segments_of_as_many_tokens(heard: tuple[Run, Index]) -> None:
    _, index = heard
    clips = index.kinds == AUDIO
    assert not index.skipped and clips.sum() > 10 and set(index.tokens[clips]) == {3}
    assert (index.grids[clips] == 1).all()


def test_clips_that_nobody_hears_are_no_segments_and_long_ones_are_named(own_run: MakeRun) -> None:
    long = [
        ("long.wav", sound(seconds=0.601)),
        ("long.txt", b"x"),
        ("fits.wav", sound(seconds=0.6)),
        ("fits.txt", b"y"),
    ]
    run = own_run({"a.tar": long}, max_bad_fraction=0.5)
    deaf = build_index(run, INPUTS)
    assert len(deaf) == 2 and not (deaf.kinds == AUDIO).any()
    (skipped,) = build_index(run, HEARING).skipped
    assert (
        skipped.key == "long"
        and skipped.reason == "a clip of 0.6 s, longer than the model's limit of 0.6 s"
    )


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.describe())
def test_every_clip_of_a_slot_has_one_replica_of_each_unit_that_works_on_it(
    heard: tuple[Run, Index], layout: Any
) -> None:
    run, index = heard
    for slot in Orders(run.file, layout, index).of(1)[0].slots:
        assert slot.rows("audio", "positions").tolist() == [30] * len(slot.items["audio"].sequence)
        assert slot.rows("audio", "tokens").tolist() == [3] * len(slot.items["audio"].sequence)
        for part in layout.units:
            own = [replica["audio"].tolist() for replica in slot.replicas[part.name]]
            works = bool({"ear", "llm"} & set(part.modules))
            given = sorted(number for numbers in own for number in numbers)
            assert given == (list(range(len(slot.items["audio"].sequence))) if works else [])
            if works and "llm" not in part.modules:
                assert max(map(len, own)) - min(map(len, own)) <= 1
            for replica, items in enumerate(slot.replicas[part.name]):
                if "llm" in part.modules:
                    assert set(slot.items["audio"].sequence[items["audio"]]) <= set(
                        items["sequence"].tolist()
                    )
                assert slot.work("ear", items) == EAR.work(len(own[replica]))


@pytest.mark.slow
@pytest.mark.parametrize("layout", first_fast(LAYOUTS), ids=lambda layout: layout.describe())
def test_features_and_places_belong_together(heard: tuple[Run, Index], layout: Any) -> None:
    run, index = heard
    reader, tokens = ShardReader(index, ByteTokenizer()), ByteTokenizer()
    stream = SequenceStream(Mixture(index, run.file.train.seed)).batch(0, 12)
    seen = 0
    for part in layout.units:
        works = {"encoder": {"image"}, "ear": {"audio"}, "llm": {"tokens", "layout", "labels"}}
        fields = set().union(*(works[name] for name in part.modules))
        for replica in range(part.dp):
            with Loader(
                run, Orders(run.file, layout, index), unit=part.name, replica=replica, fields=fields
            ) as source:
                for place, slot in enumerate(source.order(0).slots):
                    batch, own = source.fetch(0, place), slot.replicas[part.name][replica]
                    heard_here = batch.items["audio"]
                    assert len(heard_here.grids) == len(own["audio"])
                    segments = np.concatenate(
                        [
                            np.zeros(0, np.int64),
                            *(
                                stream.items["audio"].segment[
                                    stream.items["audio"].start[s] : stream.items["audio"].start[
                                        s + 1
                                    ]
                                ]
                                for s in slot.sequences.tolist()
                            ),
                        ]
                    )[own["audio"]]
                    if "ear" in part.modules:
                        features_NFT = np.concatenate([*heard_here.values[0], NO_FEATURES])
                        assert features_NFT.shape == (len(segments), 8, 60)
                        for features, segment in zip(features_NFT, segments.tolist(), strict=True):
                            sample = int(
                                np.searchsorted(index.segment_start, segment, side="right") - 1
                            )
                            expected = np.empty((8, 60), np.float32)
                            decode_features(reader.file(sample, segment), EAR, expected)
                            assert np.array_equal(features, expected) and np.ptp(features) > 0
                            seen += 1
                    if "llm" in part.modules:
                        assert batch.token_ids is not None
                        rows = heard_here.rows
                        assert rows is not None
                        flat = batch.token_ids.reshape(-1)
                        both = np.concatenate([rows, batch.items["image"].rows])
                        assert sorted(both) == np.flatnonzero(flat == tokens.image).tolist()
                        starts = rows.reshape(-1, 3)
                        assert (np.diff(starts, axis=1) == 1).all() and (
                            np.diff(starts[:, 0]) > 0
                        ).all()
                        assert len(starts) == len(own["audio"])
    assert seen == len(stream.items["audio"].segment)


@pytest.mark.slow
def test_broken_clips_are_silent_and_named(own_run: MakeRun) -> None:
    whole = sound("flac")
    content = [
        part
        for number in range(30)
        for part in (
            (f"{number}.flac", whole[:-300] if number in (3, 5) else whole),
            (f"{number}.txt", b"the same"),
        )
    ]
    run = own_run({"a.tar": content}, max_bad_fraction=0.1)
    index = build_index(run, HEARING)
    layout = make_layout([unit("all", ["encoder", "ear", "llm"], 1)], 2)
    with Loader(
        run, Orders(run.file, layout, index), unit="all", replica=0, fields=FIELDS
    ) as source:
        features = [
            one
            for step in range(4)
            for slot in range(6)
            for block in source.fetch(step, slot).items["audio"].values[0]
            for one in block
        ]
        assert sorted(one.key for one in source.skipped) == ["3", "5"]
        assert all("not a complete sound file" in one.reason for one in source.skipped)
    silent = [bool((one == np.float32(SILENCE)).all()) for one in features]
    assert any(silent) and not all(silent)


def test_clips_survive_the_journey_from_a_worker(heard: tuple[Run, Index]) -> None:
    run, index = heard
    with Loader(
        run, Orders(run.file, LAYOUTS[3], index), unit="all", replica=1, fields=FIELDS
    ) as source:
        batch = source.fetch(0, 0)
    arrived = wire.read_slot(iter(sent(Prepared(batch, [])))).batch
    assert content(arrived) == content(batch)
