"""Which files of a source are its shards, in which order; what is none is refused by name."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from disttrain_cli.data.sources import Shard, list_source, printable, shown
from disttrain_cli.errors import DataError


def touch(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"")


@pytest.mark.parametrize(
    ("files", "form", "found"),
    [
        (
            ["b.tar", "a.tar", "below/c.tar", "a.parquet", "a_stats.json", "x.txt"],
            "tar",
            ["a.tar", "b.tar"],
        ),
        (
            [
                "more/0.parquet",
                "data/1.parquet",
                "._1.parquet",
                ".cache/2.parquet",
                "__MACOSX/3.parquet",
                "dataset_infos.json",
            ],
            "parquet",
            ["data/1.parquet", "more/0.parquet"],
        ),
        (
            [
                "train/data-1.arrow",
                "train/data-0.arrow",
                "train/cache-9.arrow",
                "train/state.json",
                "dataset_dict.json",
            ],
            "arrow",
            ["train/data-0.arrow", "train/data-1.arrow"],
        ),
        (["b.jsonl", "a.json", "pictures/x.json", "a.jpg"], "llava", ["a.json", "b.jsonl"]),
    ],
)
def test_folders(tmp_path: Path, files: list[str], form: str, found: list[str]) -> None:
    touch(tmp_path, *files)
    images = str(tmp_path) if form == "llava" else ""
    assert list_source(str(tmp_path), "f").shards == [
        Shard(form, f"{tmp_path}/{name}", name, images) for name in found
    ]


def test_one_file(tmp_path: Path) -> None:
    touch(tmp_path, "sub/a.json", "b.PARQUET")
    assert list_source(f"{tmp_path}/sub/a.json", "f").shards == [
        Shard("llava", f"{tmp_path}/sub/a.json", "a.json", f"{tmp_path}/sub")
    ]
    assert list_source(f"{tmp_path}/sub/a.json", "f", "/pictures").shards[0].images == "/pictures"
    assert list_source(f"{tmp_path}/b.PARQUET", "f").shards == [
        Shard("parquet", f"{tmp_path}/b.PARQUET", "b.PARQUET")
    ]


def test_missing_empty_and_unknown_sources(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no dataset at"):
        list_source(str(tmp_path / "nowhere"), "data.sources[0].path")
    with pytest.raises(DataError, match="is empty") as caught:
        list_source(str(tmp_path), "data.sources[0].path: here")
    assert "data.sources[0].path: here" in str(caught.value) and "disttrain init" in str(
        caught.value
    )
    touch(tmp_path, "notes.txt", "a.tar.gz", "dataset_info.json")
    with pytest.raises(DataError, match="holds no shard") as caught:
        list_source(str(tmp_path), "data.sources[0].path: here")
    assert (
        "a.tar.gz, but dataset_info.json" in str(caught.value)
        and "Unpack" in caught.value.next_step
    )
    with pytest.raises(DataError, match=r"form of .*gz is not known") as caught:
        list_source(str(tmp_path / "a.tar.gz"), "f")
    assert ".parquet" in str(caught.value)


def test_a_url_of_a_shard_that_nobody_answers_is_not_called_empty() -> None:
    pytest.importorskip("aiohttp")
    with pytest.raises(DataError, match="cannot be reached"):
        list_source("http://127.0.0.1:9/a.tar", "f")


def test_names_are_one_harmless_line() -> None:
    assert printable("plain näme.jpg") == "plain näme.jpg"
    assert printable("a\x1b[31m\nb\udcff\u202e") == "a\\x1b[31m\\nb\\udcff\\u202e"
    assert printable("x" * 500) == "x" * 200 + "…" and printable("x" * 500, math.inf) == "x" * 500


def test_urls_are_shown_without_secrets() -> None:
    assert shown("https://me:secret@host/a.tar?signature=secret") == "https://host/a.tar"
