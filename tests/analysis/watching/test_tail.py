"""What grows is read once, whatever becomes of its segments, and only the last steps are held."""

import shutil

import pyarrow.parquet as pq
import pytest

from disttrain_cli.analysis.analyze import analyze
from disttrain_cli.analysis.job.analysis import analyze_database
from disttrain_cli.analysis.job.database import open_database
from disttrain_cli.analysis.watching.tail import MOST_BEHIND, Source, Stream, Tail
from disttrain_cli.errors import SpecError
from disttrain_cli.spec.trace import TRACE_COLUMNS
from tests.analysis import synthetic
from tests.analysis.growing import Growing

STEPS = 12


@pytest.fixture
def growing(tmp_path):
    synthetic.write(tmp_path / "whole", synthetic.Synthetic(steps=STEPS, slow_rank={3: 1.6}))
    return Growing(tmp_path / "whole", tmp_path / "traces")


def held(tail):
    """(step, start_ns) of every row of the ranks."""
    table = tail.files().open_segments["segments"]
    return sorted(
        zip(table.column("step").to_pylist(), table.column("start_ns").to_pylist(), strict=True)
    )


def wanted(tmp_path, first, last):
    rows = [
        (row["step"], row["start_ns"])
        for file in (tmp_path / "whole").glob("rank-*/*.parquet")
        for row in pq.read_table(file).to_pylist()
    ]
    return sorted(row for row in rows if first <= row[0] <= last)


def test_every_row_of_the_last_steps_is_held_once(tmp_path, growing):
    tail = Tail(tmp_path / "traces", steps=4)
    assert not tail.grow()
    for step in range(STEPS):
        growing.write(step)
        if step in (3, 8):  # a checkpoint: open segments are replaced
            growing.flush()
        assert tail.grow() and not tail.grow()
        assert tail.last == step
        assert held(tail) == wanted(tmp_path, max(0, step - 3), step)


def test_what_is_old_is_not_read_by_who_comes_later(tmp_path, growing, monkeypatch):
    for step in range(STEPS):
        growing.write(step)
        growing.flush()
    read = []
    real = pq.read_table
    monkeypatch.setattr(pq, "read_table", lambda file: read.append(file) or real(file))
    tail = Tail(tmp_path / "traces", steps=3)
    assert tail.grow()
    for folder in [*(tmp_path / "traces").glob("rank-*"), tmp_path / "traces" / "steps"]:
        assert sum(file.parent == folder for file in read) == 3 + MOST_BEHIND
    assert held(tail) == wanted(tmp_path, STEPS - 3, STEPS - 1)


def test_a_step_counts_once_all_ranks_have_recorded_it(tmp_path, growing):
    tail = Tail(tmp_path / "traces", steps=4)
    growing.write(0)
    assert tail.grow()
    growing.write(1, only="steps")
    assert not tail.grow()
    growing.write(1, only="rank-")
    growing.write(2, only="steps")
    assert tail.grow() and tail.last == 1
    for step in (2, 3, 4):  # a rank whose traces have ended is not waited for
        for name in ("rank-0000[0-4]", "steps"):
            for folder in (tmp_path / "traces").glob(name):
                growing.write(step, only=folder.name)
        tail.grow()
    assert tail.last == 4


def test_a_batch_that_is_being_written_is_read_when_it_is_whole(tmp_path, growing):
    growing.write(0)
    growing.write(1)
    (opened,) = (tmp_path / "traces" / "rank-00000").iterdir()
    content, part = opened.read_bytes(), tmp_path / "part.arrows"
    stream, rows = Stream(), 0
    for end in range(0, len(content) + 1, 97):
        part.write_bytes(content[:end])
        rows += sum(map(len, stream.more(part)))
    part.write_bytes(content)
    rows += sum(map(len, stream.more(part)))
    assert rows == stream.rows == len(wanted_of(tmp_path, rank=0, last=1))
    assert stream.more(part) == [] == stream.more(tmp_path / "gone.arrows")


def wanted_of(tmp_path, rank, last):
    return [
        row
        for file in (tmp_path / "whole" / f"rank-{rank:05d}").iterdir()
        for row in pq.read_table(file).to_pylist()
        if row["step"] <= last
    ]


@pytest.mark.slow
def test_what_is_held_is_analysed_as_the_files_are(tmp_path, growing):
    tail = Tail(tmp_path / "traces", steps=STEPS)
    for step in range(STEPS):
        growing.write(step)
        tail.grow()
    database = open_database([tmp_path], held=tail.files())
    found = analyze_database(database).verdict
    database.close()
    assert found == analyze([tmp_path]).verdict
    assert (found.cause, found.place.rank) == ("worker", 3)


def test_another_start_begins_anew(tmp_path, growing):
    tail = Tail(tmp_path / "traces", steps=8)
    for step in range(6):
        growing.write(step)
    assert tail.grow() and tail.last == 5
    shutil.rmtree(tmp_path / "traces")
    assert not tail.grow()
    synthetic.write(tmp_path / "again", synthetic.Synthetic(steps=3, run="again"))
    again = Growing(tmp_path / "again", tmp_path / "traces")
    again.write(0)
    assert tail.grow() and tail.last == 0
    (runs,) = ({*tail.files().open_segments["segments"].column("run").to_pylist()},)
    assert runs == {"again"}


def test_traces_of_another_version_are_refused_or_said(tmp_path, growing):
    tail = Tail(tmp_path / "traces", steps=4)
    job = tmp_path / "traces" / "job.json"
    text = job.read_text()
    job.write_text(text.replace('"version":1', '"version":99', 1))
    with pytest.raises(SpecError, match="version"):
        tail.grow()
    job.write_text(text)
    growing.write(0)
    name = f"segment-{growing.run}-00001.parquet"
    rows = pq.read_table(next((tmp_path / "whole").glob("rank-00003/*"))).drop(["slot"])
    pq.write_table(rows, tmp_path / "traces" / "rank-00003" / name)
    (tmp_path / "traces" / "rank-00002" / name).write_bytes(b"PAR1")
    assert tail.grow()
    lacks, broken = sorted(tail.files().warnings, key=lambda said: "cannot be read" in said)
    assert "rank-00003 lacks the column(s) slot" in lacks and "rank-00002" in broken


@pytest.mark.slow
def test_traces_without_their_first_steps_say_where_they_begin(tmp_path):
    synthetic.write(tmp_path / "whole", synthetic.Synthetic(steps=STEPS))
    growing = Growing(tmp_path / "whole", tmp_path / "traces", kept_steps=4)
    for step in range(STEPS):
        growing.write(step)
        if step % 2:
            growing.flush()
    tail = Tail(tmp_path / "traces", steps=STEPS)
    assert tail.grow() and (tail.first, tail.last) == (STEPS - 4, STEPS - 1)
    assert held(tail) == wanted(tmp_path, STEPS - 4, STEPS - 1)
    says = f"the traces begin at step {STEPS - 4}: those of {STEPS - 4} earlier steps were deleted"
    assert any(says in warning for warning in analyze([tmp_path / "traces"]).warnings)
    assert not any("traces begin" in one for one in analyze([tmp_path / "whole"]).warnings)


def test_a_segment_that_is_deleted_while_it_is_read_is_no_problem(tmp_path):
    source = Source(tmp_path, TRACE_COLUMNS, "start-000", kept=4)
    assert source._replaced(tmp_path / "segment-start-000-00000.parquet", 0) is None
    assert not source.problems
