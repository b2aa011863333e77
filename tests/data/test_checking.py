"""Samples with images that cannot be decoded: left out of the losses on every rank, or found and
left out before."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from disttrain_cli.data.checking import find_broken, try_decoding, unchecked
from disttrain_cli.data.index.sample_index import Index, read_index
from disttrain_cli.data.indexing.building import build_index, leave_out, open_index
from disttrain_cli.data.loader import Loader
from disttrain_cli.data.ordering.orders import Orders
from disttrain_cli.data.ordering.shared_orders import SharedOrders
from disttrain_cli.data.preparing import Preparer, Request
from disttrain_cli.data.sequences import NOT_TRAINED, SequencePlan
from disttrain_cli.data.slots import flat_arrays
from disttrain_cli.errors import DataError
from disttrain_cli.spec.progress import silent
from disttrain_cli.spec.runfile import Run
from tests.data.dataset import (
    INPUTS,
    MONOLITHIC,
    damaged,
    encoded,
    image,
    interleaved,
    text,
    write_tar,
)
from tests.data.test_loader import fetch_step, fetched, loader

MakeRun = Callable[..., Run]


def broken_run(own_run: MakeRun, **data: Any) -> Run:
    """Headers and ends are whole, so that the index takes all images; one to read and one to
    generate are damaged."""
    whole, cut = encoded(40, 40), damaged(encoded(40, 40))
    files = []
    for n in range(10):
        files += [
            interleaved(f"{n}", text("read"), image(f"{n}.a.jpg"), image(f"{n}.b.jpg", True)),
            (f"{n}.a.jpg", cut if n == 3 else whole),
            (f"{n}.b.jpg", cut if n == 5 else whole),
        ]
    return own_run({"a.tar": files}, **data)


def trained_on(source: Loader, index: Index) -> Counter[tuple[str, int, float]]:
    """(key, labels, weight) of every sample of four steps, as what a loader of the only replica
    prepares says."""
    seen: Counter[tuple[str, int, float]] = Counter()
    for step in range(4):
        packing = source._orders.of(step)[1]
        for slot in range(12):
            batch, own = fetched(source, step, slot), source.order(step).slots[slot]
            assert batch.labels is not None
            for place, sequence in enumerate(own.replicas["all"][0]["sequence"].tolist()):
                plan = SequencePlan(packing, int(own.sequences[sequence] - packing.ids[0]))
                weights = iter(
                    batch.items["target"].weights[
                        own.items["target"].sequence[own.replicas["all"][0]["target"]] == sequence
                    ]
                )
                for sample, first, count in zip(
                    plan.samples, plan.sample_at, plan.sample_tokens, strict=True
                ):
                    labels = int((batch.labels[place, first : first + count] != NOT_TRAINED).sum())
                    seen[index.keys[int(sample)], labels, float(next(weights))] += 1
    return seen


def same(one: Any, other: Any) -> bool:
    """Whether two arrays, or lists of arrays, are equal."""
    blocks = zip(*(own if isinstance(own, list) else [own] for own in (one, other)), strict=True)
    return all(np.array_equal(*pair) for pair in blocks)


ONE_REPLICA = MONOLITHIC.model_copy(
    update={"units": [MONOLITHIC.units[0].model_copy(update={"dp": 1})], "microbatches": 12}
)


@pytest.mark.slow
def test_a_sample_with_a_broken_image_is_left_out_of_both_losses_and_named_once(
    own_run: MakeRun,
) -> None:
    run = broken_run(own_run, max_bad_fraction=0.1)
    index = build_index(run, INPUTS)
    with loader(run, index, ONE_REPLICA, "all", 0) as source:
        seen = trained_on(source, index)
        assert sorted(s.key for s in source.skipped) == ["3", "5"]
        assert all(s.shard == "own/a.tar" and "Corrupt JPEG" in s.reason for s in source.skipped)
    assert {entry for entry in seen if entry[0] in "35"} == {("3", 0, 0.0), ("5", 0, 0.0)}
    assert all(labels == 5 and weight == 1 for key, labels, weight in seen if key not in "35")


@pytest.mark.slow
def test_who_prepares_labels_leaves_out_what_another_decodes(own_run: MakeRun) -> None:
    """No rank asks another one: labels, weights and pixels prepared apart are those prepared
    together."""
    run = broken_run(own_run, max_bad_fraction=0.1)
    index = build_index(run, INPUTS)
    together = [fetch_step(run, index, ONE_REPLICA, "all", 0, step) for step in range(2)]
    for field, name in (
        ("labels", "labels"),
        ("weights", "target/weights"),
        ("image", "image/values/0"),
    ):
        for step, batches in enumerate(together):
            apart = fetch_step(run, index, ONE_REPLICA, "all", 0, step, fields={field})
            for one, other in zip(apart, batches, strict=True):
                assert same(flat_arrays(one)[name], flat_arrays(other)[name])


def test_what_was_decoded_for_its_pixels_is_not_decoded_again_for_its_labels(
    own_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded: Counter[int] = Counter()

    def counted(
        run: Run, index: Index, reader: Any, sample: int, segment: int, decode: Any
    ) -> list[Any]:
        decoded[segment] += 1
        return try_decoding(run, index, reader, sample, segment, decode)

    run = own_run(
        {
            "a.tar": [
                part
                for n in range(24)
                for part in (
                    interleaved(f"{n}", text("read"), image(f"{n}.jpg")),
                    (f"{n}.jpg", encoded(40, 40)),
                )
            ]
        }
    )
    index = build_index(run, INPUTS)
    monkeypatch.setattr("disttrain_cli.data.preparing.try_decoding", counted)
    preparer = Preparer(run, SharedOrders(Orders(run.file, ONE_REPLICA, index)))
    preparer.prepare(Request(0, 0, "all", 0, frozenset({"image", "labels"})))
    preparer.prepare(Request(0, 0, "all", 0, frozenset({"labels"})))
    assert decoded and set(decoded.values()) == {1}
    preparer.close()


@pytest.mark.slow
def test_what_a_check_left_out_is_in_no_sequence_and_the_rest_is_not_decoded_twice(
    own_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = broken_run(own_run, max_bad_fraction=0.2)
    before = build_index(run, INPUTS)
    assert len(unchecked(before)) == 10
    broken = find_broken(run, before, silent)
    assert sorted((before.keys[row], why.key) for row, why in broken.items()) == [
        ("3", "3"),
        ("5", "5"),
    ]
    after = leave_out(run, INPUTS, broken)
    assert list(after.keys) == [str(n) for n in range(10) if n not in (3, 5)] and not len(
        unchecked(after)
    )
    assert (
        sorted(one.key for one in after.skipped) == ["3", "5"]
        and after.fingerprint != before.fingerprint
    )
    again = read_index(run, INPUTS)
    assert again.fingerprint == after.fingerprint and not find_broken(run, again, silent)
    monkeypatch.setattr("disttrain_cli.data.preparing.broken_in", None)
    with loader(run, again, ONE_REPLICA, "all", 0) as source:
        seen = trained_on(source, again)
        assert not source.skipped and all(labels == 5 and weight == 1 for _, labels, weight in seen)
    write_tar(run.folder / "own" / "b.tar", [interleaved("new", text("more"))])
    assert [bool(checked) for checked in open_index(run, INPUTS).checked] == [True, False]


def test_a_check_that_finds_nothing_changes_no_fingerprint(own_run: MakeRun) -> None:
    run = own_run(
        {"a.tar": [interleaved("0", text("read"), image("0.jpg")), ("0.jpg", encoded(20, 20))]}
    )
    before = build_index(run, INPUTS)
    after = leave_out(run, INPUTS, find_broken(run, before, silent))
    assert (
        after.fingerprint == before.fingerprint and after.checked.all() and not before.checked.any()
    )


def test_too_many_found_by_a_check_leave_the_index_as_it_is(own_run: MakeRun) -> None:
    run = broken_run(own_run, max_bad_fraction=0.1)
    before = build_index(run, INPUTS)
    with pytest.raises(DataError, match="2 of 10 samples"):
        leave_out(run, INPUTS, find_broken(run, before, silent))
    assert read_index(run, INPUTS).fingerprint == before.fingerprint


def test_too_many_broken_images_stop_the_run(own_run: MakeRun) -> None:
    run = broken_run(own_run, max_bad_fraction=0.01)
    index = build_index(run, INPUTS)
    with pytest.raises(DataError, match=r"max_bad_fraction = 0\.01") as caught:
        for replica in (0, 1):
            for step in range(3):
                fetch_step(run, index, MONOLITHIC, "all", replica, step)
    assert "a.tar/" in str(caught.value)


def test_a_shard_without_any_sample_is_checked_too(own_run: MakeRun) -> None:
    whole = [interleaved("0", text("read"), image("0.jpg")), ("0.jpg", encoded(40, 40))]
    run = own_run({"a.tar": [("x.json", b"{")], "b.tar": whole}, max_bad_fraction=0.5)
    index = build_index(run, INPUTS)
    checked = leave_out(run, INPUTS, find_broken(run, index, silent))
    assert (
        len(checked) == 1
        and checked.fingerprint == index.fingerprint
        and not len(unchecked(checked))
    )
