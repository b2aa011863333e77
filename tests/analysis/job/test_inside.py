"""What an operation's time is made of: Kineto's files of a run, joined with its rows."""

import gzip
import json
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from disttrain_cli.analysis.job.database import open_database
from disttrain_cli.analysis.job.inside import _uncovered, _without_inner, inside, kind_of
from disttrain_cli.spec.trace import mark, profile_file
from tests.analysis import synthetic
from tests.analysis.kineto.traces import span

OPS = [
    ("aten::mm", 0.5),
    ("aten::_scaled_dot_product_flash_attention", 0.25),
]  # shares of every pass


def write_profile(
    traces: Path, rows: list[dict], rank: int, device: bool, later_ns: int = 0, turns: int = 1
) -> None:
    """A profile that marks the passes of step 3, each in so many turns, and fills them with `OPS`,
    on a device or on the CPU's thread."""
    chosen = [
        row
        for row in rows
        if row["rank"] == rank and row["step"] == 3 and row["operation"] in ("forward", "backward")
    ]
    base = 10**18
    events = []
    for row, turn in product(chosen, range(turns)):
        dur = (row["end_ns"] - row["start_ns"]) / 1e3 / turns
        ts = (row["start_ns"] - base + later_ns) / 1e3 + turn * dur
        events.append(
            span(
                mark(row["operation"], 3, row["slot"], row["module"]),
                ts,
                dur,
                cat="user_annotation",
                pid=9,
                tid=9,
            )
        )
        events.append(span("aten::linear", ts, 0.75 * dur, pid=9, tid=9))
        at = ts
        for name, share in OPS:
            events.append(
                span(
                    name,
                    at,
                    share * dur,
                    cat="kernel" if device else "cpu_op",
                    pid=0 if device else 9,
                    tid=7 if device else 9,
                    args={"stream": 7, "device": 0} if device else {},
                )
            )
            at += share * dur
    events.append(span("disttrain load", 1.0, 1.0, cat="user_annotation", pid=9, tid=9))
    file = profile_file(traces, rank, "demo")
    file.parent.mkdir(exist_ok=True)
    document = {
        "baseTimeNanoseconds": base,
        "distributedInfo": {"rank": rank, "world_size": 6},
        "traceEvents": events,
    }
    file.write_bytes(gzip.compress(json.dumps(document).encode()))


@pytest.mark.slow
def test_shares_of_an_operation_by_kind(tmp_path, monkeypatch):
    """On a device, whose passes are in one turn on rank 1 and in three on rank 5."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    truth = synthetic.write(tmp_path / "traces", synthetic.Synthetic())
    for rank, turns in ((1, 1), (5, 3)):
        write_profile(tmp_path / "traces", truth.rows, rank, device=True, turns=turns)
    database = open_database([tmp_path])
    rows = {(row.unit, row.stage, row.operation): row for row in inside(database)}
    assert set(rows) == {
        (unit, 0, operation)
        for unit in ("llm", "generator")
        for operation in ("forward", "backward")
    }
    row = rows["llm", 0, "backward"]
    assert (row.ranks, row.count, row.module) == (1, 6, "llm")
    assert row.shares == {
        kind: pytest.approx(share, abs=0.01)
        for kind, share in (("gemm", 0.5), ("attention", 0.25), ("idle", 0.25))
    }
    assert (
        row.profiled_ms == pytest.approx(row.usual_ms)
        and row.top[0].name == "aten::mm"
        and row.top[0].count == 1
    )
    row = rows["generator", 0, "backward"]  # in three turns
    assert row.count == 6 and row.profiled_ms == pytest.approx(row.usual_ms, rel=1e-3)
    assert row.top[0].count == 3 and row.shares["gemm"] == pytest.approx(0.5, abs=0.01)
    assert any(
        "step 3 was also recorded by torch.profiler" in warning for warning in database.warnings
    )
    assert not any("clock" in warning and "rank" in warning for warning in database.warnings)


@pytest.mark.slow
def test_a_rank_whose_clocks_differ_is_named_and_still_joined(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    truth = synthetic.write(tmp_path / "traces", synthetic.Synthetic())
    for rank in (1, 3, 5):
        write_profile(tmp_path / "traces", truth.rows, rank, False, 40_000_000 if rank == 3 else 0)
    database = open_database([tmp_path])
    rows = inside(database)
    assert len(rows) == 6 and all(
        row.shares["gemm"] == pytest.approx(0.5, abs=0.01) for row in rows
    )
    assert [
        warning
        for warning in database.warnings
        if warning.startswith("rank 3: ") and "+40.0 ms" in warning
    ]


def test_runs_without_profiles_and_broken_ones(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    synthetic.write(tmp_path / "traces", synthetic.Synthetic(steps=2))
    database = open_database([tmp_path])
    assert inside(database) == [] and database.warnings == []
    file = profile_file(tmp_path / "traces", 1, "demo")
    file.parent.mkdir()
    file.write_bytes(b"not gzip")
    assert inside(database) == [] and any(
        "torch's profiles" in warning for warning in database.warnings
    )


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("ncclDevKernel_AllReduce_Sum_bf16", "communication"),
        ("c10d::send", "communication"),
        ("void pytorch_flash::flash_fwd_kernel", "attention"),
        ("aten::addmm", "gemm"),
        ("sm90_xmma_gemm_bf16", "gemm"),
        ("aten::convolution_backward", "convolution"),
        ("aten::native_layer_norm", "normalization"),
        ("Memcpy HtoD", "copies"),
        ("aten::copy_", "copies"),
        ("aten::gelu", "other"),
        ("aten::comm_x", "other"),
    ],
)
def test_kinds_by_name(name, kind):
    assert kind_of(name) == kind


spans = st.lists(st.tuples(st.integers(0, 40), st.integers(1, 20)), max_size=12).map(
    lambda found: sorted((start, start + length) for start, length in found)
)


@given(spans)
def test_uncovered_lengths_sum_to_the_union(found):
    starts, ends = (np.array([span[side] for span in found], np.int64) for side in (0, 1))
    assert int(_uncovered(starts, ends).sum()) == len(
        {at for start, end in found for at in range(start, end)}
    )


@given(st.integers(1, 30), st.lists(st.tuples(st.integers(0, 29), st.integers(1, 30)), max_size=10))
def test_lengths_without_inner_ones_sum_to_the_outer(length, inner):
    inside_ = []
    for start, more in sorted(inner):  # side by side, within the outer one
        if start < length and (not inside_ or start >= inside_[-1][1]):
            inside_.append((start, min(length, start + more)))
    found = sorted([(0, length), *inside_], key=lambda span: (span[0], -span[1]))
    starts, ends = (np.array([span[side] for span in found], np.int64) for side in (0, 1))
    assert int(_without_inner(starts, ends).sum()) == length
