"""What a rank recorded outlives it, and a disk that takes no more traces ends nothing."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from disttrain_cli.analysis.analyze import ask
from disttrain_cli.analysis.job.database import open_database
from disttrain_cli.errors import DataError
from disttrain_cli.runtime.watching import tracing
from disttrain_cli.runtime.watching.tracing import SegmentWriter, Tracer
from disttrain_cli.spec.stage_graph import RankCoords
from disttrain_cli.spec.trace import TABLES, segments_of
from tests.cases import first_fast
from tests.runtime.watching.test_hang import graph_of

STEP = {
    "run": "start-000",
    "loss": float("nan"),
    "loss_text": 1.5,
    "learning_rates": {"llm": 0.1},
    "mfu": 0.5,
    "iteration_s": 1.0,
    "end_ns": 10,
}


def record(folder: Path, rank: int, steps: int, ending: str = "") -> None:
    """Some steps of a rank, of two rows each, and part of another one; what follows is lost or
    closed."""
    stage = graph_of().stages[rank]
    tracer = Tracer(folder, "start-000", RankCoords(rank, stage, 0), lambda: 0, pytest.fail)
    reports, sizes = (
        SegmentWriter(folder / name, TABLES[name], "start-000") for name in ("steps", "sizes")
    )
    for step in range(steps):
        tracer.step = step
        for slot in range(2):
            tracer.record(
                "forward", 100 * step + slot, 100 * step + slot + 1, slot=slot, module="llm"
            )
        if rank == 0:
            reports.rows.append(STEP | {"step": step})
            sizes.rows.append(
                {
                    "run": "start-000",
                    "step": step,
                    "tokens": 7,
                    "length_sq": 49,
                    "images": [4, 8],
                    "targets": 1,
                    "clips": 0,
                }
            )
            reports.keep()
            sizes.keep()
        tracer.end_step()
    tracer.step = steps
    tracer.record("forward", 100 * steps, 100 * steps + 1, slot=0, module="llm")
    if ending == "close":
        tracer.close()
        reports.flush()
        sizes.flush()


#: The same in a process that SIGKILL ends: long segments in one folder, short ones in another.
KILLED = """
import os, signal, sys
from pathlib import Path
from disttrain_cli.runtime.watching import tracing
from tests.runtime.watching.test_tracing import record
for rank in range(3):
    record(Path(sys.argv[1], "long"), rank, 5)
record(Path(sys.argv[1], "none"), 0, 0)
tracing.SEGMENT_BYTES = 4_000  # two steps of a rank
for rank in range(2):
    record(Path(sys.argv[1], "short"), rank, 5)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recorded")
    assert subprocess.run([sys.executable, "-c", KILLED, str(folder)]).returncode == -signal.SIGKILL
    return folder


def counted(folder: Path) -> list[tuple[int, int, int]]:
    """(rank, steps, rows) of every rank."""
    return ask(
        [folder],
        "SELECT rank, count(DISTINCT step), count(*) FROM trace GROUP BY rank ORDER BY rank",
    ).rows


@pytest.mark.slow
def test_a_killed_rank_leaves_every_step_but_the_last(recorded: Path) -> None:
    folder = recorded / "long"
    assert not list(folder.rglob("*.parquet"))
    assert counted(folder) == [(rank, 5, 10) for rank in range(3)]
    rows = ask([folder], "SELECT step, loss, learning_rates FROM steps ORDER BY step").rows
    assert (
        [row[0] for row in rows] == list(range(5))
        and str(rows[0][1]) == "nan"
        and rows[0][2] == {"llm": 0.1}
    )
    assert ask([folder], "SELECT images, clips FROM sizes LIMIT 1").rows == [([4, 8], 0)]


@pytest.mark.parametrize("lost", first_fast([1, 40, 10_000]))
def test_a_batch_that_was_not_written_to_its_end_is_left_out(
    tmp_path: Path, recorded: Path, lost: int
) -> None:
    shutil.copytree(recorded / "long", tmp_path / "copy")
    [file] = (tmp_path / "copy" / "rank-00001").iterdir()
    os.truncate(file, max(0, file.stat().st_size - lost))
    assert counted(tmp_path / "copy") == [
        (0, 5, 10),
        *([(1, 4, 8)] if lost < 10_000 else []),
        (2, 5, 10),
    ]


def test_segments_become_parquet_and_count_once(tmp_path: Path, recorded: Path) -> None:
    folder = shutil.copytree(recorded / "short", tmp_path / "copy")
    assert [file.suffix for file in sorted((folder / "rank-00001").iterdir())] == [
        ".parquet",
        ".parquet",
        ".arrows",
    ]
    whole = folder / "rank-00001" / "segment-start-000-00000.parquet"
    shutil.copy(
        folder / "rank-00001" / "segment-start-000-00002.arrows", whole.with_suffix(".arrows")
    )
    assert counted(folder) == [
        (0, 5, 10),
        (1, 5, 10),
    ]  # one that was replaced, but not yet removed, does not count


def test_what_is_closed_is_parquet_alone(tmp_path: Path) -> None:
    record(tmp_path, 0, 5, "close")
    assert {file.suffix for file in tmp_path.rglob("segment-*")} == {".parquet"}
    assert counted(tmp_path) == [(0, 6, 11)]


def test_before_the_first_step_there_is_no_trace_yet(recorded: Path) -> None:
    with pytest.raises(DataError, match=r"There is no trace|No readable trace"):
        open_database([recorded / "none"])


def test_a_full_disk_ends_the_trace_and_nothing_else(tmp_path: Path) -> None:
    said: list[str] = []
    tracer = Tracer(
        tmp_path, "start-000", RankCoords(0, graph_of().stages[0], 0), lambda: 0, said.append
    )
    (tmp_path / "rank-00000").mkdir()
    (tmp_path / "rank-00000" / "segment-start-000-00000.arrows").symlink_to("/dev/full")
    for tracer.step in range(3):
        tracer.record("forward", 0, 1)
        tracer.end_step()
    tracer.close()
    assert said == [
        f"warning: no more traces in {tmp_path}: No space left on device; training goes on without"
        " them"
    ]


@pytest.mark.parametrize(("kept", "first"), [(None, 0), (1, 14), (5, 10), (100, 0)])
def test_segments_of_older_steps_are_deleted_whatever_start_wrote_them(
    tmp_path: Path, kept: int | None, first: int
) -> None:
    """Pairs of steps; the start before was killed in its second pair, and repeated in part."""

    def write(run: str, steps: range, kept: int | None) -> None:
        writer = tracing.SegmentWriter(
            tmp_path, {"run": "string", "step": "int64"}, run, pytest.fail, kept
        )
        for step in steps:
            writer.rows.append({"run": run, "step": step})
            writer.keep()
            if step % 2:
                writer.flush()

    write("start-000", range(3), None)
    (tmp_path / "segment-start-000-00007.parquet").write_bytes(b"damaged")
    write("start-001", range(2, 16), kept)
    whole, opened = segments_of([tmp_path])
    lasts = {file: tracing.last_step(file) for file in (*whole, *opened)}
    assert lasts.pop(tmp_path / "segment-start-000-00007.parquet") is None
    assert len(opened) == (first == 0)
    pairs = sorted({step - step % 2 for step in lasts.values() if step is not None})
    assert pairs == list(range(first, 16, 2))


def test_segments_of_ranks_that_are_gone_are_deleted_by_the_first(tmp_path: Path) -> None:
    """A start on four ranks goes on with two of them."""

    def write(rank: int, run: str, steps: range, kept: int | None, ranks: int) -> None:
        stage = graph_of().stages[0]
        tracer = Tracer(
            tmp_path,
            run,
            RankCoords(rank, stage, 0),
            lambda: 0,
            pytest.fail,
            kept_steps=kept,
            ranks=ranks,
        )
        for step in steps:
            tracer.step = step
            tracer.record("forward", step, step + 1, module="llm")
            tracer.end_step()
        tracer.close()

    for rank in range(4):
        write(rank, "start-000", range(5 if rank == 3 else 4), None, 4)
    (tmp_path / "rank-notes").mkdir()
    for rank, left in ((1, {0, 1, 2, 3}), (0, {0, 1, 3})):
        write(rank, "start-001", range(4, 12), 8, 2)
        assert {int(path.parent.name[5:]) for path in tmp_path.glob("*/segment*")} == left
    assert not (tmp_path / "rank-00002").exists() and (tmp_path / "rank-notes").exists()
