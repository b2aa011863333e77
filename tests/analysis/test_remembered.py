"""Own traces asked again: answered from what was kept, unless a file has changed."""

from __future__ import annotations

import pytest

from disttrain_cli.analysis import cache
from disttrain_cli.analysis.analyze import analyze_open
from disttrain_cli.errors import DataError


@pytest.fixture
def opened(monkeypatch):
    """How often traces were opened."""
    from disttrain_cli.analysis.job import database

    calls, really = [], database.open_database

    def count(paths):
        calls.append(paths)
        return really(paths)

    monkeypatch.setattr(database, "open_database", count)
    return calls


def test_the_same_folder_is_read_once(run, opened):
    first, pictures = analyze_open([run])
    drawn = pictures()
    again, same = analyze_open([run])
    assert same() == drawn and len(opened) == 1 and again == first and len(again.ranks) == 6
    assert len(drawn.timelines) == 2 and drawn.timelines[0]["lanes"][0][0] == "encoder"


@pytest.mark.slow
def test_whatever_changes_is_read_again(run, opened):
    analyze_open([run])
    segment = run / "traces" / "rank-00000" / "segment-00001.parquet"
    segment.write_bytes(segment.read_bytes())  # the same bytes, written later
    analyze_open([run])
    assert len(opened) == 2
    (run / "traces" / "job.json").unlink()
    found, _ = analyze_open([run])
    assert len(opened) == 3 and found.job.mfu is None


def test_what_cannot_be_analysed_is_not_kept(run, opened):
    for file in (run / "traces").glob("rank-*/*"):
        file.unlink()
    for _ in range(2):
        with pytest.raises(DataError):
            analyze_open([run])
    assert not list(cache.cache_folder().glob("*"))


@pytest.mark.slow
def test_what_is_damaged_is_found_again(run, opened):
    first, _ = analyze_open([run])
    (kept,) = cache.cache_folder().glob("*.json")
    kept.write_text("{")
    assert analyze_open([run])[0] == first and len(opened) == 2
    assert analyze_open([run])[0] == first and len(opened) == 2
