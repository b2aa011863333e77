"""Both forms of tars are read; what is broken is skipped and named, and nothing else is lost."""

import json
import os
import tarfile
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from disttrain_cli.data.sources import Sample, Shard, Skipped, read_shard
from disttrain_cli.data.sources.tars import parse_parts
from disttrain_cli.spec.index import IMAGE, TARGET, TEXT
from tests.data.dataset import encoded, image, interleaved, text, write_tar

GOOD = [
    interleaved("good", text("hello"), image("good.0.jpg"), image("good.1.jpg", True)),
    ("good.0.jpg", encoded(30, 40)),
    ("good.1.jpg", encoded(50, 60)),
]


def read(path: Path) -> tuple[dict[str, Sample], dict[str, str]]:
    found = list(read_shard(Shard("tar", str(path), path.name), path.name))
    assert all(s.shard == path.name for s in found if isinstance(s, Skipped))
    samples = {s.key: s for s in found if isinstance(s, Sample)}
    return samples, {s.key: s.reason for s in found if isinstance(s, Skipped)}


def test_interleaved_segments_point_at_their_bytes(tmp_path: Path) -> None:
    shard = write_tar(tmp_path / "a.tar", GOOD)
    samples, skipped = read(shard)
    assert not skipped
    segments = samples["good"].segments
    assert [(s.kind, s.text, s.width_px, s.height_px) for s in segments] == [
        (TEXT, "hello", 0, 0),
        (IMAGE, "", 30, 40),
        (TARGET, "", 50, 60),
    ]
    content = shard.read_bytes()
    for segment, (_, data) in zip(segments, GOOD, strict=True):
        assert content[segment.location.offset : sum(segment.location)] == data


def test_captions_from_text_or_json(tmp_path: Path) -> None:
    shard = write_tar(
        tmp_path / "a.tar",
        [
            ("0.jpg", encoded(20, 20)),
            ("0.txt", "a cät".encode()),
            ("0.json", b'{"caption": "not this", "status": 1}'),
            ("dir/1.webp", encoded(20, 20, ".webp")),
            ("dir/1.json", b'{"caption": "a dog"}'),
            ("2.png", encoded(20, 20, ".png")),
            ("2.txt", b"{curly} and [square]"),
        ],
    )
    samples, skipped = read(shard)
    assert not skipped
    assert {key: s.segments[1].text for key, s in samples.items()} == {
        "0": "a cät",
        "dir/1": "a dog",
        "2": "{curly} and [square]",
    }
    assert all([s.kind for s in sample.segments] == [IMAGE, TEXT] for sample in samples.values())


def test_images_anywhere_in_the_tar(tmp_path: Path) -> None:
    shard = write_tar(
        tmp_path / "a.tar",
        [
            ("pictures/x.jpg", encoded(20, 20)),
            interleaved("s/0", image("pictures/x.jpg"), image("y.jpg")),
            ("s/y.jpg", encoded(21, 20)),
        ],
    )
    samples, skipped = read(shard)
    assert not skipped and [s.width_px for s in samples["s/0"].segments] == [20, 21]


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        ([("bad.json", b"{not json")], "not valid JSON"),
        ([("bad.json", b"\xff\xfe")], "not valid JSON"),
        ([("bad.json", b"[" * 100_000)], "not valid JSON"),
        ([("bad.json", b"[1, 2]")], "neither"),
        ([("bad.json", b'{"segments": []}')], "at least one"),
        ([("bad.json", b'{"segments": [{"type": "sound"}]}')], r"segments\[0\]"),
        (
            [("bad.json", b'{"segments": [{"type": "image", "file": "a", "generate": 1}]}')],
            "true or false",
        ),
        ([interleaved("bad", text("a"), image("gone.jpg"))], "gone.jpg is missing"),
        ([interleaved("bad", image("../../etc/passwd"))], "missing"),
        (
            [interleaved("bad", image("bad.jpg")), ("bad.jpg", b"a text file")],
            "bad.jpg: not a JPEG",
        ),
        ([interleaved("bad", text("a")), interleaved("bad", text("b"))], "twice"),
        ([("bad.txt", b"a caption")], "without its image"),
        ([("bad.txt", b"\xff"), ("bad.jpg", encoded(20, 20))], "UTF-8"),
    ],
)
def test_broken_samples_are_named(
    tmp_path: Path, files: list[tuple[str, bytes]], reason: str
) -> None:
    samples, skipped = read(write_tar(tmp_path / "a.tar", [*files, *GOOD]))
    assert list(samples) == ["good"]
    assert list(skipped) == ["bad"]
    with pytest.raises(ValueError, match=reason):
        raise ValueError(skipped["bad"])


def test_image_without_caption(tmp_path: Path) -> None:
    shard = write_tar(
        tmp_path / "a.tar",
        [("0.jpg", encoded(20, 20)), ("1.jpg", encoded(20, 20)), ("1.txt", b"one")],
    )
    samples, skipped = read(shard)
    assert list(samples) == ["1"] and "without a caption" in skipped["0"]


def test_truncated_tar_yields_what_is_whole(tmp_path: Path) -> None:
    files = [
        file
        for n in range(5)
        for file in (
            interleaved(f"{n}", image(f"{n}.jpg"), text("t" * 900)),
            (f"{n}.jpg", encoded(40, 40)),
        )
    ]
    shard = write_tar(tmp_path / "a.tar", files)
    with tarfile.open(shard) as tar:
        offset = tar.getmember("3.jpg").offset_data
    os.truncate(shard, offset + 100)
    samples, skipped = read(shard)
    assert list(samples) == ["0", "1", "2"]
    assert "missing" in skipped["3"] and "ends inside 3.jpg" in skipped[""]


def test_tar_without_end_and_garbage_after_a_member(tmp_path: Path) -> None:
    shard = write_tar(tmp_path / "a.tar", GOOD)
    with tarfile.open(shard) as tar:
        last = tar.getmember("good.1.jpg")
        end = last.offset_data + -(-last.size // 512) * 512
    content = shard.read_bytes()
    shard.write_bytes(content[:end])
    assert "end marker" in read(shard)[1][""]
    shard.write_bytes(content[:end] + b"garbage!" * 200)
    samples, skipped = read(shard)
    assert list(samples) == ["good"] and "damaged tar" in skipped[""]


@pytest.mark.parametrize("content", [b"", b"no tar at all" * 100])
def test_not_a_tar(tmp_path: Path, content: bytes) -> None:
    shard = tmp_path / "a.tar"
    shard.write_bytes(content)
    samples, skipped = read(shard)
    assert not samples and "not a complete tar" in skipped[""]


def test_no_damage_escapes_as_an_exception(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    whole = write_tar(
        tmp_path / "a.tar", [*GOOD, ("c.png", encoded(20, 20, ".png")), ("c.txt", b"c")]
    ).read_bytes()
    shard, read_whole = tmp_path / "b.tar", 0
    for _ in range(60):
        content = np.frombuffer(whole, np.uint8).copy()
        content[random.integers(0, len(content), size=random.integers(1, 6))] = random.integers(
            0, 256
        )
        shard.write_bytes(
            content[: random.integers(len(content) * 2 // 3, len(content) + 1)].tobytes()
        )
        samples, skipped = read(shard)
        assert set(samples) <= {"good", "c"} and all(skipped.values())
        read_whole += len(samples)
    assert read_whole > 20  # most damage leaves something whole


def test_a_tar_whose_names_make_no_sample_says_so(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "a.tar", [("a.0.jpg", encoded(20, 20)), ("a.0.txt", b"a")])
    (found,) = read_shard(Shard("tar", str(path), "a.tar"), "a.tar")
    assert isinstance(found, Skipped) and "a.0.txt; a key ends at the first dot" in found.reason


def test_links_are_named_and_folders_ignored(tmp_path: Path) -> None:
    shard = tmp_path / "a.tar"
    with tarfile.open(shard, "w") as tar:
        link = tarfile.TarInfo("link.json")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        tar.addfile(link)
        folder = tarfile.TarInfo("folder")
        folder.type = tarfile.DIRTYPE
        tar.addfile(folder)
    samples, skipped = read(shard)
    assert not samples and "link.json is not a regular file" in skipped["link"]


def test_half_characters_do_not_break_tokenizers() -> None:
    parts = parse_parts(json.dumps({"segments": [text("a\ud800b")]}).encode())
    assert isinstance(parts, list) and parts[0].value == "a?b"


@pytest.mark.parametrize(
    ("kind", "size", "small"),
    [
        (tarfile.XHDTYPE, 300 << 20, False),
        (tarfile.XGLTYPE, 2 << 20, False),
        (tarfile.GNUTYPE_LONGNAME, 300 << 20, False),
        (tarfile.GNUTYPE_LONGLINK, 300 << 20, False),
        (tarfile.SOLARIS_XHDTYPE, 300 << 20, False),
        (tarfile.GNUTYPE_LONGNAME, 600, True),
    ],
)
def test_extended_headers_are_bounded(tmp_path: Path, kind: bytes, size: int, small: bool) -> None:
    path = write_tar(tmp_path / "a.tar", GOOD)
    header = tarfile.TarInfo("././@LongLink")
    header.type, header.size = kind, size
    whole = path.read_bytes()
    with path.open("wb") as file:
        file.write(header.tobuf(tarfile.GNU_FORMAT))
        if small:
            file.write(b"good.json".ljust(size, b"\0"))
        file.seek(-(-size // 512) * 512 + 512)  # a hole instead of a large header's bytes
        file.write(whole)
    tracemalloc.start()
    samples, skipped = read(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 16 << 20
    assert list(samples) == (["good"] if small else [])
    assert small or f"an extended header of {size} bytes" in skipped[""]


def test_files_to_which_no_record_refers_are_named(tmp_path: Path) -> None:
    picture = encoded(20, 30)
    turns = [{"role": "user", "content": "<image>"}, {"role": "assistant", "content": "a"}]
    files = [
        *(("0.jpg", picture), ("0.cls", b"3")),
        *(("1.jpg", picture), ("1.jsonl", b"{}")),
        *(("2.jpg", picture), ("3.jpg", picture), ("4.png", picture)),
        *(("d/5.jpg", picture), ("6.jpg", picture), ("7.jpg", picture)),
        ("a.json", json.dumps({"messages": turns, "image": "2.jpg"}).encode()),
        ("b.json", json.dumps({"messages": turns, "image": "2.jpg"}).encode()),
        ("d/c.json", json.dumps({"segments": [text("a"), image("5.jpg")]}).encode()),
        ("e.json", json.dumps({"messages": turns[:1], "image": "6.jpg"}).encode()),
        *(("7.json", json.dumps({"messages": turns}).encode()),),
    ]
    samples, skipped = read(write_tar(tmp_path / "a.tar", files))
    assert list(samples) == ["7", "a", "b", "d/c"]
    assert skipped == {
        "e": "no token of it is trained",
        "0": "neither KEY.txt nor KEY.json, but .jpg, .cls",
        "1": "neither KEY.txt nor KEY.json, but .jpg, .jsonl",
    }
    unread = [name for one in samples.values() for name in one.unread]
    assert unread == ["member `3.jpg`", "member `4.png`"]
