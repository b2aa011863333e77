"""Rows of passes that take turns: as long as their turns, one after the other."""

from pathlib import Path

import pyarrow.parquet as pq
import pytest

from disttrain_cli.runtime.watching.turns import Turns
from tests.runtime.watching.simulated_gpu import Gpu, traced

MS = 10**6
#: Slot, module and duration in ms of every turn: two layers of one module, one of another.
TURNS = [(2, "llm", 30), (4, "llm", 50), (2, "llm", 7), (4, "llm", 11), (4, "encoder", 5)]
ROWS = [(2, "llm", 37), (4, "llm", 61), (4, "encoder", 5)]


@pytest.mark.parametrize("device", [False, True])
def test_rows_are_as_long_as_their_turns(gpu: Gpu, tmp_path: Path, device: bool) -> None:
    tracer = traced(gpu, tmp_path, device)
    begun = []
    tracer.begin = lambda *place: begun.append(place)  # type: ignore[method-assign, assignment]
    first = tracer.mark()
    turns = Turns(tracer, "weights")
    for slot, module, ms in TURNS:
        done = turns.timed(slot, module)
        if device:
            gpu.work(ms * MS)
        else:
            gpu.host_ns += ms * MS
        done()
    for slot, module, start, end in turns.rows():
        tracer.record("weights", start, end, slot=slot, module=module)
    tracer.record("reduce", first)
    gpu.synchronize()
    tracer.anchor()
    gpu.host_ns += MS
    tracer.end_step()
    tracer.close()
    *rows, whole = pq.read_table(tmp_path / "rank-00000").to_pylist()
    assert [(row["slot"], row["module"]) for row in rows] == [row[:2] for row in ROWS]
    assert [row["end_ns"] - row["start_ns"] for row in rows] == pytest.approx(
        [ms * MS for *_, ms in ROWS], abs=20_000
    )
    assert [row["start_ns"] for row in rows[1:]] == [row["end_ns"] for row in rows[:-1]]
    assert rows[0]["start_ns"] == pytest.approx(whole["start_ns"], abs=20_000)
    assert rows[-1]["end_ns"] == pytest.approx(whole["end_ns"], abs=20_000)
    assert begun == [("weights", slot, module) for slot, module, _ in TURNS]


def test_nothing_to_do_has_no_rows(gpu: Gpu, tmp_path: Path) -> None:
    assert not list(Turns(traced(gpu, tmp_path), "weights").rows())
