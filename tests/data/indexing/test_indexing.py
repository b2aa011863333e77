"""Shards read by processes and hosts give the index that one process gives; what ends on the way
is named, and what was read is kept."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from disttrain_cli.data.index.index_checks import (
    BadSamplesError,
    State,
    checked_tokenizer,
    list_shards,
)
from disttrain_cli.data.indexing import index_writing, indexing_processes, shard_files
from disttrain_cli.data.indexing import reading_shards as indexing
from disttrain_cli.data.indexing.building import build_index, open_index
from disttrain_cli.data.indexing.index_writing import read_share_of
from disttrain_cli.data.indexing.reading_shards import Share, shares
from disttrain_cli.data.indexing.shard_files import Job, parts_of_job, paths_of
from disttrain_cli.data.sources import Shard, tables
from disttrain_cli.errors import DataError, SpecError
from disttrain_cli.spec.runfile import Run
from tests.cases import first_fast, mostly_slow
from tests.data.dataset import (
    INPUTS,
    PROPERTY,
    encoded,
    interleaved,
    make_run,
    text,
    write_dataset,
    write_tar,
)

SHARDS = 5


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Two forms of tars, one of them with a sample that is broken."""
    write_dataset(tmp_path)
    for number in range(2, SHARDS - 1):
        samples = [interleaved(f"{number}-{at}", text("word " * at)) for at in range(1, 9)]
        write_tar(tmp_path / "mixed" / f"{number:05d}.tar", [*samples, ("broken.json", b"{")])
    return make_run(tmp_path, max_bad_fraction=0.2)


@pytest.fixture
def said() -> list[str]:
    return []


def spoken(said: list[str], what: str, done: int, total: int) -> None:
    said.append(what)


def jobs_of(run: Run) -> list[Job]:
    return index_writing._jobs(run, list_shards(run).shards)


def files_of(run: Run) -> list[Path]:
    return paths_of(run, INPUTS, checked_tokenizer(run, INPUTS), jobs_of(run))


@pytest.mark.slow
def test_processes_write_the_same_index(run: Run) -> None:
    alone = build_index(run, INPUTS, processes=0)
    written = run.dir.index.read_bytes()
    assert len(alone.shards) == SHARDS and alone.skipped
    run.dir.index.unlink()
    beside = build_index(run, INPUTS, processes=3)
    assert run.dir.index.read_bytes() == written
    assert (beside.fingerprint, beside.skipped) == (alone.fingerprint, alone.skipped)
    assert not run.dir.partial_index.exists()


def test_small_data_and_single_shards_need_no_process(run: Run) -> None:
    jobs = [
        job._replace(state=job.state._replace(size=indexing.EACH_BYTES)) for job in jobs_of(run)
    ]
    cores = len(os.sched_getaffinity(0))
    assert indexing._processes(jobs_of(run)) == 0 == indexing._processes(jobs[:1])
    assert indexing._processes(jobs) == min(cores, SHARDS)
    assert indexing._processes([jobs[0], jobs_of(run)[1]]) == 1


@given(
    sizes=st.lists(st.one_of(st.none(), st.integers(0, 2**40)), max_size=40),
    hosts=st.integers(1, 7),
)
@PROPERTY
def test_every_shard_is_one_hosts(sizes: list[int | None], hosts: int) -> None:
    jobs = [
        Job(State(0, str(number), size, 0), Shard("tar", "", str(number)), "")  # type: ignore[arg-type]
        for number, size in enumerate(sizes)
    ]
    of_hosts = shares(jobs, hosts)
    assert len(of_hosts) == hosts
    assert sorted((job for own in of_hosts for job in own), key=jobs.index) == jobs
    assert all(own == sorted(own, key=jobs.index) for own in of_hosts)
    loads = [sum((job.state.size or 0) + 1 for job in own) for own in of_hosts]
    assert max(loads) - min(loads) <= max(((size or 0) + 1 for size in sizes), default=0)


@pytest.mark.slow
def test_hosts_read_shares_that_the_next_pass_joins(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = build_index(run, INPUTS)
    written = run.dir.index.read_bytes()
    run.dir.index.unlink()
    assert sum(read_share_of(run, INPUTS, Share(number, 2)) for number in (0, 1)) == SHARDS
    assert all(path.is_file() for path in files_of(run)) and not run.dir.index.exists()
    monkeypatch.setattr(shard_files, "read_shard", None)
    assert open_index(run, INPUTS).fingerprint == alone.fingerprint
    assert run.dir.index.read_bytes() == written and not run.dir.partial_index.exists()


@pytest.fixture
def large(run: Run, monkeypatch: pytest.MonkeyPatch) -> tuple[Run, bytes]:
    """A run with a Parquet file of 12 row groups, with rows of every kind and a damaged one, beside
    other shards, and its index before the file counts as large."""
    pictures = [encoded(20 + row, 30, ".png" if row % 3 else ".jpg") for row in range(60)]
    texts: list[Any] = [None if row % 7 == 3 else f"text {row}" for row in range(60)]
    texts[11], texts[50], pictures[40] = "long " * 40, "long " * 40, b"none"
    path = _folder(run, "tables") / "a.parquet"
    pq.write_table(
        pa.table({"jpg": pictures, "text": texts}),
        path,
        row_group_size=5,
        use_dictionary=False,
        compression="zstd",
    )
    content = bytearray(path.read_bytes())
    place = pq.ParquetFile(path).metadata.row_group(6).column(0).data_page_offset
    content[place : place + 12] = bytes(12)
    path.write_bytes(content)
    large = make_run(run.folder, [{"path": "mixed"}, {"path": "tables"}], max_bad_fraction=0.5)
    whole = build_index(large, INPUTS, processes=0)
    assert any("damaged" in one.reason for one in whole.skipped) and whole.keys[-1] == "row 58"
    written = large.dir.index.read_bytes()
    large.dir.index.unlink()
    monkeypatch.setattr(shard_files, "LARGE_BYTES", path.stat().st_size)
    monkeypatch.setattr(tables, "PART_BYTES", 1000)
    monkeypatch.setattr(tables, "RUN_BYTES", 5000)
    return large, written


@pytest.mark.parametrize("processes", first_fast([0, 2]))
def test_parts_of_a_large_file_are_joined(large: tuple[Run, bytes], processes: int) -> None:
    run, written = large
    reports = list[tuple[str, int, int]]()
    build_index(run, INPUTS, lambda *report: reports.append(report), processes=processes)
    assert run.dir.index.read_bytes() == written
    parts = [job for one in jobs_of(run) for job in parts_of_job(one)]
    assert len(parts) > SHARDS + 1 and {part.shard.path for part in parts} == {
        job.shard.path for job in jobs_of(run)
    }
    assert abs(sum(part.bytes for part in parts) - sum(job.bytes for job in jobs_of(run))) < 1
    counted = [done for what, done, total in reports if what == "index parts of shards"]
    assert counted == list(range(len(parts) + 1))


@pytest.mark.slow
def test_hosts_share_a_large_file(
    large: tuple[Run, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, written = large
    counts = [read_share_of(run, INPUTS, Share(number, 2)) for number in (0, 1)]
    assert min(counts) > 1 and sum(counts) > SHARDS + 1
    monkeypatch.setattr(shard_files, "read_shard", None)
    build_index(run, INPUTS, processes=0)
    assert run.dir.index.read_bytes() == written


@pytest.mark.slow
def test_bad_parts_are_read_again_after_their_repair(large: tuple[Run, bytes]) -> None:
    run, _ = large
    strict = make_run(run.folder, [{"path": "mixed"}, {"path": "tables"}], max_bad_fraction=0)
    with pytest.raises(BadSamplesError):
        build_index(strict, INPUTS, processes=2)
    parts = [part for job in jobs_of(strict) for part in parts_of_job(job)]
    paths = paths_of(strict, INPUTS, checked_tokenizer(strict, INPUTS), parts)
    kept = {part.shard.form for part, path in zip(parts, paths, strict=True) if path.is_file()}
    assert kept == {"tar"}


@pytest.mark.slow
def test_new_shards_are_shared_among_hosts(run: Run) -> None:
    build_index(run, INPUTS)
    write_tar(run.folder / "mixed" / "9.tar", [interleaved("new", text("words"))])
    assert [read_share_of(run, INPUTS, Share(number, 2)) for number in (0, 1)] == [1, 0]
    assert "new" in open_index(run, INPUTS).keys


@pytest.mark.slow
def test_a_host_that_died_is_named_and_its_shards_are_read(run: Run, said: list[str]) -> None:
    read_share_of(run, INPUTS, Share(1, 2))
    indexing._mark(run, Share(0, 2)).touch()
    build_index(run, INPUTS, lambda *report: spoken(said, *report))
    (named,) = [what for what in said if "not finished" in what]
    assert named.startswith("share 0 of 2 on ") and named.endswith(" shards are read here")


@pytest.mark.slow
def test_what_is_damaged_or_of_other_shards_is_read_again(run: Run) -> None:
    alone = build_index(run, INPUTS)
    run.dir.index.unlink()
    read_share_of(run, INPUTS, Share(0, 1))
    first, second = files_of(run)[:2]
    first.write_bytes(first.read_bytes()[:-20])
    second.write_bytes(b"")
    assert build_index(run, INPUTS).fingerprint == alone.fingerprint
    before = files_of(run)
    shard = run.folder / "mixed" / "00002.tar"
    write_tar(shard, [interleaved("other", text("words"))])
    assert sum(one != other for one, other in zip(before, files_of(run), strict=True)) == 1
    assert "other" in build_index(run, INPUTS).keys


@pytest.mark.slow
def test_bad_shards_are_read_again_after_their_repair(run: Run) -> None:
    strict = make_run(run.folder, max_bad_fraction=0)
    with pytest.raises(BadSamplesError):
        build_index(strict, INPUTS, processes=2)
    kept = [path.is_file() for path in files_of(strict)]
    assert any(kept) and not all(kept)


@pytest.mark.slow
def test_the_first_error_in_dataset_order_is_raised(run: Run) -> None:
    for name in ("b", "a"):
        pq.write_table(_no_columns(), _folder(run, "tables") / f"{name}.parquet")
    broken = make_run(run.folder, [{"path": "mixed"}, {"path": "tables"}])
    told = []
    for processes in (0, 2):
        with pytest.raises(DataError) as caught:
            build_index(broken, INPUTS, processes=processes)
        told.append((str(caught.value), type(caught.value)))
    assert told[0] == told[1] and "a.parquet" in told[0][0]
    assert any(path.is_file() for path in files_of(broken))


@pytest.mark.slow
def test_a_folder_that_cannot_be_written_is_named(run: Run) -> None:
    run.dir.root.mkdir(parents=True)
    run.dir.partial_index.write_text("in the way")
    with pytest.raises(SpecError, match="Cannot write"):
        build_index(run, INPUTS, processes=2)


def _folder(run: Run, name: str) -> Path:
    (run.folder / name).mkdir(exist_ok=True)
    return run.folder / name


def _no_columns() -> object:
    import pyarrow as pa

    return pa.table({"number": [1]})


@pytest.mark.slow
@pytest.mark.parametrize("deaths", first_fast([1, 100]))
def test_processes_that_die_are_named(
    run: Run, said: list[str], monkeypatch: pytest.MonkeyPatch, deaths: int
) -> None:
    alone = build_index(run, INPUTS)
    real, started = indexing_processes._Processes.start, list[int]()

    def start(processes: indexing_processes._Processes) -> subprocess.Popen[str]:
        process = real(processes)
        started.append(process.pid)
        if len(started) <= deaths:
            process.kill()
        return process

    monkeypatch.setattr(indexing_processes._Processes, "start", start)
    if deaths == 1:
        again = build_index(run, INPUTS, lambda *report: spoken(said, *report), processes=1)
        assert again.fingerprint == alone.fingerprint and len(started) == 2
        (named,) = [what for what in said if "retrying" in what]
        assert named == "a process ended (killed by SIGKILL): retrying mixed/00000.tar"
    else:
        with pytest.raises(DataError, match=r"mixed/00000\.tar cannot be read") as caught:
            build_index(run, INPUTS, processes=1)
        assert "SIGKILL" in caught.value.why and len(started) < deaths


CODE = """
import sys
from pathlib import Path
from typing import Any
from disttrain_cli.data.indexing.building import build_index
from tests.data.dataset import INPUTS, make_run
build_index(make_run(Path(sys.argv[1]), max_bad_fraction=0.2), INPUTS, processes=2)
"""


@pytest.mark.parametrize("name", mostly_slow(["SIGINT", "SIGTERM", "SIGKILL"], "SIGINT"))
def test_no_process_outlives_the_command(run: Run, name: str) -> None:
    number = signal.Signals[name]
    command = subprocess.Popen(
        [sys.executable, "-c", CODE, str(run.folder)], stderr=subprocess.DEVNULL
    )
    try:
        readers = until(lambda: readers_of(command.pid), 2)
        for reader in readers if number == signal.SIGINT else ():
            os.kill(reader, signal.SIGSTOP)  # in the middle of something
        command.send_signal(number)
        assert command.wait(60) != 0
    finally:
        command.kill()
        command.wait()
    until(lambda: [None for reader in readers if not fields_of(reader)], len(readers))
    assert not run.dir.index.exists()
    assert build_index(run, INPUTS, processes=0).shards


def readers_of(pid: int) -> list[int]:
    """Processes that this one has started to read."""
    running = [int(path.name) for path in Path("/proc").glob("[0-9]*")]
    return [
        child
        for child in running
        if fields_of(child)[1:2] == [str(pid)] and b"indexing_worker" in read(child, "cmdline")
    ]


def fields_of(pid: int) -> list[str]:
    """State, parent and more of a process; nothing where it has ended."""
    fields = read(pid, "stat").decode().rpartition(")")[2].split()
    return [] if fields[:1] == ["Z"] else fields


def read(pid: int, name: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:
        return b""


def until(found: Callable[[], list[Any]], count: int) -> list[Any]:
    """What is found as soon as it is so many; fails after a minute."""
    for _ in range(6000):
        if len(now := found()) == count:
            return now
        time.sleep(0.01)
    raise AssertionError(f"{len(now)} of {count}")
