"""Databases and answers are kept by their inputs, written whole, and bounded."""

import os

import pytest

from disttrain_cli.analysis import cache
from disttrain_cli.analysis.analyze import analyze_open
from disttrain_cli.errors import DataError


@pytest.fixture
def source(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = tmp_path / "input"
    path.write_bytes(b"one")
    return path


def writes(content):
    return lambda path: path.write_bytes(content)


def fails(path):
    raise AssertionError("built again")


def test_built_once_until_an_input_or_the_version_changes(source):
    path, stays = cache.cached([source], "1", writes(b"first"))
    assert stays and path.parent == cache.cache_folder() and path.read_bytes() == b"first"
    assert cache.cached([source], "1", fails) == (path, True)
    assert cache.cached([source], "2", writes(b"other"))[0].read_bytes() == b"other"
    source.write_bytes(b"longer")
    assert cache.cached([source], "1", writes(b"again"))[0].read_bytes() == b"again"
    os.utime(source, (5, 5))
    assert cache.cached([source], "1", writes(b"later"))[0].read_bytes() == b"later"
    link = source.with_name("link")
    link.symlink_to(source)
    assert cache.cached([link], "1", fails)[0].read_bytes() == b"later"


def test_the_folder_is_the_users_alone(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "new"))
    assert cache.cache_folder().stat().st_mode & 0o777 == 0o700


def test_a_failure_leaves_nothing_behind(source):
    def half(path):
        path.write_bytes(b"half")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        cache.cached([source], "1", half)
    assert list(cache.cache_folder().iterdir()) == []


def test_without_a_cache_folder_it_works_and_cleans_up(source, monkeypatch):
    blocked = source.with_name("blocked")
    blocked.write_text("a file where a folder should be")
    monkeypatch.setenv("XDG_CACHE_HOME", str(blocked))
    path, stays = cache.cached([source], "1", writes(b"built"))
    assert not stays and path.read_bytes() == b"built"
    cache.forget(path)
    assert not path.parent.exists()


def test_what_was_not_used_for_longest_is_removed(source, monkeypatch):
    monkeypatch.setattr(cache, "MOST_BYTES", 35)
    paths = []
    for version in "123":
        paths.append(cache.cached([source], version, writes(b"0123456789"))[0])
        os.utime(paths[-1], (int(version), int(version)))
    cache.cached([source], "1", fails)  # used again: now the newest
    newest = cache.cached([source], "4", writes(b"0123456789"))[0]
    assert [path.exists() for path in [*paths, newest]] == [True, False, True, True]


def test_what_a_killed_process_left_is_removed(source):
    left = cache.cache_folder() / ".building-left"
    left.mkdir(parents=True)
    os.utime(left, (1, 1))
    cache.cached([source], "1", writes(b""))
    assert not left.exists()


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
