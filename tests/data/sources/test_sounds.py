"""Sound files in tars and tables: read with their texts, and named where they cannot be used."""

from pathlib import Path

import pyarrow as pa
import pytest

from disttrain_cli.data.sources import Location, RowGroups, Sample, Shard, Skipped, open_shard
from disttrain_cli.data.sources.chats import conversation, file_names
from disttrain_cli.data.sources.columns import find_columns
from disttrain_cli.spec.index import AUDIO, IMAGE, TEXT
from tests.data.dataset import encoded, image, interleaved, text, write_tar
from tests.data.sources.forms import read_one_by_one, write_arrow, write_parquet
from tests.data.test_clips import sound


def read(path: Path) -> tuple[dict[str, Sample], dict[str, str]]:
    found = list(read_one_by_one(Shard(path.suffix[1:], str(path), path.name), path.name))
    return (
        {one.key: one for one in found if not isinstance(one, Skipped)},
        {one.key: one.reason for one in found if isinstance(one, Skipped)},
    )


def clip(file: str) -> dict[str, str]:
    return {"type": "audio", "file": file}


def test_tars_of_clips_with_transcripts_and_interleaved(tmp_path: Path) -> None:
    files = [
        ("0.flac", sound("flac", seconds=0.25)),
        ("0.txt", b"a transcript"),
        ("1.mp3", sound("mp3", 44_100)),
        ("1.json", b'{"caption": "a song"}'),
        ("2.png", encoded(20, 30, ".png")),
        ("2.WAV", sound()),
        ("2.txt", b"seen and heard"),
        interleaved("3", text("first"), clip("3.a.ogg"), image("3.b.jpg"), clip("0.flac")),
        ("3.a.ogg", sound("ogg")),
        ("3.b.jpg", encoded(16, 17)),
    ]
    path = write_tar(tmp_path / "a.tar", files)
    samples, skipped = read(path)
    assert not skipped
    assert {
        key: [(s.kind, s.text, s.width_px, s.height_px) for s in one.segments]
        for key, one in samples.items()
    } == {
        "0": [(AUDIO, "", 250, 16_000), (TEXT, "a transcript", 0, 0)],
        "1": [(AUDIO, "", 500, 44_100), (TEXT, "a song", 0, 0)],
        "2": [(IMAGE, "", 20, 30), (AUDIO, "", 500, 16_000), (TEXT, "seen and heard", 0, 0)],
        "3": [
            (TEXT, "first", 0, 0),
            (AUDIO, "", 500, 16_000),
            (IMAGE, "", 16, 17),
            (AUDIO, "", 250, 16_000),
        ],
    }
    shard, content = open_shard(Shard("tar", str(path), path.name), RowGroups()), dict(files)
    assert (
        shard.file("audio", samples["3"].segments[1].location, Location(-1, 0))
        == content["3.a.ogg"]
    )


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        ([("bad.flac", sound("flac"))], "a clip without a caption"),
        ([("bad.wav", sound()[:-9]), ("bad.txt", b"x")], "bad.wav: truncated WAV"),
        (
            [("bad.flac", encoded(20, 20)), ("bad.txt", b"x")],
            "bad.flac: not a complete sound file",
        ),  # mislabelled
        ([("bad.jpg", sound()), ("bad.txt", b"x")], "bad.jpg: not a JPEG"),
        ([("bad.wav", sound("aiff")), ("bad.txt", b"x")], "another format: AIFF"),
        ([interleaved("bad", clip("gone.wav"))], "the file gone.wav is missing"),
        ([interleaved("bad", clip("p.jpg")), ("p.jpg", encoded(20, 20))], "p.jpg is not a sound"),
        ([interleaved("bad", image("s.wav")), ("s.wav", sound())], "s.wav is not an image"),
        ([interleaved("bad", {"type": "audio"})], "image or audio or video with `file`"),
    ],
)
def test_bad_clips_are_named(tmp_path: Path, files: list[tuple[str, bytes]], reason: str) -> None:
    good = [("good.ogg", sound("ogg")), ("good.txt", b"fine")]
    samples, skipped = read(write_tar(tmp_path / "a.tar", [*files, *good]))
    assert list(samples) == ["good"] and reason in skipped["bad"]


HF = pa.struct([("bytes", pa.binary()), ("path", pa.string())])


@pytest.mark.parametrize("write", [write_parquet, write_arrow])
def test_tables_of_clips(tmp_path: Path, write: object) -> None:
    sounds = [sound("flac"), b"no sound", None, sound("wav", 8_000)]
    table = pa.table(
        {
            "audio": pa.array(
                [None if one is None else {"bytes": one, "path": "x"} for one in sounds], HF
            ),
            "sentence": ["one", "two", "three", "four"],
            "age": ["a", "b", "c", "d"],
        }
    )
    path = write(tmp_path / ("a.parquet" if write is write_parquet else "a.arrow"), table)  # type: ignore[operator]
    samples, skipped = read(path)
    assert list(samples) == ["row 0", "row 3"]
    assert (
        "not a complete sound file" in skipped["row 1"]
        and skipped["row 2"] == "the clip is missing"
    )
    assert [(s.kind, s.text, s.width_px) for s in samples["row 3"].segments] == [
        (AUDIO, "", 500),
        (TEXT, "four", 0),
    ]
    shard = open_shard(Shard(path.suffix[1:], str(path), path.name), RowGroups())
    first, words = samples["row 3"].segments
    assert shard.file("audio", first.location, words.location) == sounds[3] and shard.texts(
        words.location
    ) == ["four"]
    with pytest.raises(ValueError, match="no column of such files"):
        shard.file("image", first.location, words.location)


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ("audio text", ({"audio": "audio"}, ("text",), False)),
        ("image audio text sentence", ({"image": "image", "audio": "audio"}, ("text",), False)),
        ("FLAC transcription speaker", ({"audio": "FLAC"}, ("transcription",), False)),
    ],
)
def test_sound_columns_go_by_their_names(names: str, expected: tuple[object, ...]) -> None:
    kinds = [
        (name, HF if name.lower() in ("image", "audio", "flac") else pa.string())
        for name in names.split()
    ]
    assert find_columns(pa.schema(kinds), "x")[:3] == expected


def test_clips_are_named_in_conversations_as_images_are() -> None:
    """By marks in a text, or by parts; clips, images and videos in the order of the turns."""
    said = {"from": "human", "value": "<audio>What <video>or <image>?"}
    answer = {"from": "gpt", "value": "A <audio>."}
    marked = {"conversations": [said, answer], "audios": ["a.wav", "b.wav"]}
    marked |= {"image": "a.png", "video": "a.mp4"}
    parts = [{"type": one, one: f"{one}.x"} for one in ("audio", "image", "audio_url")]
    listed = {
        "messages": [{"role": "user", "content": parts}, {"role": "assistant", "content": "b"}]
    }
    for record, names in (
        (marked, ["a.wav", "a.mp4", "a.png", "b.wav"]),
        (listed, ["audio.x", "image.x", "audio_url.x"]),
    ):
        files = [part for part in conversation(record) if part.kind != TEXT]
        assert [part.value for part in files] == names == file_names(record)
        assert [part.kind == AUDIO for part in files] == [
            one.endswith(".wav") or one.startswith("audio") for one in names
        ]
    with pytest.raises(ValueError, match="1 occurrences of <audio> for 2 audios"):
        conversation(marked | {"conversations": [said, {"from": "gpt", "value": "A"}]})
