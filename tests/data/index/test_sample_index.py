"""The index says what the shards hold, names what it skips, and refuses data that changed."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from disttrain_cli.data.index.sample_index import Index, read_index
from disttrain_cli.data.indexing.building import build_index, open_index
from disttrain_cli.data.reading import ShardReader
from disttrain_cli.data.sources import Shard
from disttrain_cli.data.tokenizer import ByteTokenizer
from disttrain_cli.errors import DataError, MismatchError, SpecError
from disttrain_cli.spec.index import COLUMNS, IMAGE, TARGET, TEXT
from disttrain_cli.spec.runfile import Run
from tests.cases import first_fast
from tests.data.dataset import (
    INPUTS,
    encoded,
    image,
    interleaved,
    make_run,
    text,
    write_dataset,
    write_tar,
)
from tests.data.sources.forms import write_form, write_llava
from tests.heads import with_heads

MakeRun = Callable[..., Run]


def test_rows(own_run: MakeRun) -> None:
    run = own_run(
        {
            "a.tar": [
                interleaved("s", text("häh"), image("s.0.jpg"), image("s.1.png", True), text("!")),
                ("s.0.jpg", encoded(64, 32)),
                ("s.1.png", encoded(99, 99, ".png")),
            ]
        }
    )
    index = build_index(run, INPUTS)
    assert index.kinds.tolist() == [TEXT, IMAGE, TARGET, TEXT]
    assert index.tokens.tolist() == [4, 8, 4, 1]
    assert index.grids.tolist() == [[0, 0], [4, 8], [1, 1], [0, 0]]
    assert index.lengths.tolist() == [4 + 8 + 4 + 1 + 2]
    assert index.label_tokens.tolist() == [4 + 1 + 1]
    assert list(index.keys) == ["s"]


def test_reading_back_is_the_same(run: Run, index: Index) -> None:
    assert tuple(pq.read_schema(run.dir.index).names) == COLUMNS
    numbers = pq.read_table(run.dir.index, columns=[COLUMNS[0]]).column(0)
    assert numbers.to_pylist() == list(range(46))
    again = read_index(run, INPUTS)
    assert (
        again.fingerprint == index.fingerprint
        and list(again.keys) == list(index.keys)
        and len(index) == 46
    )
    for name in (
        "source",
        "shard",
        "segment_start",
        "kinds",
        "tokens",
        "offsets",
        "sizes",
        "grids",
    ):
        assert np.array_equal(getattr(again, name), getattr(index, name))


def test_fingerprint_follows_content_not_place(tmp_path: Path, index: Index) -> None:
    write_dataset(tmp_path)
    run = make_run(tmp_path)
    assert build_index(run, INPUTS).fingerprint == index.fingerprint
    weighted = make_run(tmp_path, [{"path": "mixed", "weight": 2}, {"path": "captions"}])
    assert build_index(weighted, INPUTS).fingerprint != index.fingerprint


def test_images_without_a_module_are_left_out(own_run: MakeRun) -> None:
    run = own_run(
        {
            "a.tar": [
                interleaved("0", text("a"), image("0.jpg")),
                ("0.jpg", encoded(20, 20)),
                interleaved("1", image("0.jpg")),
            ]
        },
        max_bad_fraction=0.5,
    )
    index = build_index(run, with_heads(INPUTS, "image"))
    assert index.kinds.tolist() == [TEXT] and [s.key for s in index.skipped] == ["1"]


def test_what_has_no_module_is_counted_and_no_text_that_asks_for_it_is_trained(
    own_run: MakeRun,
) -> None:
    files = [
        interleaved(
            "s",
            text("seen"),
            image("s.0.jpg"),
            text("Draw it."),
            image("s.1.jpg", True),
            text("end"),
        ),
        ("s.0.jpg", encoded(20, 20)),
        ("s.1.jpg", encoded(20, 20)),
    ]
    run = own_run({"a.tar": files, "b.tar": files})
    index = build_index(run, with_heads(INPUTS, "target"))
    assert index.kinds.tolist() == [TEXT, IMAGE, TEXT, TEXT] * 2
    assert index.trained.tolist() == [True, False, False, True] * 2
    assert index.unread == {"images to generate": 2}
    assert build_index(run, INPUTS).unread == {} and build_index(run, INPUTS).trained.sum() == 6
    neither = build_index(run, INPUTS.model_copy(update={"heads": []}))
    assert neither.unread == {"images to read": 2, "images to generate": 2}


def test_images_without_any_text_are_refused(own_run: MakeRun) -> None:
    run = own_run(
        {"a.tar": [interleaved("0", image("0.jpg"), text("")), ("0.jpg", encoded(20, 20))]}
    )
    with pytest.raises(DataError, match="no text"):
        build_index(run, INPUTS)
    assert not run.dir.index.exists()


def test_an_index_is_built_where_none_fits(run: Run, index: Index, own_run: MakeRun) -> None:
    assert open_index(run, INPUTS).fingerprint == index.fingerprint
    new = own_run({"a.tar": [interleaved("0", text("ab"))]})
    assert list(open_index(new, INPUTS).keys) == ["0"] and new.dir.index.exists()
    longer = INPUTS.model_copy(update={"sequence_length": 256})
    assert open_index(new, longer).inputs == longer


def test_too_long_samples_are_named(own_run: MakeRun) -> None:
    files = [interleaved("fits", text("a" * 126)), interleaved("long", text("a" * 126), text("a"))]
    index = build_index(own_run({"a.tar": files}, max_bad_fraction=0.5), INPUTS)
    assert list(index.keys) == ["fits"] and index.skipped[0].key == "long"
    assert "129 of at most 128" in index.skipped[0].reason


def test_stops_past_the_bad_fraction(own_run: MakeRun) -> None:
    files = [*(interleaved(f"{n}", text("fine")) for n in range(9)), ("broken.json", b"{")]
    assert len(build_index(own_run({"a.tar": files}, max_bad_fraction=0.1), INPUTS)) == 9
    with pytest.raises(DataError, match="1 of 10 samples") as caught:
        build_index(own_run({"a.tar": files}, max_bad_fraction=0.09), INPUTS)
    assert "a.tar/broken: not valid JSON" in str(caught.value)


def test_nothing_usable(own_run: MakeRun) -> None:
    with pytest.raises(DataError, match="no usable sample"):
        build_index(own_run({"a.tar": []}, max_bad_fraction=1), INPUTS)


@pytest.mark.parametrize("change", ["content", "same size", "new", "gone"])
def test_changed_data_is_refused(tmp_path: Path, change: str) -> None:
    write_dataset(tmp_path)
    run = make_run(tmp_path)
    build_index(run, INPUTS)
    shard = tmp_path / "mixed" / "00000.tar"
    if change == "content":
        shard.write_bytes(shard.read_bytes() + bytes(512))
    elif change == "same size":
        shard.write_bytes(shard.read_bytes().replace(b"xx", b"yy", 1))
    elif change == "new":
        write_tar(shard.with_name("00002.tar"), [])
    else:
        shard.unlink()
    with pytest.raises(MismatchError, match="changed since it was indexed") as caught:
        read_index(run, INPUTS)
    assert ("00002.tar: new" if change == "new" else "00000.tar") in str(caught.value)
    assert "files " in str(caught.value) and ", now " in str(caught.value)
    assert "disttrain_cli.profile" in str(caught.value)


def write_texts(path: Path) -> None:
    """A shard of one text, in the form that its suffix names."""
    path.parent.mkdir(exist_ok=True)
    if path.suffix == ".tar":
        write_tar(path, shard_of("one"))
    elif path.suffix == ".jsonl":
        path.write_text('{"text": "one"}\n')
    else:
        pq.write_table(pa.table({"text": ["one"]}), path)


@pytest.mark.parametrize("suffix", [".tar", ".jsonl", ".parquet"])
@pytest.mark.parametrize("gone", ["folder", "shard", "all shards", "all shards, others beside"])
def test_shards_that_are_gone_are_named_and_no_dataset_is_called_empty(
    tmp_path: Path, suffix: str, gone: str
) -> None:
    shard, alone = tmp_path / "own" / f"a{suffix}", gone == "shard"
    write_texts(shard)
    run = make_run(tmp_path, [{"path": f"own/{shard.name}" if alone else "own"}])
    build_index(run, INPUTS)
    shard.unlink()
    if gone == "folder":
        shard.parent.rmdir()
    if "beside" in gone:
        (shard.parent / "notes.txt").write_text("moved")
    for use in (read_index, open_index, build_index):
        with pytest.raises(MismatchError, match="removed after they were indexed") as caught:
            use(run, INPUTS)
        assert f"{shard.name}: gone" in caught.value.why and "own" in caught.value.what
        assert "Restore them" in caught.value.next_step
        assert "sample_data" not in str(caught.value)
    run.dir.index.unlink()  # never indexed: the source itself is wrong
    with pytest.raises(DataError, match=r"There is no|is empty|contains no shard"):
        build_index(run, INPUTS)
    write_texts(shard)
    assert len(build_index(run, INPUTS)) == 1


def test_another_source_is_not_taken_for_one_that_is_gone(own_run: MakeRun) -> None:
    run = own_run({"a.tar": shard_of("one")})
    build_index(run, INPUTS)
    (run.folder / "other").mkdir()
    other = make_run(run.folder, [{"path": "other"}])
    assert other.dir.index == run.dir.index
    with pytest.raises(DataError, match="is empty"):
        open_index(other, INPUTS)


def test_copies_with_other_times_are_known_by_their_content(
    own_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = own_run({"a.tar": shard_of("one"), "b.tar": shard_of("two")})
    before, read = build_index(run, INPUTS), Read(monkeypatch)
    for number, name in enumerate(("a.tar", "b.tar")):
        os.utime(run.folder / "own" / name, (number + 1, 1))
    assert read_index(run, INPUTS).fingerprint == before.fingerprint
    write_tar(run.folder / "own" / "c.tar", shard_of("three"))
    assert len(open_index(run, INPUTS)) == 3 and read.taken() == ["c.tar"]
    with monkeypatch.context() as looked:
        # the new times are in the index now
        looked.setattr("disttrain_cli.data.index.index_checks.content_of", None)
        assert len(open_index(run, INPUTS)) == 3


def test_a_shard_that_cannot_be_opened_is_a_bad_one_still(own_run: MakeRun) -> None:
    run = own_run({"a.tar": shard_of("one")}, max_bad_fraction=0.5)
    os.mkfifo(run.folder / "own" / "b.tar")
    assert [one.shard for one in build_index(run, INPUTS).skipped] == ["own/b.tar"]


def test_a_folder_of_images_that_is_not_there_is_named_once(tmp_path: Path) -> None:
    (tmp_path / "chat.json").write_text("[]")
    run = make_run(tmp_path, [{"path": "chat.json", "images": "nowhere"}])
    with pytest.raises(DataError, match=r"There is no folder of images at .*nowhere") as caught:
        build_index(run, INPUTS)
    assert "data.sources[0].images: nowhere" in caught.value.why


def test_other_model_or_sources_are_refused(run: Run, index: Index) -> None:
    with pytest.raises(MismatchError, match="a different run file") as caught:
        read_index(run, INPUTS.model_copy(update={"sequence_length": 256}))
    assert "model inputs" in str(caught.value)
    with pytest.raises(MismatchError, match=r"data\.sources"):
        read_index(make_run(run.folder, [{"path": "mixed"}]), INPUTS)


def test_missing_and_damaged_index(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    with pytest.raises(DataError, match="no sample index"):
        read_index(run, INPUTS)
    run.dir.index.parent.mkdir(parents=True)
    run.dir.index.write_bytes(b"PAR1 not really")
    with pytest.raises(DataError, match="Cannot read the sample index"):
        read_index(run, INPUTS)


def test_vocabulary_must_hold_the_tokenizer(run: Run) -> None:
    with pytest.raises(SpecError, match="does not fit the model") as caught:
        build_index(run, INPUTS.model_copy(update={"vocabulary": 256}))
    assert "261" in str(caught.value)


def shard_of(*texts: str) -> list[tuple[str, bytes]]:
    return [interleaved(f"{number}", text(words)) for number, words in enumerate(texts)]


def test_the_last_text_says_whether_the_end_is_trained(own_run: MakeRun) -> None:
    picture = ("p.jpg", encoded(20, 20))
    quiet, loud = text("abc") | {"loss": False}, text("de") | {"loss": True}
    samples = [
        [quiet],
        [loud],
        [quiet, loud],
        [loud, quiet],
        [loud, image("p.jpg")],
        [image("p.jpg")],
        [quiet, image("p.jpg")],
    ]
    files = [picture, *(interleaved(f"{n}", *segments) for n, segments in enumerate(samples))]
    index = build_index(own_run({"a.tar": files}), INPUTS)
    assert index.end_trained.tolist() == [False, True, True, False, True, True, False]
    assert index.label_tokens.tolist() == [0, 3, 3, 2, 3, 1, 0]


def test_text_that_is_not_trained_is_no_text_to_train_on(own_run: MakeRun) -> None:
    with pytest.raises(DataError, match="no text to train on"):
        build_index(own_run({"a.tar": [interleaved("0", text("a") | {"loss": False})]}), INPUTS)


@pytest.mark.parametrize("flag", [1, "no", None])
def test_loss_is_true_or_false(own_run: MakeRun, flag: object) -> None:
    files = [interleaved("bad", text("a") | {"loss": flag}), interleaved("good", text("b"))]
    index = build_index(own_run({"a.tar": files}, max_bad_fraction=0.5), INPUTS)
    assert (
        list(index.keys) == ["good"]
        and index.skipped[0].reason == "segments[0].loss must be true or false"
    )


def test_images_beyond_the_budget_are_counted(own_run: MakeRun) -> None:
    files = [
        interleaved("0", text("a"), image("0.jpg"), image("1.jpg"), image("2.jpg", True)),
        ("0.jpg", encoded(64, 64)),
        ("1.jpg", encoded(72, 64)),
        ("2.jpg", encoded(300, 300)),
    ]
    assert build_index(own_run({"a.tar": files}), INPUTS).scaled_down == 1


class Read:
    """Names of the shards that an index reads."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from disttrain_cli.data.indexing import shard_files as room

        self.names: list[str] = []
        real = room.read_shard

        def spy(shard: Shard, label: str, chat: object) -> object:
            self.names.append(shard.name)
            return real(shard, label, chat)

        monkeypatch.setattr(room, "read_shard", spy)

    def taken(self) -> list[str]:
        names, self.names = self.names, []
        return names


def test_new_shards_are_read_and_the_rest_is_kept(
    own_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = Read(monkeypatch)
    broken = ("broken.json", b"{")
    run = own_run(
        {"b.tar": [*shard_of("one", "two"), broken], "d.tar": [], "e.tar": shard_of("five")},
        max_bad_fraction=0.7,
    )
    build_index(run, INPUTS)
    assert read.taken() == ["b.tar", "d.tar", "e.tar"]
    write_tar(run.folder / "own" / "a.tar", [broken, *shard_of("zero")])
    write_tar(run.folder / "own" / "c.tar", shard_of("three", "four"))
    with pytest.raises(MismatchError, match=r"a\.tar: new") as caught:
        read_index(run, INPUTS)
    assert caught.value.next_step.endswith("disttrain_cli.profile()")
    grown = open_index(run, INPUTS)
    assert read.taken() == ["a.tar", "c.tar"]
    assert open_index(run, INPUTS).fingerprint == grown.fingerprint and not read.taken()
    at_once = build_index(run, INPUTS)
    assert [shard.name for shard in at_once.shards] == [f"{name}.tar" for name in "abcde"]
    for name in ("fingerprint", "weights", "shards", "skipped"):
        assert getattr(grown, name) == getattr(at_once, name)
    for name in (
        "source",
        "shard",
        "segment_start",
        "kinds",
        "tokens",
        "trained",
        "offsets",
        "sizes",
        "grids",
    ):
        assert np.array_equal(getattr(grown, name), getattr(at_once, name)), name
    assert list(grown.keys) == list(at_once.keys) and [one.shard for one in grown.skipped] == [
        "own/a.tar",
        "own/b.tar",
        "own/d.tar",  # it holds no sample
    ]


@pytest.mark.parametrize("change", ["written", "gone", "written and new"])
def test_profile_refuses_what_changed_and_names_the_override(own_run: MakeRun, change: str) -> None:
    run = own_run({"a.tar": shard_of("one"), "b.tar": shard_of("two")})
    before = build_index(run, INPUTS)
    shard = run.folder / "own" / "a.tar"
    if change == "gone":
        shard.unlink()
    else:
        write_tar(shard, shard_of("another", "and more" * 9))
    if change == "written and new":
        write_tar(run.folder / "own" / "c.tar", shard_of("three"))
    with pytest.raises(MismatchError, match="changed since it was indexed") as caught:
        open_index(run, INPUTS)
    assert (
        "a.tar: gone" if change == "gone" else "a.tar: was 10240 bytes of 20"
    ) in caught.value.why
    assert (
        "c.tar" not in caught.value.why
        and "disttrain_cli.profile(reindex=True)" in caught.value.next_step
    )
    after = build_index(run, INPUTS)
    assert after.fingerprint != before.fingerprint
    assert open_index(run, INPUTS).fingerprint == after.fingerprint


def test_an_index_of_another_version_is_built_again(
    own_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    from disttrain_cli.data.indexing import index_writing as room

    run = own_run({"a.tar": shard_of("one")})
    with monkeypatch.context() as older:
        older.setattr(room, "INDEX_VERSION", 1)  # of what is written; what is read must be this
        with pytest.raises(MismatchError, match="a different version"):
            build_index(run, INPUTS)
    with pytest.raises(MismatchError, match="index: 1, this program: 6"):
        read_index(run, INPUTS)
    assert len(open_index(run, INPUTS)) == 1


FILL_THE_DISK = """
import resource, sys
from pathlib import Path
from disttrain_cli.data.indexing.building import build_index
from disttrain_cli.errors import DisttrainError
from tests.data.dataset import INPUTS, make_run
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]),) * 2)
try:
    build_index(make_run(Path(sys.argv[1]), [{"path": "own"}]), INPUTS)
except DisttrainError as error:
    print(type(error).__name__, error)
"""


@pytest.mark.slow
@pytest.mark.parametrize("most_bytes", first_fast([100, 8000]))
def test_a_full_disk_leaves_the_old_index(own_run: MakeRun, most_bytes: int) -> None:
    """A real process whose files may not grow: while rows are written, or at their end."""
    run = own_run({"a.tar": shard_of("one")})
    index = build_index(run, INPUTS)
    random = np.random.default_rng(0)
    write_tar(
        run.folder / "own" / "b.tar",
        [interleaved(random.bytes(30).hex(), text("two")) for _ in range(400)],
    )
    done = subprocess.run(
        [sys.executable, "-c", FILL_THE_DISK, str(run.folder), str(most_bytes)],
        text=True,
        capture_output=True,
        check=True,
        cwd=Path(__file__).parents[3],
    )
    assert done.stdout.startswith("SpecError Cannot write") and "index.parquet" in done.stdout
    assert "File too large" in done.stdout and not done.stderr
    left = sorted(path.name for path in run.dir.index.parent.iterdir())
    assert left == ["columns", "index.parquet"]
    (run.folder / "own" / "b.tar").unlink()
    assert read_index(run, INPUTS).fingerprint == index.fingerprint


def test_names_with_control_characters_are_written_out(own_run: MakeRun) -> None:
    evil = "a\x1b[2J\n\r\u202eb"
    files = [
        (f"{evil}.json", b"{"),
        interleaved(f"good{evil}", text("fine"), image("0.jpg")),
        ("0.jpg", encoded(20, 20)),
        interleaved("also bad", image(evil)),
    ]
    index = build_index(own_run({f"{evil}.tar": files}, max_bad_fraction=0.9), INPUTS)
    shown = [*index.keys, *(part for one in index.skipped for part in one[:3])]
    assert len(index.skipped) == 2 and all(word.isprintable() for word in shown)
    assert (
        "good" in index.keys[0]
        and "\\x1b[2J\\n" in index.keys[0]
        and "\\x1b[2J\\n" in index.skipped[0].shard
    )
    Path(index.shards[0].path).unlink()
    with pytest.raises(DataError) as caught:
        ShardReader(index, ByteTokenizer()).texts(0)
    assert "\x1b" not in str(caught.value) and "\\x1b" in str(caught.value)


def test_images_that_lie_are_named_by_what_they_are(own_run: MakeRun) -> None:
    """Mislabelled, huge or no images at all: told by their content, before a pixel is decoded."""
    png = (
        b"\x89PNG\r\n\x1a\n\x00\x00\x00\rIHDR"
        + (50_000).to_bytes(4, "big") * 2
        + b"\x08\x02"
        + bytes(200)
    )
    jpeg = b"\xff\xd8\xff\xc0\x00\x11\x08\xff\xff\xff\xff" + bytes(20)
    pictures = {
        "png": encoded(40, 20, ".png"),
        "webp": encoded(30, 30, ".webp"),
        "words": b"these are words",
        "bomb": png,
        "large": jpeg,
        "cut": encoded(40, 40)[:15],
        "empty": b"",
    }
    files = [
        file
        for name, data in pictures.items()
        for file in ((f"{name}.jpg", data), (f"{name}.txt", b"a caption"))
    ]
    index = build_index(own_run({"a.tar": files}, max_bad_fraction=0.9), INPUTS)
    assert list(index.keys) == ["png", "webp"]
    reasons = {one.key: one.reason for one in index.skipped}
    assert list(reasons) == ["words", "bomb", "large", "cut", "empty"]
    assert "not a JPEG" in reasons["words"] and "50000x50000 pixels" in reasons["bomb"]
    assert "65535x65535" in reasons["large"] and "cut short" in reasons["cut"]


def test_an_image_beside_a_json_that_changes_is_refused(tmp_path: Path) -> None:
    write_llava(tmp_path / "chat")
    run = make_run(tmp_path, [{"path": "chat"}])
    index = build_index(run, INPUTS)
    reader = ShardReader(index, ByteTokenizer())
    place = int(np.flatnonzero(index.kinds == IMAGE)[0])
    assert reader.file(0, place)
    (tmp_path / "chat" / "a.jpg").write_bytes(encoded(50, 50))
    with pytest.raises(DataError, match="not the one that was indexed") as caught:
        reader.file(0, place)
    assert "a.jpg has" in caught.value.why
    assert build_index(run, INPUTS).fingerprint != index.fingerprint


def test_sources_of_several_forms_with_weights(tmp_path: Path) -> None:
    written = [write_form(tmp_path, form) for form in ("interleaved", "llava", "parquet")]
    sources = [
        one.source | {"weight": weight} for one, weight in zip(written, (1, 2.5, 1), strict=True)
    ]
    run = make_run(tmp_path, sources)
    index = build_index(run, INPUTS)
    assert index.weights == [1, 2.5, 1] and [shard.form for shard in index.shards] == [
        "tar",
        "llava",
        "parquet",
    ]
    assert np.bincount(index.source).tolist() == [len(one.samples) for one in written]
