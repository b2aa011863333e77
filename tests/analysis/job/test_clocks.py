"""Clocks that are known to be apart, found again from messages alone."""

import itertools

import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from disttrain_cli.analysis.analyze import analyze
from disttrain_cli.analysis.job.clocks import bounds_of, clocks_of
from disttrain_cli.analysis.job.database import open_database
from disttrain_cli.spec.trace import TRACE_COLUMNS
from tests.analysis import synthetic

SECOND = 10**9
HOSTS = ["host-a", "host-b", "host-c"]


def met(offsets, drifts, steps, delays, every_ns=SECOND):
    """Bounds of messages around a ring of hosts, both ways, and of a meeting at the end of every
    step."""
    messages, meetings, at_ns = [], [], {}
    delay = itertools.cycle(delays)

    def shown(host, true_ns):
        return round(true_ns + offsets[host] + drifts[host] * (true_ns - start) / 1e6)

    start = 1_700_000_000 * SECOND
    for step in range(steps):
        now = start + step * every_ns
        at_ns[step] = shown(0, now)
        for one, other in ((0, 1), (1, 2), (1, 0), (2, 1)):
            messages.append(
                (step, HOSTS[one], HOSTS[other], shown(other, now + next(delay)) - shown(one, now))
            )
        meet = now + every_ns // 2
        meetings += [
            (step, name, shown(host, meet - next(delay)), shown(host, meet + next(delay)))
            for host, name in enumerate(HOSTS)
        ]
    return bounds_of(messages, meetings), at_ns


@settings(deadline=None, max_examples=30)
@given(
    offsets=st.tuples(st.just(0), st.integers(-(10**12), 10**12), st.integers(-(10**7), 10**7)),
    delays=st.lists(st.integers(1_000, 5_000_000), min_size=3, max_size=20),
    steps=st.integers(1, 8),
)
def test_offsets_lie_within_the_error(offsets, delays, steps):
    bounds, at_ns = met(offsets, (0, 0, 0), steps, delays)
    for clock, offset in zip(clocks_of(HOSTS, bounds, at_ns), offsets, strict=True):
        # host-c is two hops away; float64 of 10^12 ns
        assert clock.error_us * 1e3 <= 2 * max(delays) + 300
        assert abs(1e3 * clock.offset_us - offset) <= 1e3 * clock.error_us + 300
        assert clock.drift_ppm == 0.0


@settings(deadline=None, max_examples=8)
@given(
    offset=st.integers(-(10**11), 10**11),
    drift=st.integers(20, 100).flatmap(lambda ppm: st.sampled_from([ppm, -ppm])),
    delays=st.lists(st.integers(1_000, 20_000), min_size=3, max_size=20),
)
def test_a_drift_is_found(offset, drift, delays):
    bounds, at_ns = met((0, offset, 0), (0, drift, 0), 100, delays)
    clock = clocks_of(HOSTS, bounds, at_ns)[1]
    assert clock.drift_ppm == pytest.approx(drift, abs=6.0)
    assert abs(1e3 * clock.offset_us - offset) <= 1e3 * clock.error_us + 1e3
    assert clock.applied


@settings(deadline=None, max_examples=20)
@given(delays=st.lists(st.integers(1_000, 5_000_000), min_size=3, max_size=20))
def test_clocks_that_contradict_nothing_are_left_alone(delays):
    bounds, at_ns = met((0, 0, 0), (0, 0, 0), 4, delays)
    assert not any(clock.applied for clock in clocks_of(HOSTS, bounds, at_ns))


def test_a_host_that_exchanges_nothing_cannot_be_tied():
    bounds, at_ns = met((0, 5000, 0), (0, 0, 0), 2, [1000])
    clock = clocks_of([*HOSTS, "alone"], bounds, at_ns)[-1]
    assert (clock.offset_us, clock.error_us, clock.applied) == (None, None, False)


def shifted(folder, shift_ns, tie=True):
    """A run of which ranks 3 to 5 are on a host whose clock shows more."""
    truth = synthetic.simulate(synthetic.Synthetic())
    for row in truth.rows:  # who sends to whom inside the LLM, whose stages are on both hosts
        way = row["operation"].rpartition("_")[2]
        upward = {
            ("receive_activation", 3): 1,
            ("receive_activation", 4): 2,
            ("send_gradient", 3): 1,
            ("send_gradient", 4): 2,
            ("send_activation", 1): 3,
            ("send_activation", 2): 4,
            ("receive_gradient", 1): 3,
            ("receive_gradient", 2): 4,
        }
        if tie and way in ("activation", "gradient"):
            row["peer"] = upward.get((row["operation"], row["rank"]), -1)
    synthetic.write(folder, synthetic.Synthetic())
    for rank in range(6):
        for file in (folder / f"rank-{rank:05d}").iterdir():
            file.unlink()
        shift = (
            {"host": "host-b", "by": shift_ns} if rank in (3, 4, 5) else {"host": "host-a", "by": 0}
        )
        rows = [
            row
            | {
                "host": shift["host"],
                "start_ns": row["start_ns"] + shift["by"],
                "end_ns": row["end_ns"] + shift["by"],
            }
            for row in truth.rows
            if row["rank"] == rank and (tie or row["operation"] != "step")
        ]
        synthetic.table(
            folder / f"rank-{rank:05d}" / "segment-00000.parquet", rows, synthetic.TRACE_COLUMNS
        )
    return truth


TIMES = ("start_ns", "end_ns")


def test_a_trace_with_a_clock_minutes_off_is_put_right(tmp_path, clean):
    minutes = 150 * SECOND
    shifted(tmp_path, minutes)
    found, straight = synthetic.judged(tmp_path), analyze([clean[0]])
    (reference, other) = found.clocks
    assert (reference.host, reference.offset_us, other.host, other.applied) == (
        "host-a",
        0.0,
        "host-b",
        True,
    )
    assert abs(other.offset_us - minutes / 1e3) <= other.error_us
    assert other.error_us <= 300  # a transfer takes 0.3 ms
    assert any("2.5 min ahead" in warning for warning in found.warnings)
    assert found.verdict.cause == straight.verdict.cause == "none"
    assert found.job.iteration_s == pytest.approx(
        straight.job.iteration_s, abs=2 * other.error_us / 1e6
    )
    (start,) = (
        open_database([tmp_path])
        .connection.execute("SELECT min(start_ns) FROM trace WHERE host = 'host-b'")
        .fetchone()
    )
    assert abs(start - 10**18) < SECOND


def test_a_clock_that_is_set_back_names_no_link_for_sure(tmp_path):
    """No one offset puts right what a clock shows before and after."""
    shifted(tmp_path, 0)
    half = None
    for file in sorted(tmp_path.glob("rank-0000[345]/*")):
        rows = pq.read_table(file).to_pylist()
        half = half or rows[len(rows) // 2]["start_ns"]
        late = [
            {name: row[name] - SECOND // 2 * (row[name] > half) for name in TIMES} for row in rows
        ]
        synthetic.table(
            file, [row | times for row, times in zip(rows, late, strict=True)], TRACE_COLUMNS
        )
    found = synthetic.judged(tmp_path).verdict
    assert found.cause in ("none", "unknown") or found.confidence < 0.6


def test_hosts_that_cannot_be_tied_are_named(tmp_path):
    shifted(tmp_path, 5 * SECOND, tie=False)
    found = open_database([tmp_path])
    assert found.clocks[1].offset_us is None
    assert any(
        "no message ties the clock of host 'host-b'" in warning for warning in found.warnings
    )


def test_one_host_has_no_clocks_to_compare(clean):
    assert analyze([clean[0]]).clocks == []
