"""Sources are drawn in proportion to their weighted size, to the power of 1 / temperature."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from disttrain_cli.data.epochs.mixture import Mixture
from disttrain_cli.data.index.sample_index import read_index
from disttrain_cli.data.indexing import reading_shards as indexing
from disttrain_cli.data.indexing.building import build_index, open_index
from disttrain_cli.data.indexing.shard_files import Job
from disttrain_cli.data.mixtures import weights_of
from disttrain_cli.data.packing import pack
from disttrain_cli.errors import MismatchError
from disttrain_cli.spec.runfile import Run
from disttrain_cli.spec.runfile.data import DataSpec
from tests.data.dataset import INPUTS, PROPERTY, interleaved, make_run, text, write_tar
from tests.data.index.test_sample_index import MakeRun

SOURCES = st.lists(st.tuples(st.floats(0.01, 100), st.integers(0, 10**8)), min_size=1, max_size=8)


@given(sources=SOURCES, temperature=st.floats(1, 1000))
@PROPERTY
def test_shares(sources: list[tuple[float, int]], temperature: float) -> None:
    weights, counts = zip(*sources, strict=True)
    scaled = weights_of(weights, counts, temperature)
    before = [weight * count for weight, count in sources]
    after = [weight * count for weight, count in zip(scaled, counts, strict=True)]
    rounded = 1e-6 * sum(counts)
    assert sum(after) == pytest.approx(sum(before), rel=1e-6, abs=rounded)
    for one, first in zip(after, before, strict=True):
        for other, second in zip(after, before, strict=True):
            if one > other + 2 * rounded:
                assert first > second * (1 - 1e-6)  # the order of shares stays
    if temperature == 1:
        assert scaled == list(weights)


def test_a_temperature_of_two_takes_roots() -> None:
    assert weights_of([1, 1], [900, 100], 2) == [0.833333, 2.5]


def test_an_epoch_is_drawn_so(own_run: MakeRun) -> None:
    folder = own_run({"a.tar": [interleaved(f"{n}", text(f"word {n}")) for n in range(90)]}).folder
    others = [interleaved(f"other {n}", text(f"words {n}")) for n in range(10)]
    write_tar(folder / "other" / "b.tar", others)
    shares, fingerprints = [], set()
    for temperature in (1.0, 2.0):
        run = make_run(folder, [{"path": "own"}, {"path": "other"}], temperature=temperature)
        index = open_index(run, INPUTS)
        drawn = index.source[pack(Mixture(index, 0), 0).samples]
        shares.append(np.bincount(drawn).tolist())
        fingerprints.add(index.fingerprint)
    assert shares == [[90, 10], [75, 25]] and len(fingerprints) == 2
    assert build_index(run, INPUTS).fingerprint == index.fingerprint


NAMED = [{"path": "a", "name": "web"}, {"path": "b", "weight": 0.5}]


def stated(curriculum: list[dict[str, Any]], **fields: Any) -> DataSpec:
    return DataSpec.model_validate({"sources": NAMED, "curriculum": curriculum, **fields})


def test_a_curriculum_by_name() -> None:
    phases = [{"step": 5, "weights": {"b": 2}}, {"step": 9, "weights": {"web": 0}}]
    assert stated(phases).phases() == [(0, [1.0, 0.5]), (5, [1.0, 2.0]), (9, [0.0, 2.0])]
    assert stated([{"step": 0, "weights": {"web": 3}}]).phases() == [(0, [3.0, 0.5])]
    assert stated([]).model_dump() == DataSpec(sources=stated([]).sources).model_dump()


@pytest.mark.parametrize(
    ("curriculum", "said"),
    [
        ([{"step": 5, "weights": {"a": 1}}], "no source is called; sources: web, b"),
        ([{"step": 5, "weights": {}}], "at least 1 item"),
        ([{"step": 5, "weights": {"b": -1}}], "greater than or equal to 0"),
        ([{"step": -5, "weights": {"b": 1}}], "greater than or equal to 0"),
        ([{"step": 5, "weights": {"b": 1}}] * 2, "must increase; given: 5, then 5"),
        ([{"step": 5, "weights": {"b": 0, "web": 0}}], "from step 5 on"),
    ],
)
def test_a_curriculum_that_is_refused(curriculum: list[dict[str, Any]], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        stated(curriculum)


def test_names_that_several_sources_have() -> None:
    with pytest.raises(ValidationError, match="several sources"):
        stated([{"step": 5, "weights": {"a": 1}}], sources=[{"path": "a"}, {"path": "a"}])


def texts(folder: Path, name: str, count: int) -> None:
    write_tar(
        folder / name / "a.tar", [interleaved(f"{n}", text(f"{name} {n}")) for n in range(count)]
    )


def test_sources_are_added_to_an_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shards that are known are not read again, whatever the weights; sources before stay as they
    are, and their fingerprints."""
    for name, count in (("a", 30), ("b", 20), ("c", 10)):
        texts(tmp_path, name, count)
    read, real = list[str](), indexing.read_job

    def read_job(run: Run, job: Job, *rest: Any) -> Any:
        read.append(job.label)
        return real(run, job, *rest)

    monkeypatch.setattr(indexing, "read_job", read_job)
    sources: list[dict[str, Any]] = [{"path": "a"}, {"path": "b"}]
    first = open_index(make_run(tmp_path, sources), INPUTS)
    assert read == ["a/a.tar", "b/a.tar"]
    sources = [{"path": "a", "weight": 2, "name": "known"}, {"path": "b"}, {"path": "c"}]
    with pytest.raises(MismatchError, match="a different run file"):
        read_index(make_run(tmp_path, sources), INPUTS)
    curriculum = [{"step": 3, "weights": {"known": 0}}]
    more = open_index(make_run(tmp_path, sources, curriculum=curriculum), INPUTS)
    assert read == ["a/a.tar", "b/a.tar", "c/a.tar"]
    assert more.of_sources[:2] == first.of_sources and len(set(more.of_sources)) == 3
    assert (
        more.keys[:50] == first.keys[:] and more.source.tolist() == [0] * 30 + [1] * 20 + [2] * 10
    )
    assert more.phases == [(0, [2.0, 1.0, 1.0]), (3, [0.0, 1.0, 1.0])]
    anew = build_index(make_run(tmp_path, sources, curriculum=curriculum), INPUTS)
    assert anew.fingerprint == more.fingerprint != first.fingerprint
    open_index(make_run(tmp_path, sources[1:]), INPUTS)  # another list: all is read
    assert read[-2:] == ["b/a.tar", "c/a.tar"] and len(read) == 8


def test_other_samples_of_a_source_are_another_one(tmp_path: Path) -> None:
    texts(tmp_path, "a", 30)
    texts(tmp_path, "b", 20)
    sources = [{"path": "a"}, {"path": "b"}]
    known = open_index(make_run(tmp_path, sources), INPUTS).of_sources
    write_tar(tmp_path / "b" / "b.tar", [interleaved("more", text("more"))])
    now = open_index(make_run(tmp_path, sources), INPUTS).of_sources
    assert now[0] == known[0] and now[1] != known[1]
    for changed in ({"held_out": 0.2}, {"deduplicate": True}):
        others = open_index(make_run(tmp_path, sources, **changed), INPUTS).of_sources
        assert not set(others) & {*known, *now}
