"""Which files of a source are its shards, in which order; what is none is named or refused."""

import json
import math
import os
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
    assert "data.sources[0].path: here" in str(caught.value) and "disttrain_cli.init" in str(
        caught.value
    )
    touch(tmp_path, "notes.txt", "a.tar.gz", "dataset_info.json")
    with pytest.raises(DataError, match="contains no shard") as caught:
        list_source(str(tmp_path), "data.sources[0].path: here")
    assert (
        "a.tar.gz, but dataset_info.json" in str(caught.value)
        and "Decompress" in caught.value.next_step
    )
    with pytest.raises(DataError, match=r"format of .*gz is unknown") as caught:
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


def names(tmp_path: Path, files: list[str], **options: bool) -> tuple[list[str], str]:
    """(shards, what is said of the other files) of a folder."""
    touch(tmp_path, *files)
    listing = list_source(str(tmp_path), "f", **options)
    assert all(options.get("validation") or not shard.held_out for shard in listing.shards)
    return [shard.name for shard in listing.shards], "; ".join(listing.unread)


@pytest.mark.parametrize(
    ("train", "others"),
    [
        (
            ["data/train-00000-of-00002.parquet", "data/train-00001-of-00002.parquet"],
            {
                "validation": ["data/validation-00000-of-00001.parquet"],
                "test": ["data/test.parquet"],
            },
        ),
        (["train.jsonl"], {"validation": ["val.jsonl"], "test": ["test.jsonl"]}),
        (["my_train_file_00.jsonl"], {"validation": ["my_dev_file_00.jsonl"]}),
        (["a.training.json"], {"validation": ["a.valid.json"], "test": ["a.testing.json"]}),
        (["Train.jsonl"], {"test": ["EVAL.jsonl"]}),
        (["train_0.tar", "train_1.tar"], {"validation": ["valid_0.tar"]}),
        (["train2017.json"], {"validation": ["val2017.json"]}),
        (
            ["train/data-00000-of-00001.arrow"],
            {"validation": ["validation/data-00000-of-00001.arrow"]},
        ),
        (["test_set/train/a.parquet"], {"validation": ["train_set/val/a.parquet"]}),  # the inner
        (["en/train/a.parquet"], {"test": ["de/test/train.parquet"]}),  # folders come first
        (["split-train/a.parquet"], {"test": ["evaluation 2/a.parquet"]}),
        (["train/metadata.jsonl"], {"test": ["test/metadata.jsonl"]}),
        (["train.parquet"], {"no split": ["extra.parquet"], "test": ["test.jsonl"]}),
        (["train_val.jsonl"], {"test": ["test_dev.jsonl"]}),
        (["a.jsonl", "contest.jsonl"], {"test": ["test.jsonl"]}),  # what has no split is trained on
        (["train/0.tar", "train/1.tar"], {"validation": ["val/0.tar"]}),
        (["en/train/a.jsonl"], {"test": ["en/test/a.jsonl"]}),
        (["latest.jsonl", "trainer.jsonl", "invalid.jsonl"], {}),
    ],
)
def test_the_train_split_is_read_alone(
    tmp_path: Path, train: list[str], others: dict[str, list[str]]
) -> None:
    held_back = [name for own in others.values() for name in own]
    shards, unread = names(tmp_path, [*train, *held_back])
    assert shards == sorted(train)
    assert all(f"{', '.join(own)} (" in unread and split in unread for split, own in others.items())
    assert bool(unread) == bool(others)


def test_the_validation_split_is_held_out_where_it_is_asked_for(tmp_path: Path) -> None:
    touch(tmp_path, "train.jsonl", "validation.jsonl", "test.jsonl")
    listing = list_source(str(tmp_path), "f", validation=True)
    assert [(one.name, one.held_out) for one in listing.shards] == [
        ("train.jsonl", False),
        ("validation.jsonl", True),
    ]
    assert "held out: validation.jsonl" in listing.unread[0] and "test.jsonl" in listing.unread[1]


@pytest.mark.parametrize("path", ["validation", "validation.jsonl"])
def test_what_is_named_is_read_whatever_split_it_is(tmp_path: Path, path: str) -> None:
    touch(tmp_path, "train.jsonl", "validation.jsonl", "validation/validation-0.jsonl")
    listing = list_source(str(tmp_path / path), "f")
    assert len(listing.shards) == 1 and not listing.shards[0].held_out


@pytest.mark.parametrize(
    ("files", "named"),
    [
        (["a.jsonl", "c.parquet"], "c.parquet and a.jsonl"),
        (["a.tar", "b.jsonl"], "a.tar and b.jsonl"),
        (["a.tar", "b.parquet"], "a.tar and b.parquet"),
        (["below/a.parquet", "z.arrow"], "below/a.parquet and z.arrow"),
        (["a.parquet", "metadata.jsonl", "1.jpg"], "metadata.jsonl"),
        (["a.jsonl", "b.jsonl.gz"], "b.jsonl.gz is compressed"),
        (["train.jsonl.zst", "test.jsonl"], "train.jsonl.zst is compressed"),
        (["0.tar", "1.tgz"], "1.tgz is compressed"),
        (
            [
                f"data/{one}-00000-of-00001.parquet"
                for one in ("train_sft", "train_gen", "test_sft")
            ],
            "train_gen-00000-of-00001.parquet and data/train_sft-00000-of-00001.parquet",
        ),
        ([f"{one}-00000-of-00001.parquet" for one in ("red", "blue")], "several sets"),
        (["validation.jsonl", "test.jsonl"], "validation and test, but none to train on"),
    ],
)
def test_folders_that_can_be_read_in_several_ways_are_refused(
    tmp_path: Path, files: list[str], named: str
) -> None:
    with pytest.raises(DataError, match="can be read in several ways") as caught:
        names(tmp_path, files)
    assert named in caught.value.why and caught.value.next_step


@pytest.mark.parametrize(
    ("shards", "beside", "unread"),
    [
        (["00000.tar"], ["00000.parquet", "00000_stats.json"], "00000.parquet (another form"),
        (["00000.tar"], ["meta/a.parquet", "index.json"], "index.json, meta/a.parquet (another"),
        (["a.parquet"], ["metadata.jsonl"], "metadata.jsonl (another form"),
        (["a.parquet"], ["README.md", "LICENSE", "1.jpg", ".gitattributes", "state.json"], ""),
        (["a.jsonl"], ["a.jsonl.gz", "images.zip"], "a.jsonl.gz, images.zip (packed)"),
        (["a.parquet"], ["raw.jsonl.gz"], "raw.jsonl.gz (packed)"),
        (["a.jsonl"], ["b.csv", "run.py"], "b.csv, run.py (no supported format)"),
        (
            ["a.tar"],
            [f"sub/{n}.tar" for n in range(5)],
            "sub/0.tar, sub/1.tar, sub/2.tar and 2 more",
        ),
        (["1.tar", "2.tar", "4.tar"], [], "missing: 3.tar (a gap"),
        (["1.tar", "3.tar", "5.tar"], [], ""),
        (["a.parquet"], ["_temporary/0/a.parquet"], "_temporary/0/a.parquet (left over"),
        (["a.parquet"], ["_SUCCESS", "_metadata", "_common_metadata"], ""),
        (["0.tar", "2.tar", "3.tar"], [], ""),  # it is counted as a lost sample is
    ],
)
def test_what_lies_beside_the_shards_is_named(
    tmp_path: Path, shards: list[str], beside: list[str], unread: str
) -> None:
    touch(tmp_path, *beside)
    if "index.json" in beside:
        (tmp_path / "index.json").write_text('{"shards": []}')
    found, said = names(tmp_path, shards)
    assert found == shards and (unread in said if unread else not said)


def test_a_list_of_records_beside_shards_is_no_metadata(tmp_path: Path) -> None:
    touch(tmp_path, "a.parquet")
    (tmp_path / "b.json").write_text(' [{"text": "a"}]')
    with pytest.raises(DataError, match="several ways"):
        list_source(str(tmp_path), "f")


@pytest.mark.parametrize("content", ['{"00000.tar": 10}', '["cat", "dog"]', "[1, 2]"])
def test_what_describes_tars_hides_none(tmp_path: Path, content: str) -> None:
    (tmp_path / "sizes.json").write_text(content)
    found, said = names(tmp_path, ["train/0.tar", "val/0.tar"])
    assert found == ["train/0.tar"] and "sizes.json (another form" in said
    touch(tmp_path, "flat/0.tar")
    (tmp_path / "flat" / "classes.json").write_text(content)
    found, said = names(tmp_path / "flat", [])
    assert found == ["0.tar"] and "classes.json (another form" in said


def test_shards_in_folders_below_are_asked_for(tmp_path: Path) -> None:
    touch(tmp_path, "first/0.tar", "first/1.tar")
    with pytest.raises(DataError, match="contains no shard") as caught:
        list_source(str(tmp_path), "f")
    assert "first/0.tar" in caught.value.why and "Name the folder" in caught.value.next_step


@pytest.mark.parametrize("suffix", [".parquet", ".json", ".jsonl", ".tar", ".arrow"])
@pytest.mark.parametrize("where", ["", "memory://"])
def test_a_folder_is_one_whatever_its_name(tmp_path: Path, suffix: str, where: str) -> None:
    folder = tmp_path / f"out{suffix}"
    touch(folder, f"part-0{suffix}", f"what?.{suffix[1:]}")
    path = str(folder)
    if where:
        fsspec = pytest.importorskip("fsspec")
        path = f"memory://{tmp_path.name}/out{suffix}"
        fsspec.filesystem("memory").put(str(folder), path, recursive=True)
    shards = list_source(path, "f").shards
    assert [shard.name for shard in shards] == [f"part-0{suffix}", f"what?{suffix}"]
    if not where:
        named = list_source(f"{folder}/what?{suffix}", "f").shards
        assert [shard.name for shard in named] == [f"what?{suffix}"]


def test_links_to_folders_are_named(tmp_path: Path) -> None:
    touch(tmp_path, "own/a.parquet", "elsewhere/b.parquet")
    (tmp_path / "own" / "sub").symlink_to(tmp_path / "elsewhere")
    found, said = names(tmp_path / "own", [])
    assert found == ["a.parquet"]
    assert "sub/ (a link to a folder, not followed)" in said
    (tmp_path / "own" / "train").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(DataError, match="several ways") as caught:
        names(tmp_path / "own", [])
    assert "train/ is a link to a folder" in caught.value.why
    (tmp_path / "own" / "train").unlink()
    (tmp_path / "own" / "a.parquet").unlink()
    with pytest.raises(DataError, match="contains no shard") as caught:
        names(tmp_path / "own", [])
    assert "sub/: a link to a folder" in caught.value.why


def test_a_name_that_is_not_utf8_is_refused(tmp_path: Path) -> None:
    touch(tmp_path, "a.jsonl")
    Path(os.fsdecode(bytes(tmp_path) + b"/b\xff.jsonl")).write_text("{}")
    with pytest.raises(DataError, match="not UTF-8"):
        names(tmp_path, [])


def test_a_dataset_saved_over_an_older_one_is_read_alone(tmp_path: Path) -> None:
    new, old = ([f"a/data-{n:05d}-of-{of:05d}.arrow" for n in range(of)] for of in (2, 4))
    touch(tmp_path, *new, *old, "b/data-00000-of-00001.arrow")
    files = [{"filename": Path(name).name} for name in new]
    (tmp_path / "a" / "state.json").write_text(json.dumps({"_data_files": files}))
    found, said = names(tmp_path, [])
    assert found == [*new, "b/data-00000-of-00001.arrow"]
    assert f"{', '.join(old[:3])} and 1 more (not part of the last saved" in said


ONE = "configs: [{config_name: x, data_files: [{split: train, path: a.parquet}, SPLIT]}]"
FILES = ["a.parquet", "b.parquet", "data/train-0.parquet", "data/test-0.parquet", "en/a.jsonl"]


@pytest.mark.parametrize(
    ("head", "found", "held", "said"),
    [
        (ONE.replace("SPLIT", "{split: test, path: b.parquet}"), FILES[:1], [], "b.parquet (the"),
        (ONE.replace("SPLIT", "{split: dev, path: [b.*]}"), FILES[:1], FILES[1:2], "held out: b"),
        (ONE.replace("SPLIT", "{split: more, path: b.*}"), FILES[:1], [], "b.parquet (the split m"),
        (
            ONE.replace(", SPLIT", ""),
            FILES[:1],
            [],
            "b.parquet, data/test-0.parquet, data/train-0.parquet (not among",
        ),
        ("configs: [{data_files: 'data/*-0.parquet'}]", FILES[3:1:-1], [], "a.parquet, b.parquet"),
        ("configs: [{data_files: '**/a*'}]\n# both", [], [], "a.parquet and en/a.jsonl"),
        ("configs: [{data_dir: en, data_files: '*'}]", FILES[4:], [], "a.parquet"),
        (
            "configs: [{config_name: x, data_files: a.*}, {default: true, data_files: b.*}]",
            FILES[1:2],
            [],
            "a.parquet",
        ),
        (
            "configs: [{data_files: a.*}, {config_name: de, data_files: b.*}]",
            [],
            [],
            "configs 0, de",
        ),
        (
            "configs: [{data_files: {train_sft: a.*, train_gen: b.*}}]",
            [],
            [],
            "the splits train_sft, train_gen, and no split to train on",
        ),
        (
            "configs: [{data_files: {train_sft: a.*, test_sft: [b.*]}}]",
            FILES[:1],
            [],
            "b.parquet (the split test)",
        ),
        ("configs: [{data_files: nowhere.csv}]", [], [], "no file of train is supported"),
        ("language: en", FILES[2:3], [], "the split test"),
        ("configs: [", FILES[2:3], [], "the split test"),
    ],
)
def test_splits_that_a_readme_declares(
    tmp_path: Path, head: str, found: list[str], held: list[str], said: str
) -> None:
    touch(tmp_path, *FILES)
    (tmp_path / "README.md").write_text(f"---\n{head}\n---\n# A dataset\n")
    if not found:
        with pytest.raises(DataError, match="can be read in several ways") as caught:
            list_source(str(tmp_path), "f", validation=True)
        assert said in caught.value.why
        return
    listing = list_source(str(tmp_path), "f", validation=True)
    assert [one.name for one in listing.shards if not one.held_out] == found
    assert [one.name for one in listing.shards if one.held_out] == held
    assert said in "; ".join(listing.unread)
