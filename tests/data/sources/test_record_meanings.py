"""Keys that change what a record means are read, or their record is left out by name, whatever form
of dataset it comes in."""

import base64
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from disttrain_cli.data.sources import RowGroups, Sample, Shard, Skipped, open_shard
from disttrain_cli.data.sources.chats import compact, conversation
from disttrain_cli.spec.index import IMAGE, TEXT
from tests.data.dataset import encoded, write_tar
from tests.data.sources.forms import read_one_by_one, write_arrow, write_parquet

PICTURES = [encoded(20 + 8 * number, 30, shade=40 * number) for number in range(3)]
NAMES = [f"{number}.jpg" for number in range(3)]


def turns(*said: Any, **record: Any) -> dict[str, Any]:
    """Turns of a user and an assistant: texts, or mappings that say more than one."""
    roles = ("user", "assistant")
    return {
        "messages": [
            {"role": roles[at % 2], **(one if isinstance(one, dict) else {"content": one})}
            for at, one in enumerate(said)
        ],
        **record,
    }


def write_json(folder: Path, record: dict[str, Any]) -> Shard:
    (folder / "a.json").write_text(json.dumps([record]))
    return Shard("llava", str(folder / "a.json"), "a", str(folder))


def write_jsonl(folder: Path, record: dict[str, Any]) -> Shard:
    (folder / "a.jsonl").write_text("\n" + json.dumps(record))
    return Shard("llava", str(folder / "a.jsonl"), "a", str(folder))


def write_json_tar(folder: Path, record: dict[str, Any]) -> Shard:
    files = [*zip(NAMES, PICTURES, strict=True), ("a.json", json.dumps(record).encode())]
    return Shard("tar", str(write_tar(folder / "a.tar", files)), "a")


def table(record: dict[str, Any]) -> pa.Table:
    images = [PICTURES[NAMES.index(name)] for name in record.get("images", [])]
    columns = {name: pa.array([value]) for name, value in record.items()}
    return pa.table(columns | {"images": pa.array([images], pa.list_(pa.binary()))})


def write_table(folder: Path, record: dict[str, Any]) -> Shard:
    return Shard("parquet", str(write_parquet(folder / "a.parquet", table(record))), "a")


def write_stream(folder: Path, record: dict[str, Any]) -> Shard:
    return Shard("arrow", str(write_arrow(folder / "a.arrow", table(record))), "a")


FILES: dict[str, Callable[[Path, dict[str, Any]], Shard]] = {
    "json": write_json,
    "jsonl": write_jsonl,
    "tar": write_json_tar,
}
TABLES = {"parquet": write_table, "arrow": write_stream}


def found(folder: Path, form: str, record: dict[str, Any]) -> Sample | Skipped:
    for name, picture in zip(NAMES, PICTURES, strict=True):
        (folder / name).write_bytes(picture)
    shard = (FILES | TABLES)[form](folder, record)
    (one,) = read_one_by_one(shard, "a")
    if isinstance(one, Sample):  # what is read again is what was indexed
        opened, texts = open_shard(shard, RowGroups()), _texts(one)
        record_at = next(part.location for part in one.segments if part.kind == TEXT)
        assert opened.texts(record_at) == [text for text, _ in texts]
        widths = [
            _width(opened.file("image", segment.location, record_at))
            for segment in one.segments
            if segment.kind == IMAGE
        ]
        assert widths == [segment.width_px for segment in one.segments if segment.kind == IMAGE]
    return one


def _texts(sample: Sample) -> list[tuple[str, bool]]:
    return [(one.text, one.trained) for one in sample.segments if one.kind == TEXT]


def _width(picture: bytes) -> int:
    return 20 + 8 * PICTURES.index(picture)


def trained(sample: Sample | Skipped) -> list[str]:
    assert isinstance(sample, Sample), sample
    return [text.strip() for text, is_trained in _texts(sample) if is_trained]


@pytest.mark.parametrize("form", FILES | TABLES)
@pytest.mark.parametrize(
    ("flag", "off", "on"),
    [
        ("loss", False, True),
        ("loss", 0.0, 1.0),
        ("loss", False, None),
        ("train", False, True),
        ("training", False, True),
        ("weight", 0, 1),
        ("loss_weight", 0.0, 1.0),
        ("loss_mask", 0, 1),
        ("masked", True, False),
    ],
)
def test_flags_of_turns(tmp_path: Path, form: str, flag: str, off: Any, on: Any) -> None:
    first, second = {"content": "no", flag: off}, {"content": "yes", flag: on}
    assert trained(found(tmp_path, form, turns("a", first, "b", second))) == ["yes"]


@pytest.mark.parametrize("form", FILES)
@pytest.mark.parametrize(("given", "expected"), [(True, ["yes"]), (False, ["no", "yes"])])
def test_a_masked_history(tmp_path: Path, form: str, given: bool, expected: list[str]) -> None:
    record = turns("a", "no", "b", "yes", "c", mask_history=given)
    assert trained(found(tmp_path, form, record)) == expected


def test_flags_of_sharegpt() -> None:
    record = {
        "conversations": [
            {"from": "human", "value": "a", "train": False},
            {"from": "gpt", "value": "no", "train": False},
            {"from": "human", "value": "b", "train": False},
            {"from": "gpt", "value": "yes", "train": True},
        ]
    }
    texts = [part.value for part in conversation(record) if part.kind == TEXT and part.trained]
    assert texts == [" yes"]


def parts(*places: Any) -> list[dict[str, Any]]:
    """Images with an index, and a text, as tables give them: every part has all keys."""
    images = [{"type": "image", "index": place, "text": None} for place in places]
    return [*images, {"type": "text", "index": None, "text": "Which?"}]


@pytest.mark.parametrize("form", FILES | TABLES)
@pytest.mark.parametrize(
    ("places", "seen"),
    [([1, 0], [1, 0]), ([0, 1], [0, 1]), ([1, 0, 1], [1, 0, 1]), ([None, None], [0, 1])],
)
def test_the_index_of_a_part_is_that_of_an_image(
    tmp_path: Path, form: str, places: list[int | None], seen: list[int]
) -> None:
    record = turns({"content": parts(*places)}, {"content": parts()}, images=NAMES[:2])
    sample = found(tmp_path, form, record)
    assert isinstance(sample, Sample)
    widths = [one.width_px for one in sample.segments if one.kind == IMAGE]
    assert widths == [20 + 8 * number for number in seen]


@pytest.mark.parametrize("form", FILES | TABLES)
@pytest.mark.parametrize(
    ("places", "reason"),
    [
        ([0, 2], "a part has the index 2 of 2 images"),
        ([-1, 0], "a part has the index -1 of 2 images"),
        ([0, 0], "no part has the index 1 of 2 images"),
        ([0], "no part has the index 1 of 2 images"),
        ([0, None], "some parts have the index of their image, others have none"),
    ],
)
def test_a_wrong_index_is_refused(
    tmp_path: Path, form: str, places: list[int | None], reason: str
) -> None:
    record = turns({"content": parts(*places)}, {"content": parts()}, images=NAMES[:2])
    one = found(tmp_path, form, record)
    assert isinstance(one, Skipped) and reason in one.reason


OBJECTS = {"ref": ["sheep"], "bbox": [[1, 2, 3, 4]]}
REFUSED: list[tuple[dict[str, Any], str]] = [
    (
        turns("a", {"content": "b", "loss": 0.5}),
        "messages[1] has the loss 0.5; supported are 0 and 1",
    ),
    (turns("a", {"content": "b", "train": "no"}), "has the train 'no'"),
    (turns("a", {"content": "b", "train": True, "weight": 0}), "contradict each other"),
    (turns({"content": "a", "train": True}, "b"), "messages[0] has `train: true`, but only"),
    (
        turns("a", {"content": "b", "train_detail": [{"begin_offset": 0, "train": False}]}),
        "messages[1] has `train_detail`",
    ),
    (turns("a", {"content": "b", "loss": False}), "no token of it is trained"),
    (turns("a"), "no token of it is trained"),
    (turns("a", "b", mask_history="yes"), "`mask_history` must be true or false"),
    (turns("a", "b", loss_mask=[0, 1]), "`loss_mask` of a whole record is not read"),
    (turns("a", "b", weight=0), "`weight` of a whole record is not read"),
    (turns("a", "b", train_on_prompt=True), "`train_on_prompt` of a whole record"),
    (turns("a", "b", label=False), "`label: false` rates the answer (KTO)"),
    (turns("a", "b", label=True), "rates the answer (KTO)"),
    (turns("a", "b", label="false"), "rates the answer (KTO)"),
    (turns("a", "b", kto_tag=False), "rates the answer (KTO)"),
    (turns("a", "b", chosen=False), "rates the answer (KTO)"),
    (turns("a", "b", rejected_response="c"), "`rejected_response`: preference data"),
    (turns("a", chosen={"from": "gpt", "value": "b"}), "`chosen`: preference data"),
    (turns("a", "b", rejected_messages=[{"role": "user"}]), "`rejected_messages`: preference"),
    (turns("a", "b", rejected_images=["0.jpg"]), "`rejected_images`: preference data"),
    (turns("<audio>a", "b", audios=["a.wav"]), "a.wav"),
    (turns("a", "b", sounds=["a.wav"]), "`sounds`: clips are read from `audio`"),
    (turns("a", "b", audio="a.wav"), "0 occurrences of <audio> for 1 audios"),
    (turns("the <ref-object>", "<bbox>", objects=OBJECTS), "<ref-object> in a text refers to it"),
    (turns("the sheep", "<bbox>", objects=OBJECTS), "<bbox> in a text refers to it"),
    (turns("a", "b", tools=[{"name": "c"}]), "`tools`: tool calls are not read"),
    (turns("a", "b", tools='[{"name": "c"}]'), "`tools`: tool calls are not read"),
    (turns("a", "b", functions=[{"name": "c"}]), "`functions`: tool calls"),
    (turns("a", {"content": "b", "function_call": {"name": "c"}}), "`function_call`: tool calls"),
    (turns("a", "b", chat_template_kwargs={"c": "d"}), "`chat_template_kwargs` of a record"),
    (
        turns({"content": "a", "images": ["0.jpg"]}, "b"),
        "messages[0] has `images`: it is supported next to",
    ),
    (turns("a", "b", conversations=[{"from": "gpt", "value": "b"}]), "differ: keep"),
    (
        turns("a", "b", image="0.jpg", images=["1.jpg"]),
        "`images` and another key of the record name different",
    ),
    ({"text": "a", "rejected": "b"}, "`rejected`: preference data"),
    ({"text": "a", "prompt": "b", "completion": "c"}, "next to `prompt` and `completion`"),
    ({"text": "a", "instruction": "b", "output": "c"}, "next to `instruction` and `output`"),
    ({"text": "a", "audio": "a.wav"}, "a.wav"),
    ({"text": "a", "dialogue": turns("a", "b")["messages"]}, "`dialogue` has turns"),
    ({"instruction": "a", "input": "", "output": "b"}, "`instruction` and `output` are not read"),
    (
        {"prompt": turns("a")["messages"], "completion": turns("a")["messages"]},
        "`prompt` and `completion` are not read",
    ),
    (
        {"query": "a", "response": "b", "history": [["c", "d"]]},
        "`query` and `response` are not read",
    ),
]
ELSEWHERE = [
    ({"image_path": "0.jpg"}, "`image_path` names images: call it `image`"),
    ({"img": "0.jpg"}, "`img` names images"),
    ({"image_url": "https://host/a"}, "`image_url` names images"),
    ({"image_url": {"url": "https://host/a"}}, "`image_url` names images"),
    ({"pictures": ["0.jpg", "1.jpg"]}, "`pictures` names images"),
    ({"image_file": "0.JPG"}, "`image_file` names images"),
    ({"photo": [{"path": "0.png"}]}, "`photo` names images"),
    ({"file_names": ["0.jpg"]}, "`file_names` names images"),
    ({"left_file_name": "0.jpg"}, "`left_file_name` names images"),
    ({"video_path": "a.mp4"}, "`video_path` names videos: call it `video`"),
    ({"url": "https://host/a", "width": 3, "height": 4}, "`url` names images"),
]


@pytest.mark.parametrize("form", FILES)
@pytest.mark.parametrize(("keys", "reason"), ELSEWHERE)
@pytest.mark.parametrize(
    "said",
    [{"text": "a"}, turns("a", "b"), turns("<video>a", "b"), {"text": json.dumps(turns("a", "b"))}],
)
def test_files_under_other_keys_are_refused_by_name(
    tmp_path: Path, form: str, keys: dict[str, Any], said: dict[str, Any], reason: str
) -> None:
    one = found(tmp_path, form, said | keys)
    if form == "tar" and said == {"text": "a"}:
        reason = "a caption without its image"
    assert isinstance(one, Skipped) and reason in one.reason, one
    assert compact(said | keys) is None


@pytest.mark.parametrize(
    "keys",
    [
        {"image_path": "x/0.jpg", "image": "0.jpg"},
        {"image_id": "17", "image_path": ""},
        {"url": "https://host/a"},
        {"video_title": "A film", "image_count": 3, "img": None},
    ],
)
def test_other_keys_about_files_are_unread(tmp_path: Path, keys: dict[str, Any]) -> None:
    for said in ({"text": "a"}, turns("<image>a" if "image" in keys else "a", "b")):
        assert isinstance(found(tmp_path, "json", said | keys), Sample)


REFUSED += [
    (turns("Picture 1: <img>a.jpg</img>", "b"), "messages[0] names a file in its text (<img>a.jpg"),
    (turns("<video>a.mp4</video>", "b"), "messages[0] names a file in its text"),
    (turns("a", "b", Rejected="c"), "`rejected`: preference data"),
    (turns("a", "b", Tools=[{"name": "c"}]), "`tools`: tool calls"),
    ({"text": "a", "Rejected": "b"}, "`rejected`: preference data"),
    ({"text": "a", "Audio": "a.wav"}, "`Audio` names audios: call it `audio`"),
    ({"text": json.dumps({"question": "a", "chosen": "b", "rejected": "c"})}, "`chosen`: prefer"),
    ({"text": json.dumps([{"question": "a", "answer": "b"}])}, "JSON of `question` and `answer`"),
    (
        {
            "system": "c",
            "messages": [{"role": "system", "content": "d"}, *turns("a", "b")["messages"]],
        },
        "`system` and the system turn of `messages` differ",
    ),
]
ROLES = ["developer", "tool", "ipython", "observation", "function_call", "bot", "User"]


@pytest.mark.parametrize("form", ["json", "jsonl"])
@pytest.mark.parametrize(("record", "reason"), REFUSED)
def test_other_meanings_are_refused_by_name(
    tmp_path: Path, form: str, record: dict[str, Any], reason: str
) -> None:
    one = found(tmp_path, form, record)
    assert isinstance(one, Skipped) and reason in one.reason, one
    assert one.key == {"json": "record 0", "jsonl": "line 2"}[form]
    assert compact(record) is None


@pytest.mark.parametrize(
    ("record", "reason"), [(record, reason) for record, reason in REFUSED if "messages" in record]
)
def test_they_are_in_tars(tmp_path: Path, record: dict[str, Any], reason: str) -> None:
    one = found(tmp_path, "tar", record)
    assert isinstance(one, Skipped) and reason in one.reason, one


@pytest.mark.parametrize("role", ROLES)
def test_other_speakers_are_refused(tmp_path: Path, role: str) -> None:
    record = turns("a", "b", {"role": role, "content": "c"}, "d")
    one = found(tmp_path, "json", record)
    assert isinstance(one, Skipped) and f"messages[2] is of '{role}'" in one.reason


@pytest.mark.parametrize(
    ("record", "unread"),
    [
        (turns("a", "b", label=3), ["`label`"]),
        (turns("a", "b", label="cat"), ["`label`"]),
        (turns("a", "b", objects={"bbox": [[1, 2]]}), ["`objects`"]),
        (turns("a", "b", rejected="", tools=[], audios=[], chosen=None, objects={}), []),
        (turns("a", "b", weight=1, mask_history=None, train_on_prompt=False), []),
        (turns("a", "b", conversations=turns("a", "b")["messages"]), []),
        (turns("a", "b", images=[], image=""), []),
        (turns("a", "b", tools=[""]), []),
        (turns("a", {"content": "b", "tool_calls": [None]}), []),
        (turns("<div>a</div>", "<img> and <video>b</video>"), []),
        ({"text": '{"a": 1, "label": "b"}'}, []),
        (turns("a", "b", rejected_score=0.5, channel="c"), ["`channel`", "`rejected_score`"]),
        (turns("a <audio> tag", "a <bbox> too"), []),
        (turns("a", "b", text="a b", prompt="a"), ["`prompt`", "`text`"]),
        ({"text": "a", "label": True, "prompt": "b"}, ["`label`", "`prompt`"]),
    ],
)
def test_other_keys_are_unread(tmp_path: Path, record: dict[str, Any], unread: list[str]) -> None:
    one = found(tmp_path, "json", record)
    assert isinstance(one, Sample) and [*one.unread] == [*unread]


URI = "data:image/jpeg;base64," + base64.b64encode(PICTURES[0]).decode()
RAW = base64.encodebytes(PICTURES[0]).decode()


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image", "image": "0.jpg"},
        {"type": "image", "path": "0.jpg"},
        {"type": "image", "url": "0.jpg", "image": None, "text": ""},
        {"type": "image_url", "image_url": "0.jpg"},
        {"type": "image_url", "image_url": {"url": URI}},
        {"type": "image", "image": URI},
        {"type": "image", "image": RAW},
        {"type": "image", "base64": RAW},
        {"type": "image", "base64": URI},
        {"type": "image", "source": {"type": "base64", "media_type": "image/jpeg", "data": RAW}},
        {"type": "image", "source": {"type": "url", "url": "0.jpg"}},
        {"type": "image", "image": {"path": "0.jpg", "bytes": None}},
        {"image": "0.jpg"},
    ],
)
def test_images_of_parts(tmp_path: Path, part: dict[str, Any]) -> None:
    sample = found(tmp_path, "json", turns({"content": [part, {"text": "a"}]}, "b"))
    assert isinstance(sample, Sample), sample
    assert [one.width_px for one in sample.segments if one.kind == IMAGE] == [20]
    assert not sample.unread


@pytest.mark.parametrize(
    "name", [RAW, RAW.replace("\n", ""), URI, URI.rstrip("="), "DATA:" + URI.removeprefix("data:")]
)
@pytest.mark.parametrize("listed", [False, True])
def test_images_of_a_record_in_base64(tmp_path: Path, name: str, listed: bool) -> None:
    sample = found(tmp_path, "jsonl", turns("<image>a", "b", images=[name] if listed else name))
    assert isinstance(sample, Sample), sample
    assert [one.width_px for one in sample.segments if one.kind == IMAGE] == [20]


WEB = "https://me:secret@host/a.jpg?key=secret"


@pytest.mark.parametrize("form", FILES)
@pytest.mark.parametrize(
    ("content", "record", "reason"),
    [
        ([{"type": "image", "image": WEB}], {}, "https://host/a.jpg is a web address: download"),
        ("<image>", {"image": "s3://bucket/a.jpg"}, "s3://bucket/a.jpg is a web address"),
        ("<image>", {"images": ["gs://bucket/a.jpg"]}, "gs://bucket/a.jpg is a web address"),
        ([{"type": "image_base64", "data": RAW}], {}, "part of the type 'image_base64'"),
        ([{"type": "image", "image_base64": RAW}], {}, "ignored: part key `image_base64`"),
        ([{"type": "image", "image": {"bytes": "abc"}}], {}, "has bytes at `image`"),
        ([{"type": "image", "image": 7}], {}, "neither a name nor a data URI"),
        ([{"type": "image", "image": "0.jpg", "url": "1.jpg"}], {}, "several files: `image`"),
        ([{"type": "image", "image": "0.jpg"}], {"images": ["1.jpg"]}, "name different images"),
        ([{"type": "image", "image": "0.jpg", "text": "a"}], {}, "with `image` and `text`"),
        ([{"type": "text", "text": "a", "image": "0.jpg"}], {}, "with `text` and `image`"),
        ([{"type": "image", "index": "0"}], {"images": ["0.jpg"]}, "'0', which is not a number"),
        ([{"type": "image", "index": True}], {"images": ["0.jpg"]}, "True, which is not a number"),
        ([{"type": "input_audio", "input_audio": {}}], {}, "part of the type 'input_audio'"),
        ([{"type": "input_text", "text": "a"}], {}, "part of the type 'input_text'"),
        ([{"type": "video", "video": "a.mp4", "fps": 1}], {}, "a video with `fps`"),
        ([{"type": "video", "video": "a.mp4", "nframes": 8}], {}, "a video with `nframes`"),
        ([{"type": "video", "video": "a.mp4", "video_start": 2.0}], {}, "with `video_start`"),
        ([{"type": "video", "video": ["0.jpg", "1.jpg"]}], {}, "a list of frames"),
        ([7], {}, "neither a text nor an image, video or clip"),
    ],
)
def test_other_parts_are_refused_by_name(
    tmp_path: Path, form: str, content: Any, record: dict[str, Any], reason: str
) -> None:
    one = found(tmp_path, form, turns({"content": content}, "b", **record))
    assert isinstance(one, Skipped) and reason in one.reason, one
    assert "secret" not in one.reason and len(one.reason) < 250


def test_structs_of_nulls_are_absent(tmp_path: Path) -> None:
    """As tables give them to parts that have none."""
    empty = {"image_url": {"url": None, "detail": None}, "index": None, "fps": None}
    content = [{"type": "text", "text": "a"} | empty, {"type": "image", "text": None} | empty]
    sample = found(tmp_path, "json", turns({"content": content}, "b", images=["0.jpg"]))
    assert isinstance(sample, Sample) and not sample.unread, sample


@pytest.mark.parametrize("flag", ["train", "weight", "masked"])
def test_flags_of_segments_are_refused(tmp_path: Path, flag: str) -> None:
    segments = [{"type": "text", "value": "a", flag: 0}, {"type": "text", "value": "b"}]
    files = [("a.json", json.dumps({"segments": segments}).encode())]
    (one,) = read_one_by_one(Shard("tar", str(write_tar(tmp_path / "a.tar", files)), "a"), "a")
    assert (
        isinstance(one, Skipped) and f"segments[0] has `{flag}`; supported is `loss`" in one.reason
    )


def test_long_names_are_shortened(tmp_path: Path) -> None:
    for name in (RAW[:-40] + "!", "x" * 5000):
        one = found(tmp_path, "json", turns("<image>", "b", image=name))
        assert isinstance(one, Skipped) and len(one.reason) < 300


def test_what_a_record_holds_itself_is_not_read_of_tars(tmp_path: Path) -> None:
    one = found(tmp_path, "tar", turns("<image>", "b", image=URI))
    assert isinstance(one, Skipped) and "is read from JSON only" in one.reason


def test_lines_and_ids_are_named(tmp_path: Path) -> None:
    bad = [turns("a"), turns("a", id="x"), 7]
    (tmp_path / "a.jsonl").write_text("\n\n".join(map(json.dumps, bad)))
    (tmp_path / "a.json").write_text(json.dumps(bad[:2]))
    lines, listed = (
        list(read_one_by_one(Shard("llava", str(tmp_path / name), name), name))
        for name in ("a.jsonl", "a.json")
    )
    reason = "no token of it is trained"
    assert [one[1:3] for one in lines] == [
        ("line 1", reason),
        ("x", f"line 3: {reason}"),
        ("line 5", "a record must be a mapping"),
    ]
    assert [one[1:3] for one in listed] == [("record 0", reason), ("x", f"record 1: {reason}")]


def test_dots_in_names_of_a_tar(tmp_path: Path) -> None:
    chat = json.dumps(turns("<image>a", "b")).encode()
    files = [
        *(("a.b.jpg", PICTURES[0]), ("a.b.json", chat), ("a.c.txt", b"a"), ("a.c.jpg", b"")),
        *(("d/e.0.jpg", PICTURES[1]), ("d/e.0.txt", b"a")),
        *(("f.jpg", PICTURES[0]), ("f.json", chat), ("f.meta.json", b"{}")),
    ]
    tar = Shard("tar", str(write_tar(tmp_path / "a.tar", files)), "a")
    named = {one.key: one for one in read_one_by_one(tar, "a")}
    assert list(named) == ["a.b", "a.c", "d/e.0", "f"]
    for key in ("a.b", "a.c", "d/e.0"):
        assert "a key ends at the first dot" in named[key][2]
    assert isinstance(named["f"], Sample) and named["f"].unread == ("member `.meta.json`",)


def test_turns_beat_a_caption_beside_them(tmp_path: Path) -> None:
    files = [
        *(("a.jpg", PICTURES[0]), ("a.txt", b"a caption")),
        ("a.json", json.dumps(turns("<image>a", "b")).encode()),
        *(("c.jpg", PICTURES[0]), ("c.txt", b"a caption"), ("c.json", b'{"url": "messages"}')),
    ]
    tar = Shard("tar", str(write_tar(tmp_path / "a.tar", files)), "a")
    chat, caption = read_one_by_one(tar, "a")
    assert trained(chat) == ["b"] and chat.unread == ("member `.txt`",)  # type: ignore[union-attr]
    assert trained(caption) == ["a caption"] and caption.unread == ("member `.json`",)  # type: ignore[union-attr]


def beside(folder: Path, form: str, images: int, text: str) -> Sample | Skipped:
    """Read a text with so many images beside it."""
    if form in FILES | TABLES:
        return found(folder, form, {"text": text, "images": NAMES[:images]})
    if form == "pair":
        pair = pa.table({"image": [PICTURES[0]], "caption": [text]})
        shard = Shard("parquet", str(write_parquet(folder / "a.parquet", pair)), "a")
    else:
        content = text if form == "txt" else json.dumps({form: text})
        described = ("0.txt" if form == "txt" else "0.json", content.encode())
        path = write_tar(folder / "a.tar", [("0.jpg", PICTURES[0]), described])
        shard = Shard("tar", str(path), "a")
    (one,) = read_one_by_one(shard, "a")
    if isinstance(one, Sample):
        at = next(part.location for part in one.segments if part.kind == TEXT)
        assert open_shard(shard, RowGroups()).texts(at) == [text for text, _ in _texts(one)]
    return one


@pytest.mark.parametrize("form", [*FILES, *TABLES, "txt", "text", "caption", "pair"])
@pytest.mark.parametrize(
    ("text", "images", "expected"),
    [
        ("<image>\na", 1, [20, "\na"]),
        ("a <image> b", 1, ["a ", 20, " b"]),
        ("a<image>", 1, ["a", 20]),
        ("a", 1, [20, "a"]),
        ("a <image><image>b", 2, ["a ", 20, 28, "b"]),
        ("<image>a<image>", 1, "2 occurrences of <image> for 1 images"),
        ("<video>a", 1, "0 occurrences of <image> for 1 images"),
        ("<image>a<video>", 1, "1 occurrences of <video> for 0 videos"),
        ("<image>\n", 1, "the text consists only of markers"),
        ("an <image> tag", 0, ["an <image> tag"]),
    ],
)
def test_marks_in_texts_beside_images(
    tmp_path: Path, form: str, text: str, images: int, expected: Any
) -> None:
    if images != 1 and form not in FILES | TABLES:
        pytest.skip("one image a caption")
    one = beside(tmp_path, form, images, text)
    if isinstance(expected, str):
        assert isinstance(one, Skipped) and expected in one.reason, one
    elif form == "tar" and not images:
        assert isinstance(one, Skipped) and "a caption without its image" in one.reason
    else:
        assert isinstance(one, Sample), one
        assert [s.text if s.kind == TEXT else s.width_px for s in one.segments] == expected
        assert all(is_trained for _, is_trained in _texts(one))


PAIRS = [
    ({"system": "s", "loss": False}, [("system", "s"), "no", "yes"], ["yes"]),
    ({"weight": 1}, ["no", "yes"], ["no", "yes"]),
    ({"train": None, "system": None, "rejected": ""}, ["no", "yes"], ["no", "yes"]),
    ({"loss_mask": 0, "source": "web"}, ["no", "yes"], ["yes"]),
]


@pytest.mark.parametrize("field", ["messages", "conversations", "text", "texts"])
@pytest.mark.parametrize(("keys", "said", "expected"), PAIRS)
def test_keys_of_pairs(
    tmp_path: Path, field: str, keys: dict[str, Any], said: list[Any], expected: list[str]
) -> None:
    pairs = [{"user": "a", "assistant": "no", **keys}, {"user": "b", "assistant": "yes"}]
    given: Any = json.dumps(pairs) if field == "text" else pairs
    one = found(tmp_path, "parquet" if field == "texts" else "jsonl", {field: given})
    assert trained(one) == expected
    system = [said[0][1]] if isinstance(said[0], tuple) else []
    before = one.segments[0].text  # type: ignore[union-attr]
    assert before == f"{''.join(system)}{' ' if system else ''}USER: a ASSISTANT:"
    assert [*one.unread] == ["turn key `source`"] * ("source" in keys)  # type: ignore[union-attr]


def test_images_of_pairs_stand_behind_their_system_turn(tmp_path: Path) -> None:
    pairs = [{"system": "s", "user": "a", "assistant": "b"}]
    one = found(tmp_path, "parquet", {"texts": pairs, "images": NAMES[:1]})
    assert isinstance(one, Sample), one
    said = [part.text if part.kind == TEXT else part.width_px for part in one.segments]
    assert said == ["s USER: ", 20, "a ASSISTANT:", " b"]


@pytest.mark.parametrize("field", ["messages", "text", "texts"])
@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        ({"rejected": "c"}, "`rejected`: preference data"),
        ({"chosen": "c"}, "`chosen`: preference data"),
        ({"tool_calls": [{"name": "c"}]}, "`tool_calls`: tool calls"),
        ({"image": "0.jpg"}, "has `image`: it is supported next to the turns"),
        ({"weight": 0.5}, "has the weight 0.5"),
    ],
)
def test_keys_of_pairs_are_refused_by_name(
    tmp_path: Path, field: str, keys: dict[str, Any], reason: str
) -> None:
    pairs: Any = [{"user": "a", "assistant": "b", **keys}]
    given = json.dumps(pairs) if field == "text" else pairs
    one = found(tmp_path, "parquet" if field == "texts" else "jsonl", {field: given})
    assert isinstance(one, Skipped) and reason in one.reason, one


@pytest.mark.parametrize("form", ["txt", "text", "caption", "pair", "parquet", "jsonl"])
@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ({"question": "a", "chosen": "b", "rejected": "c"}, "`chosen`: preference data"),
        ({"question": "a", "answer": "c"}, "a JSON of `question` and `answer`"),
        ([{"prompt": "a", "completion": "c"}], "a JSON of `prompt` and `completion`"),
    ],
)
def test_texts_that_are_json_of_something_else(
    tmp_path: Path, form: str, said: Any, reason: str
) -> None:
    one = beside(tmp_path, form, 1, json.dumps(said))
    assert isinstance(one, Skipped) and reason in one.reason, one


def test_an_equal_system_turn_is_read_once(tmp_path: Path) -> None:
    said = [{"role": "system", "content": "c"}, *turns("a", "b")["messages"]]
    one = found(tmp_path, "json", {"system": "c", "messages": said})
    assert isinstance(one, Sample) and one.segments[0].text == "c USER: a ASSISTANT:"


@pytest.mark.parametrize("form", FILES)
@pytest.mark.parametrize(
    "images", [[{"path": "0.jpg"}], {"bytes": None, "path": "0.jpg"}, ["./0.jpg"], "./0.jpg"]
)
def test_paths_of_images(tmp_path: Path, form: str, images: Any) -> None:
    one = found(tmp_path, form, turns("<image>a", "b", images=images))
    assert isinstance(one, Sample), one
    assert [part.width_px for part in one.segments if part.kind == IMAGE] == [20]


@pytest.mark.parametrize("lines", [False, True])
def test_turns_without_a_record_are_refused(tmp_path: Path, lines: bool) -> None:
    said = [{"role": "user", "text": "a"}, {"from": "gpt", "text": "b"}]
    path = tmp_path / ("a.jsonl" if lines else "a.json")
    path.write_text(json.dumps(said if lines else [said]))
    skipped = list(read_one_by_one(Shard("llava", str(path), "a", str(tmp_path)), "a"))
    assert len(skipped) == 2
    assert all("turns without a record" in one[2] for one in skipped)
