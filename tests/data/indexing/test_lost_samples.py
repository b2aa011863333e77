"""Samples that damaged, cut, empty and missing shards lose count by how many the shards held."""

import json
import os
import struct
import tarfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from disttrain_cli.data.epochs.mixture import Mixture
from disttrain_cli.data.index.index_checks import BadSamplesError
from disttrain_cli.data.indexing.building import build_index, open_index
from disttrain_cli.data.indexing.index_writing import read_share_of
from disttrain_cli.data.indexing.lost_samples import ReadShard, lost_samples
from disttrain_cli.data.indexing.reading_shards import Share
from disttrain_cli.data.packing import pack
from disttrain_cli.data.sources import Shard, Skipped
from disttrain_cli.data.sources.samples import samples_lost
from disttrain_cli.data.statistics import describe_data
from tests.cases import first_fast, mostly_slow
from tests.data.dataset import INPUTS, interleaved, make_run, text, write_tar

EACH = 40  # samples of a shard
PADDING = 10  # samples that the zeros at the end of a tar count for, where bytes are counted


def texts(shard: int, samples: int = EACH) -> list[str]:
    return [f"text {shard} {number} " + "x" * 90 for number in range(samples)]


def tar(path: Path, said: Sequence[str]) -> None:
    write_tar(path, [interleaved(f"{number:03d}", text(one)) for number, one in enumerate(said)])


def parquet(path: Path, said: Sequence[str]) -> None:
    pq.write_table(pa.table({"text": pa.array(said, pa.string())}), path, row_group_size=10)


def stream(path: Path, said: Sequence[str], new: Any = pa.ipc.new_stream) -> None:
    table = pa.table({"text": pa.array(said, pa.string())})
    with pa.OSFile(str(path), "wb") as file, new(file, table.schema) as writer:
        writer.write_table(table, max_chunksize=10)


def arrow(path: Path, said: Sequence[str]) -> None:
    stream(path, said, pa.ipc.new_file)


def records(said: Sequence[str]) -> list[dict[str, Any]]:
    return [{"id": f"{number}", "text": one} for number, one in enumerate(said)]


def json_list(path: Path, said: Sequence[str]) -> None:
    path.write_text(json.dumps(records(said)))


def lines(path: Path, said: Sequence[str]) -> None:
    path.write_text("".join(json.dumps(one) + "\n" for one in records(said)))


WRITERS: dict[str, tuple[Callable[[Path, Sequence[str]], None], str]] = {
    "tar": (tar, "{:05d}.tar"),
    "parquet": (parquet, "train-{:05d}-of-00004.parquet"),
    "hashed": (parquet, "data/train-{:05d}-of-00004-{}.parquet"),
    "stream": (stream, "data-{:05d}-of-00004.arrow"),
    "arrow": (arrow, "data-{:05d}-of-00004.arrow"),
    "json": (json_list, "part_{}.json"),
    "lines": (lines, "part{}.jsonl"),
}


#: Forms of shards in every run: by file, by footer, by lines.
FAST = ("tar", "parquet", "lines")


def name_of(form: str, shard: int) -> str:
    return WRITERS[form][1].format(shard, "abcd"[shard] * 4)


def write(folder: Path, form: str, shards: int = 4) -> Path:
    """Shards of the same number of samples; the third of them."""
    for number in range(shards):
        path = folder / "own" / name_of(form, number)
        path.parent.mkdir(parents=True, exist_ok=True)
        WRITERS[form][0](path, texts(number))
    return folder / "own" / name_of(form, min(2, shards - 1))


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size * 3 // 5)


def emptied(path: Path) -> None:
    os.truncate(path, 0)


def zeroed(path: Path) -> None:
    """As a download that was broken off leaves a file whose size was reserved."""
    size = path.stat().st_size
    cut(path)
    os.truncate(path, size)


def linked_nowhere(path: Path) -> None:
    path.unlink()
    path.symlink_to("nowhere")


def gone(path: Path) -> None:
    path.unlink()


def without_samples(path: Path) -> None:
    form = next(form for form, (_, name) in WRITERS.items() if path.suffix == Path(name).suffix)
    WRITERS["stream" if path.suffix == ".arrow" else form][0](path, [])


def at_a_border(path: Path) -> None:
    """Cut where a sample ends; of a stream where a batch does."""
    if path.suffix == ".tar":
        with tarfile.open(path) as opened:
            os.truncate(path, opened.getmembers()[EACH // 2].offset)
    else:
        os.truncate(path, path.stat().st_size - 8)


DAMAGE = [
    *(
        (form, damage)
        for form in WRITERS
        for damage in (cut, emptied, zeroed, gone, linked_nowhere)
    ),
    ("tar", without_samples),
    *((form, at_a_border) for form in ("tar", "stream")),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("form", "damage"), DAMAGE, ids=[f"{form}-{damage.__name__}" for form, damage in DAMAGE]
)
def test_a_damaged_shard_counts_by_what_its_neighbours_hold(
    tmp_path: Path, form: str, damage: Callable[[Path], None]
) -> None:
    damaged = write(tmp_path, form)
    damage(damaged)
    run = make_run(tmp_path, [{"path": "own"}], max_bad_fraction=0.3)
    index = build_index(run, INPUTS)
    lost = samples_lost(index.skipped)
    whole = form == "stream" and damage is at_a_border  # the end of stream alone is missing
    assert 3 * EACH <= len(index) < 4 * EACH or whole
    more = PADDING if form == "tar" and damage is zeroed else 1
    assert 4 * EACH <= len(index) + lost <= 4 * EACH + more
    name = str(damaged.relative_to(tmp_path / "own"))
    if form == "hashed" and damage is gone:
        name = name.replace("-cccc", "")  # nobody knows its hash
    assert {one.shard for one in index.skipped} == {f"own/{name}"}
    assert "about" in index.skipped[-1].reason
    strict = make_run(tmp_path, [{"path": "own"}], max_bad_fraction=0.001)
    with pytest.raises(BadSamplesError, match=f"{lost} of {len(index) + lost} samples"):
        build_index(strict, INPUTS)


@pytest.mark.parametrize("form", ["parquet", "stream", "arrow", "json"])
def test_a_whole_shard_without_rows_loses_nothing(tmp_path: Path, form: str) -> None:
    path = write(tmp_path, form)
    WRITERS[form][0](path, [])
    if form == "parquet":  # as pandas and Spark write a column without a value
        pq.write_table(pa.table({"text": pa.nulls(0)}), path)
    index = build_index(make_run(tmp_path, [{"path": "own"}], max_bad_fraction=0), INPUTS)
    assert len(index) == 3 * EACH and samples_lost(index.skipped) == 0
    assert [one.reason for one in index.skipped] == ["it contains no sample"]


def test_a_lower_limit_holds_for_an_index_that_is_there(tmp_path: Path) -> None:
    cut(write(tmp_path, "lines"))
    index = open_index(make_run(tmp_path, [{"path": "own"}], max_bad_fraction=0.3), INPUTS)
    strict = make_run(tmp_path, [{"path": "own"}], max_bad_fraction=0.001)
    lost = samples_lost(index.skipped)
    with pytest.raises(BadSamplesError, match=f"{lost} of {len(index) + lost} samples"):
        open_index(strict, INPUTS)
    assert open_index(make_run(tmp_path, [{"path": "own"}], max_bad_fraction=0.3), INPUTS)


@pytest.mark.parametrize("form", ["arrow", "stream"])
def test_damaged_rows_of_arrow_are_left_out(tmp_path: Path, form: str) -> None:
    path = write(tmp_path, form)
    content, size = path.read_bytes(), len(texts(2)[10])
    offsets = struct.pack("<11i", *range(0, 11 * size, size))  # of rows 10 to 19
    place = content.index(offsets) + 5 * 4
    path.write_bytes(content[:place] + struct.pack("<i", 1 << 30) + content[place + 4 :])
    index = build_index(make_run(tmp_path, [{"path": "own"}], max_bad_fraction=0.9), INPUTS)
    assert len(index) == 4 * EACH - 2
    assert [(one.key, one.samples) for one in index.skipped] == [("row 14", 1), ("row 15", 1)]


@pytest.mark.parametrize("form", mostly_slow(WRITERS, *FAST))
def test_a_pipe_is_never_read(tmp_path: Path, form: str) -> None:
    path = write(tmp_path, form)
    path.unlink()
    os.mkfifo(path)
    run = make_run(tmp_path, [{"path": "own"}], max_bad_fraction=0.3, deduplicate=True)
    index = build_index(run, INPUTS)
    assert [one.samples for one in index.skipped] == [EACH] and len(index) == 3 * EACH
    assert "not a regular file" in index.skipped[0].reason


@pytest.mark.parametrize("factor", [1, 20, 64, 128, 512, 2048, 20480])
def test_a_tar_is_padded_to_the_records_of_its_writer(tmp_path: Path, factor: int) -> None:
    path = write(tmp_path, "tar", shards=1)
    with tarfile.open(path) as opened:
        while (last := opened.next()) is not None:
            end = last.offset_data + -(-last.size // 512) * 512 + 1024
    os.truncate(path, end)
    os.truncate(path, -(-end // (512 * factor)) * 512 * factor)
    run = make_run(tmp_path, [{"path": "own"}], max_bad_fraction=0)
    assert len(build_index(run, INPUTS)) == EACH
    with path.open("ab") as file:
        file.write(b"more" * 128)
    with pytest.raises(BadSamplesError):
        build_index(run, INPUTS)


POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 912345678\n"
PAGE = "<html>\n<body>404</body>\n</html>\n"
HOLDERS = [
    '{"data": [RECORDS]}\n',
    '{"instances": [RECORDS]}',
    '{"a": RECORD, "b": RECORD}\n',
    '{\n"a": RECORD,\n"b": RECORD\n}\n',
]


@pytest.mark.parametrize(
    ("form", "content"),
    [
        *((form, POINTER) for form in FAST),
        *((form, PAGE) for form in ("json", "lines")),
        *(("lines", content) for content in HOLDERS),
        ("json", HOLDERS[0]),
    ],
)
def test_a_shard_of_something_else_counts_as_its_neighbours(
    tmp_path: Path, form: str, content: str
) -> None:
    path = write(tmp_path, form)
    said = [json.dumps(one) for one in records(texts(0, 3))]
    path.write_text(content.replace("RECORDS", ", ".join(said)).replace("RECORD", said[0]))
    index = build_index(make_run(tmp_path, [{"path": "own"}], max_bad_fraction=0.3), INPUTS)
    assert [one.samples for one in index.skipped] == [EACH] and len(index) == 3 * EACH
    assert (content == POINTER) == ("a Git LFS pointer" in index.skipped[0].reason)
    other = path.rename(tmp_path / f"other{path.suffix}").name
    run = make_run(tmp_path, [{"path": "own"}, {"path": other}], max_bad_fraction=0.99)
    if form not in ("json", "lines"):  # other tars and tables tell
        return
    with pytest.raises(BadSamplesError, match="an unknown number of samples"):
        build_index(run, INPUTS)


@pytest.mark.parametrize("holes", [[(0, 10)], [(5, 25)], [(12, 36)], [(0, 10), (20, 35)]])
def test_holes_of_zeros_in_lines_count_by_bytes(
    tmp_path: Path, holes: list[tuple[int, int]]
) -> None:
    path = write(tmp_path, "lines", shards=1)
    content = bytearray(path.read_bytes())
    ends = [0, *(at + 1 for at, byte in enumerate(content) if byte == 10)]
    for first, last in holes:
        start, end = ends[first], ends[last] - 20
        content[start:end] = bytes(end - start)
    path.write_bytes(content)
    index = build_index(make_run(tmp_path, [{"path": "own"}], max_bad_fraction=0.9), INPUTS)
    lost = sum(last - first for first, last in holes)
    assert len(index) == EACH - lost
    assert samples_lost(index.skipped) == pytest.approx(lost, abs=len(holes))


@pytest.mark.parametrize("damage", [cut, zeroed])
@pytest.mark.parametrize("form", mostly_slow(WRITERS, *FAST))
def test_a_single_shard_of_which_nothing_tells_how_much_is_lost_is_refused(
    tmp_path: Path, form: str, damage: Callable[[Path], None]
) -> None:
    named = write(tmp_path, form, shards=1)
    damage(named)
    tar(tmp_path / "other.tar", ["another source"])
    sources = [{"path": str(named.relative_to(tmp_path))}, {"path": "other.tar"}]
    if form == "tar" and damage is zeroed:  # bytes behind the damage tell
        index = build_index(make_run(tmp_path, sources, max_bad_fraction=0.9), INPUTS)
        assert EACH <= len(index) - 1 + samples_lost(index.skipped) <= EACH + PADDING
        return
    with pytest.raises(BadSamplesError, match="an unknown number of samples") as caught:
        build_index(make_run(tmp_path, sources, max_bad_fraction=0.99), INPUTS)
    assert named.name in caught.value.why and "max_bad_fraction: 1" in caught.value.next_step
    index = build_index(make_run(tmp_path, sources, max_bad_fraction=1), INPUTS)
    assert [one.samples for one in index.skipped] == [None]


def test_a_damaged_header_in_the_middle_of_a_tar_counts_by_bytes(tmp_path: Path) -> None:
    path = write(tmp_path, "tar", shards=1)
    with tarfile.open(path) as opened:
        place = opened.getmembers()[10].offset
    content = bytearray(path.read_bytes())
    content[place : place + 512] = b"x" * 512
    path.write_bytes(content)
    index = build_index(make_run(tmp_path, [{"path": "own"}], max_bad_fraction=0.9), INPUTS)
    assert len(index) == 10 and EACH <= 10 + samples_lost(index.skipped) <= EACH + PADDING


@pytest.mark.parametrize("shards", first_fast([1, 4]))
def test_bytes_of_a_long_extended_header_are_no_samples(tmp_path: Path, shards: int) -> None:
    path = write(tmp_path, "tar", shards=shards)
    with tarfile.open(path) as opened:
        place = opened.getmembers()[10].offset
    header, content = tarfile.TarInfo("././@LongLink"), path.read_bytes()
    header.type, header.size = tarfile.GNUTYPE_LONGNAME, 300 << 20
    with path.open("wb") as file:
        file.write(content[:place] + header.tobuf(tarfile.GNU_FORMAT))
        file.seek(header.size, os.SEEK_CUR)
        file.write(content[place:])
    index = build_index(make_run(tmp_path, [{"path": "own"}], max_bad_fraction=1), INPUTS)
    assert [one.samples for one in index.skipped] == [EACH - 10 if shards > 1 else None]


def test_two_tars_in_one_file_are_no_whole_tar(tmp_path: Path) -> None:
    path = write(tmp_path, "tar", shards=1)
    path.write_bytes(path.read_bytes() * 2)
    index = build_index(make_run(tmp_path, [{"path": "own"}], max_bad_fraction=0.9), INPUTS)
    assert len(index) == EACH and EACH <= samples_lost(index.skipped) <= EACH + 2 * PADDING
    assert "after the end marker" in index.skipped[0].reason


def test_a_damaged_row_group_counts_by_its_rows(tmp_path: Path) -> None:
    path = tmp_path / "own" / "a.parquet"
    path.parent.mkdir()
    pq.write_table(
        pa.table({"text": texts(0)}),
        path,
        row_group_size=EACH // 2,
        use_dictionary=False,
        compression="zstd",
    )
    place = pq.ParquetFile(path).metadata.row_group(1).column(0).data_page_offset
    content = bytearray(path.read_bytes())
    content[place : place + 12] = bytes(12)
    path.write_bytes(content)
    index = build_index(make_run(tmp_path, [{"path": "own"}], max_bad_fraction=0.9), INPUTS)
    assert [one.samples for one in index.skipped] == [EACH // 2] and len(index) == EACH // 2


def test_documents_in_pieces_are_one_sample_each(tmp_path: Path) -> None:
    """Pieces that fill sequences make no loss of whole documents look small."""
    folder = tmp_path / "own"
    folder.mkdir()
    for number in range(4):
        lines(folder / f"{number}.jsonl", ["word " * 500] * 10)
    os.truncate(folder / "1.jsonl", 1)
    run = make_run(tmp_path, [{"path": "own"}], max_bad_fraction=0.2)
    with pytest.raises(BadSamplesError, match="10 of 40 samples"):
        build_index(run, INPUTS)


@pytest.mark.parametrize(
    ("left", "missing", "lost"),
    first_fast(
        [
            (["{}-of-00004.parquet", (0, 1, 3)], "00002-of-00004", 1),
            (["{}-of-00004.parquet", (3,)], "00000-of-00004.parquet, and so are 00001-of-00004", 3),
            (["{}-of-00004.parquet", (1, 2, 4)], "00003-of-00004", 1),
            (["{}-of-00100.parquet", (0, 1)], "00004-of-00100.parquet and 95 more", 98),
            (["s{}.parquet", (0, 1, 3, 4)], "s00002.parquet", 1),
            (["s{}.parquet", (0, 2)], "s00001.parquet", 1),
            (["s{}.parquet", (1, 2, 4)], "", 0),  # a gap that is named, and not counted
            (["s{}.parquet", (5, 6, 8)], "", 0),
            (["s{}.parquet", (0, 2, 4)], "", 0),  # every other one
            (["s{}.parquet", (0, 9)], "", 0),
            (["2{}.parquet", (14, 17)], "", 0),
        ],
        4,
    ),
)
def test_shards_that_are_not_there(
    tmp_path: Path, left: tuple[str, Sequence[int]], missing: str, lost: int
) -> None:
    folder = tmp_path / "own"
    folder.mkdir()
    pattern, numbers = left
    for number in numbers:
        parquet(folder / pattern.format(f"{number:05d}"), texts(number, 10))
    index = build_index(make_run(tmp_path, [{"path": "own"}], max_bad_fraction=0.999), INPUTS)
    assert samples_lost(index.skipped) == 10 * lost
    assert len(index.skipped) == (lost > 0)
    if lost:
        (one,) = index.skipped
        assert missing in f"{one.shard}: {one.reason}".replace(": the shard is missing", "")
    alone = {"path": f"own/{pattern.format(f'{numbers[0]:05d}')}"}
    assert not build_index(make_run(tmp_path, [alone], max_bad_fraction=0), INPUTS).skipped


def test_a_shard_that_comes_back_is_not_missing_any_more(tmp_path: Path) -> None:
    write(tmp_path, "tar").unlink()
    run = make_run(tmp_path, [{"path": "own"}], max_bad_fraction=0.3)
    assert samples_lost(build_index(run, INPUTS).skipped) == EACH
    write(tmp_path, "tar")
    for number in (0, 1, 3):  # as they were
        path = tmp_path / "own" / name_of("tar", number)
        os.utime(path, ns=(path.stat().st_atime_ns, path.stat().st_mtime_ns))
    index = open_index(run, INPUTS)
    assert not index.skipped and len(index) == 4 * EACH


@pytest.mark.parametrize(("successes", "lost"), [(50, 30), (EACH // 2, 1), (0, 1)])
def test_img2dataset_says_what_a_tar_holds(tmp_path: Path, successes: int, lost: int) -> None:
    at_a_border(write(tmp_path, "tar", shards=1))
    (tmp_path / "own" / "00000_stats.json").write_text(json.dumps({"successes": successes}))
    index = build_index(make_run(tmp_path, [{"path": "own"}], max_bad_fraction=0.9), INPUTS)
    assert (len(index), samples_lost(index.skipped)) == (EACH // 2, lost)


def test_a_tar_that_is_said_to_be_empty_loses_nothing(tmp_path: Path) -> None:
    tar(write(tmp_path, "tar"), [])
    (tmp_path / "own" / "00002_stats.json").write_text('{"successes": 0}')
    assert not build_index(make_run(tmp_path, [{"path": "own"}]), INPUTS).skipped


@pytest.mark.parametrize("name", ["a.json", "a.jsonl"])
@pytest.mark.parametrize(
    "odd", first_fast(["null", "7", '"a text"', "[]", "true", "-1.5e3", "[[]]"], 4)
)
def test_an_odd_element_of_a_list_is_skipped_alone(tmp_path: Path, name: str, odd: str) -> None:
    said = [json.dumps(one) for one in records(texts(0))]
    said.insert(15, odd)
    content = "\n".join(said) if name.endswith("l") else f"[{', '.join(said)}]"
    (tmp_path / name).write_text(content)
    index = build_index(make_run(tmp_path, [{"path": name}], max_bad_fraction=0.1), INPUTS)
    assert list(index.keys) == [str(number) for number in range(EACH)]
    place = "line 16" if name.endswith("l") else "record 15"
    assert [(one.key, one.samples) for one in index.skipped] == [(place, 1)]


@pytest.mark.parametrize("name", ["a.json", "a.jsonl"])
@pytest.mark.parametrize("indent", [None, 1])
def test_records_in_lists_are_samples_of_their_own(
    tmp_path: Path, name: str, indent: int | None
) -> None:
    """QwenLM's packed data: records of an inner list are attended to one by one."""
    own = records(texts(0))
    packed = [own[:3], own[3], own[4:9], *own[9:]]
    of_lines = name.endswith("l") and indent is None
    content = "\n".join(map(json.dumps, packed)) if of_lines else json.dumps(packed, indent=indent)
    (tmp_path / name).write_text(content)
    run = make_run(tmp_path, [{"path": name}], max_bad_fraction=0)
    index = build_index(run, INPUTS)
    assert list(index.keys) == [str(number) for number in range(EACH)] and not index.skipped
    data = (tmp_path / name).read_bytes()
    places = zip(index.offsets.tolist(), index.sizes.tolist(), strict=True)
    assert [json.loads(data[offset : offset + size]) for offset, size in places] == own


@pytest.mark.parametrize(
    "content",
    [
        '{"data": [LIST]}',
        '{\n"data": [LIST]\n}',
        "[LIST]\n[LIST]",
        "[LIST",
        "[LIST, {]",
        '[LIST] {"text": "more"}',
        "LINES\n{",
    ],
)
def test_a_json_that_holds_more_than_can_be_read_is_refused(tmp_path: Path, content: str) -> None:
    said = [json.dumps(one) for one in records(texts(0))]
    content = content.replace("LIST", ", ".join(said)).replace("LINES", "\n".join(said))
    (tmp_path / "a.json").write_text(content)
    lines(tmp_path / "b.jsonl", ["b"])
    run = make_run(tmp_path, [{"path": "a.json"}, {"path": "b.jsonl"}], max_bad_fraction=0.9)
    with pytest.raises(BadSamplesError, match="an unknown number of samples") as caught:
        build_index(run, INPUTS)
    assert "a.json" in caught.value.why


def test_a_byte_that_is_no_utf8_costs_one_record_of_a_list(tmp_path: Path) -> None:
    content = json.dumps(records(texts(0))).encode()
    (tmp_path / "a.json").write_bytes(content.replace(b"text 0 7 ", b"text \xff 7 "))
    index = build_index(make_run(tmp_path, [{"path": "a.json"}], max_bad_fraction=0.1), INPUTS)
    assert len(index) == EACH - 1
    assert [(one.key, one.samples) for one in index.skipped] == [("record 7", 1)]
    assert "UTF-8" in index.skipped[0].reason


def test_files_of_json_that_are_no_series_tell_nothing(tmp_path: Path) -> None:
    """A large file that is cut counts for more than the few records of another one."""
    folder = tmp_path / "own"
    folder.mkdir()
    json_list(folder / "large.json", texts(0))
    cut(folder / "large.json")
    json_list(folder / "small.json", texts(1, 2))
    run = make_run(tmp_path, [{"path": "own"}], max_bad_fraction=0.9)
    with pytest.raises(BadSamplesError, match="an unknown number of samples") as caught:
        build_index(run, INPUTS)
    assert "large.json" in caught.value.why


@pytest.mark.parametrize(
    ("held", "read", "lost"),
    [
        ([10, 10, 4], 3, 7),
        ([10, 10, 12], 10, 1),
        ([10, 10, 12], 11, 1),
        ([10, 10, 12], 13, None),
        ([], 3, None),
    ],
)
def test_what_a_cut_shard_held(held: list[int], read: int, lost: int | None) -> None:
    shards = [
        ReadShard(0, Shard("tar", "", f"{number}.tar"), f"{number}.tar", 100, samples, [], True)
        for number, samples in enumerate(held)
    ]
    end = Skipped("9.tar", "", "cut", None, cut=True)
    skipped = lost_samples(
        [*shards, ReadShard(0, Shard("tar", "", "9.tar"), "9.tar", 100, read, [end], True)]
    )
    assert [one.samples for _, one in skipped] == [lost]


@pytest.mark.slow
def test_hosts_that_share_the_shards_count_alike(tmp_path: Path) -> None:
    cut(write(tmp_path, "tar"))
    run = make_run(tmp_path, [{"path": "own"}], max_bad_fraction=0.3)
    alone = build_index(run, INPUTS)
    run.dir.index.unlink()
    assert [read_share_of(run, INPUTS, Share(number, 2)) for number in (0, 1)] == [2, 2]
    assert open_index(run, INPUTS).skipped == alone.skipped
    extended = make_run(
        tmp_path, [{"path": "own"}, {"path": "own/00000.tar"}], max_bad_fraction=0.3
    )
    assert open_index(extended, INPUTS).skipped == alone.skipped


def test_profiles_count_samples_and_not_shards(tmp_path: Path) -> None:
    cut(write(tmp_path, "parquet"))
    index = build_index(make_run(tmp_path, [{"path": "own"}], max_bad_fraction=0.3), INPUTS)
    data = describe_data(pack(Mixture(index, 0), 0))
    assert (data.skipped, data.skipped_entries) == (EACH, 1)
    assert "about 40 samples are lost" in data.skipped_first[0]
