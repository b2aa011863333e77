"""What a rank is given: right tokens, labels and places, the same for any threads, layout or
prefetch."""

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from disttrain_cli.data.decoding import decode_image, decode_target
from disttrain_cli.data.epochs.mixture import Mixture
from disttrain_cli.data.index.sample_index import Index
from disttrain_cli.data.indexing.building import build_index
from disttrain_cli.data.loader import Loader
from disttrain_cli.data.ordering.orders import Orders
from disttrain_cli.data.packing import SequenceStream
from disttrain_cli.data.reading import ShardReader
from disttrain_cli.data.sequences import NOT_TRAINED
from disttrain_cli.data.slots import ItemArrays, SlotBatch, flat_arrays
from disttrain_cli.data.tokenizer import ByteTokenizer
from disttrain_cli.errors import DataError
from disttrain_cli.spec.index import KINDS
from disttrain_cli.spec.plan import Layout
from disttrain_cli.spec.runfile import Run
from tests.data.dataset import DISAGGREGATED, INPUTS, MONOLITHIC, encoded, image, interleaved, text

ALL = {"image", "tokens", "layout", "context", "labels", "target"}
MakeRun = Callable[..., Run]


def loader(
    run: Run,
    index: Index,
    layout: Layout,
    unit: str,
    replica: int,
    fields: set[str] = ALL,
    **options: Any,
) -> Loader:
    return Loader(
        run, Orders(run.file, layout, index), unit=unit, replica=replica, fields=fields, **options
    )


def fetch_step(
    run: Run,
    index: Index,
    layout: Layout,
    unit: str,
    replica: int,
    step: int = 0,
    fields: set[str] = ALL,
) -> list[SlotBatch]:
    with loader(run, index, layout, unit, replica, fields, first_step=step) as source:
        return [fetched(source, step, slot) for slot in range(layout.microbatches)]


def fetched(source: Loader, step: int, slot: int) -> SlotBatch:
    """As training does it."""
    batch = source.fetch(step, slot)
    source.prefetch(step, slot + 1)
    return batch


def with_preprocess(run: Run, workers: int, prefetch_slots: int) -> Run:
    preprocess = run.file.preprocess.model_copy(
        update={"workers": workers, "prefetch_slots": prefetch_slots}
    )
    return run.model_copy(update={"file": run.file.model_copy(update={"preprocess": preprocess})})


def arrays(batch: SlotBatch) -> dict[str, bytes]:
    return {
        name: b"".join(a.tobytes() for a in value) if isinstance(value, list) else value.tobytes()
        for name, value in flat_arrays(batch).items()
    }


def test_tokens_say_what_the_samples_say(run: Run, index: Index) -> None:
    """Rebuild every sequence's samples from its tokens and compare with the shards."""
    tokens = ByteTokenizer()
    reader = ShardReader(index, tokens)
    stream = SequenceStream(Mixture(index, run.file.train.seed)).batch(0, 12)
    labels_seen = 0
    for replica in range(2):
        with loader(run, index, MONOLITHIC, "all", replica) as source:
            order = source.order(0)
            for place, slot in enumerate(order.slots):
                batch = source.fetch(0, place)
                assert batch.token_ids is not None and batch.labels is not None
                assert batch.positions is not None and batch.documents is not None
                (sequence,) = slot.sequences[slot.replicas["all"][replica]["sequence"]]
                samples = stream.samples[
                    stream.sample_start[sequence] : stream.sample_start[sequence + 1]
                ]
                ids, labels = batch.token_ids[0], batch.labels[0]
                for number, row in enumerate(samples.tolist()):
                    own = ids[batch.documents[0] == number]
                    assert (
                        own[0] == tokens.bos
                        and own[-1] == tokens.eos
                        and len(own) == index.lengths[row]
                    )
                    assert own[own < 256].tolist() == [
                        t for part in reader.texts(row) for t in part
                    ]
                    assert batch.positions[0][batch.documents[0] == number].tolist() == list(
                        range(len(own))
                    )
                assert (ids[batch.documents[0] == -1] == tokens.pad).all()
                where = np.flatnonzero(labels != NOT_TRAINED)
                assert (labels[where] == ids[where + 1]).all()
                assert ((labels[where] < 256) | (labels[where] == tokens.eos)).all()
                assert (batch.documents[0][where] == batch.documents[0][where + 1]).all()
                labels_seen += len(where)
    assert labels_seen == order.label_tokens


def test_rows_and_pixels_belong_together(run: Run, index: Index) -> None:
    """Image rows hold the placeholder, in the order and number of the pixels; context rows
    likewise."""
    tokens, merged = ByteTokenizer(), 4
    reader = ShardReader(index, tokens)
    stream = SequenceStream(Mixture(index, run.file.train.seed)).batch(0, 12)
    with loader(run, index, MONOLITHIC, "all", 1) as source:
        for place, slot in enumerate(source.order(0).slots):
            batch, own = source.fetch(0, place), slot.replicas["all"][1]
            read, drawn = batch.items["image"], batch.items["target"]
            assert batch.token_ids is not None
            assert read.rows is not None and drawn.rows is not None
            flat = batch.token_ids.reshape(-1)
            assert sorted(read.rows) == np.flatnonzero(flat == tokens.image).tolist()
            assert drawn.rows.tolist() == np.flatnonzero(flat == tokens.context).tolist()
            images = [one for block in read.values[0] for one in block]
            assert len(images) == len(own["image"]) == len(read.grids)
            (sequence,) = slot.sequences[own["sequence"]]
            segments = stream.items["image"].segment[
                stream.items["image"].start[sequence] : stream.items["image"].start[sequence + 1]
            ]
            expected_rows = (
                np.split(
                    np.flatnonzero(flat == tokens.image), np.cumsum(index.tokens[segments])[:-1]
                )
                if len(segments)
                else []
            )
            at, first = 0, int(own["image"].min()) if len(own["image"]) else 0
            for pixels, number, grid in zip(images, own["image"] - first, read.grids, strict=True):
                sample = int(
                    np.searchsorted(index.segment_start, segments[number], side="right") - 1
                )
                data = reader.file(sample, int(segments[number]))
                assert np.array_equal(pixels, decode_image(data, tuple(grid), INPUTS.image))
                rows = grid.prod() // merged
                assert read.rows[at : at + rows].tolist() == expected_rows[number].tolist()
                at += rows
            pictures = [one for block in drawn.values[0] for one in block]
            goals = stream.items["target"].segment[
                stream.items["target"].start[sequence] : stream.items["target"].start[sequence + 1]
            ]
            for pixels, segment in zip(pictures, goals.tolist(), strict=True):
                sample = int(np.searchsorted(index.segment_start, segment, side="right") - 1)
                assert np.array_equal(
                    pixels, decode_target(reader.file(sample, segment), INPUTS.target, (1, 1))
                )


def test_threads_and_prefetch_do_not_change_a_byte(run: Run, index: Index) -> None:
    one = fetch_step(with_preprocess(run, 1, 1), index, MONOLITHIC, "all", 0, step=1)
    many = fetch_step(with_preprocess(run, 5, 4), index, MONOLITHIC, "all", 0, step=1)
    assert [arrays(batch) for batch in one] == [arrays(batch) for batch in many]


def test_slots_in_any_order_and_steps_resumed(run: Run, index: Index) -> None:
    with loader(run, index, DISAGGREGATED, "llm", 0, {"tokens", "labels"}) as source:
        late, early = source.fetch(2, 1), source.fetch(0, 0)
    assert arrays(
        fetch_step(run, index, DISAGGREGATED, "llm", 0, 2, {"tokens", "labels"})[1]
    ) == arrays(late)
    assert arrays(
        fetch_step(run, index, DISAGGREGATED, "llm", 0, 0, {"tokens", "labels"})[0]
    ) == arrays(early)


def test_only_the_fields_asked_for(run: Run, index: Index) -> None:
    names = {
        "image": {"image/values/0"},
        "tokens": {"token_ids", "image/rows"},
        "layout": {"positions", "documents"},
        "context": {"target/rows"},
        "labels": {"labels"},
        "target": {"target/values/0", "target/weights", "target/noise_seeds"},
        "weights": {"target/weights", "target/noise_seeds"},
        "dropout": {"image/seeds", "target/seeds"},
    }
    for field, expected in names.items():
        (batch, *_) = fetch_step(run, index, MONOLITHIC, "all", 0, fields={field})
        names = set(flat_arrays(batch))
        assert names - {"audio/rows", "audio/seeds"} == expected | {
            f"{item}/grids" for item in KINDS
        }


def test_further_encoders_and_generators_have_pixels_of_their_own(run: Run, index: Index) -> None:
    """Each sized as it asks, of the same images; only those asked for are there."""
    assert INPUTS.image is not None and INPUTS.target is not None
    eye = INPUTS.image.model_copy(
        update={"module": "other_eye", "mean": (0.0, 0.0, 0.0), "std": (1.0, 1.0, 1.0)}
    )
    painter = INPUTS.target.model_copy(
        update={"module": "painter", "size_px": 2 * INPUTS.target.size_px}
    )
    both = replace(index, inputs=INPUTS.model_copy(update={"heads": [*INPUTS.heads, eye, painter]}))

    def of(item: str, *numbers: int) -> list[ItemArrays]:
        fields = {f"{item}.{number}" if number else item for number in numbers}
        batches = fetch_step(run, both, MONOLITHIC, "all", 0, fields=fields)
        return [batch.items[item] for batch in batches]

    for first, more, second in zip(of("image", 0), of("image", 0, 1), of("image", 1), strict=True):
        assert [set(one.values) for one in (first, more, second)] == [{0}, {0, 1}, {1}]
        for own, other, alone in zip(more.values[0], more.values[1], second.values[1], strict=True):
            assert np.array_equal(own, other)  # each normalises them as it asks, on the rank
            assert np.array_equal(other, alone)
    for first, second in zip(of("target", 0), of("target", 1), strict=True):
        assert set(first.values) == {0} and set(second.values) == {1}
        for own, other in zip(first.values[0], second.values[1], strict=True):
            assert len(own) == len(other) and other.shape[2] == 2 * own.shape[2]
        assert np.array_equal(first.noise_seeds, second.noise_seeds)
        assert np.array_equal(first.weights, second.weights)


def each(items: ItemArrays) -> list[bytes]:
    """What the first encoder or generator reads of each item."""
    return [one.tobytes() for block in items.values[0] for one in block]


def test_images_and_noise_are_the_same_in_every_layout(run: Run, index: Index) -> None:
    def of(
        layout: Layout, encoder: str, generator: str
    ) -> tuple[list[bytes], list[tuple[int, bytes]]]:
        pixels, targets = [], []
        dp = {unit.name: unit.dp for unit in layout.units}
        for replica in range(dp[encoder]):
            for batch in fetch_step(run, index, layout, encoder, replica, fields={"image"}):
                pixels += each(batch.items["image"])
        for replica in range(dp[generator]):
            for batch in fetch_step(run, index, layout, generator, replica, fields={"target"}):
                drawn = batch.items["target"]
                assert drawn.noise_seeds is not None
                targets += list(zip(drawn.noise_seeds.tolist(), each(drawn), strict=True))
        return sorted(pixels), sorted(targets)

    split, whole = of(DISAGGREGATED, "encoder", "generator"), of(MONOLITHIC, "all", "all")
    assert split == whole and split[0] and split[1]
    seeds = [seed for seed, _ in split[1]]
    assert len(set(seeds)) == len(seeds) and min(seeds) >= 0


@pytest.mark.slow
def test_noise_changes_with_the_step(own_run: MakeRun) -> None:
    run = own_run(
        {
            "a.tar": [
                interleaved("0", text("draw"), image("0.jpg", True)),
                ("0.jpg", encoded(20, 20)),
            ]
        }
    )
    index = build_index(run, INPUTS)
    seeds = {
        int(seeds[0])
        for step in (0, 1)
        for batch in fetch_step(run, index, DISAGGREGATED, "generator", 0, step, {"target"})
        if len(seeds := batch.items["target"].noise_seeds) > 0  # type: ignore[arg-type]
    }
    assert len(seeds) == 2


@pytest.mark.parametrize("damage", ["cut", "gone", "other text"])
def test_shards_that_change_under_way(own_run: MakeRun, damage: str) -> None:
    run = own_run({"a.tar": [interleaved(f"{n}", text("hello" * 9)) for n in range(9)]})
    index = build_index(run, INPUTS)
    shard = Path(index.shards[0].path)
    if damage == "cut":
        os.truncate(shard, 600)
    elif damage == "gone":
        shard.unlink()
    else:
        shard.write_bytes(shard.read_bytes().replace(b"hello", b'ha"}]'))
    with pytest.raises(DataError, match=r"a\.tar"):
        for step in range(2):
            fetch_step(run, index, MONOLITHIC, "all", 0, step)
