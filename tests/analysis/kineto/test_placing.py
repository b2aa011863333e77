"""Ranks and clocks of files: merged traces are split where they tell how, and times that count from
elsewhere moved."""

import gzip
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from disttrain_cli.analysis.analyze import analyze, ask
from disttrain_cli.analysis.kineto.jobs import SINCE_1970_NS, TraceFile, align, choose_job
from disttrain_cli.analysis.kineto.ranks import label_in, numbers_of
from tests.analysis.kineto import traces
from tests.cases import first_fast

ARRIVALS = [[400, 400, 430], [400, 550, 450], [410, 420, 400]]


def same(found):
    """What must not depend on how the ranks are stored."""
    return found.ranks, found.collectives, found.kernels, found.verdict, found.stragglers


@pytest.fixture(scope="module")
def apart(tmp_path_factory):
    return same(analyze(traces.job(tmp_path_factory.mktemp("apart"), ARRIVALS)))


def rewrite(path, change):
    """The same file after `change` of its document."""
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))


def relative(base_us, known=True):
    """Makes times count from `base_us`, and says so where that is `known`."""

    def change(document):
        for event in document["traceEvents"]:
            event["ts"] -= base_us
        if known:
            document["baseTimeNanoseconds"] = 1000 * base_us

    return change


def merged(path, rank_events, **more):
    events = [event for events in rank_events for event in events]
    return traces.write(path, {"schemaVersion": 1, "traceEvents": events, **more})


def ranks_of(folder):
    """The events of every rank of the job, as its own files hold them; ids of kernels and processes
    repeat."""
    return [json.loads(path.read_text())["traceEvents"] for path in traces.job(folder, ARRIVALS)]


def named(event, name):
    return {
        "ph": "M",
        "name": "process_name",
        "pid": event["pid"],
        "tid": 0,
        "args": {"name": name},
    }


@pytest.mark.parametrize("tail", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_times_that_count_from_different_moments_are_set_on_one_clock(tmp_path, apart, tail):
    for rank, path in enumerate(traces.job(tmp_path, ARRIVALS)):
        rewrite(path, relative(traces.BASE_US - 3_600_000_000 * 5 * rank))
        if not tail:  # as Kineto has written since 2025: before the events
            rewrite(path, lambda document: document.update(traceEvents=document.pop("traceEvents")))
    found = analyze([tmp_path])
    assert same(found) == apart
    assert not any("clock" in warning or "left out (" in warning for warning in found.warnings)


@given(
    st.lists(
        st.tuples(st.integers(0, 3 * 10**18 - 1), st.integers(-(10**18), 10**18)),
        min_size=2,
        max_size=6,
    )
)
def test_moments_keep_their_distances_to_the_nanosecond(tmp_path_factory, known):
    files = [
        TraceFile(
            number, tmp_path_factory.getbasetemp(), number, None, base_ns, first_ns, first_ns + 5, 1
        )
        for number, (base_ns, first_ns) in enumerate(known)
    ]
    assert align(files) == []
    moments = [base_ns + first_ns for base_ns, first_ns in known]
    (zero,) = {moment - file.first_ns for moment, file in zip(moments, files, strict=True)}
    whole = any(base_ns and first_ns >= SINCE_1970_NS for base_ns, first_ns in known)
    assert zero == (min(base_ns for base_ns, _ in known) if whole else 0)
    assert all(file.last_ns - file.first_ns == 5 for file in files)


def test_no_nanosecond_is_lost_on_the_way_to_one_clock(tmp_path):
    for rank, base_ns in enumerate((1_700_000_000_000_000_123, 1_600_000_000_000_000_120)):
        event = traces.span(
            "k", 100_000_000_000_000.5 * (rank == 1), 0.25, cat="kernel", pid=0, tid=7
        )
        traces.write(
            tmp_path / f"rank{rank}.json", {"baseTimeNanoseconds": base_ns, "traceEvents": [event]}
        )
    rows = ask([tmp_path], "SELECT rank, start_ns, duration_ns FROM events ORDER BY rank").rows
    assert rows == [(0, 1_700_000_000_000_000_123, 250), (1, 1_700_000_000_000_000_620, 250)]


@pytest.mark.slow
@pytest.mark.parametrize("base_ns", first_fast([1_790_000_000_000_000_000, None]))
def test_times_count_from_1970_where_files_tell_from_when_theirs_do(tmp_path, base_ns):
    """Also where all tell the same moment, as ranks of one host do."""
    for path in traces.job(tmp_path, ARRIVALS):

        def count(document):
            relative(traces.BASE_US)(document)
            document["baseTimeNanoseconds"] = base_ns

        rewrite(path, count)
    found = analyze([tmp_path])
    first = ask([tmp_path], "SELECT min(start_ns) FROM events").rows[0][0]
    assert (first >= 1_790_000_000_000_000_000) == (base_ns is not None)
    assert found.job.recorded_at == ("2026-09-21 14:13:20 UTC" if base_ns else None)


def test_files_without_a_base_among_others_count_from_1970(tmp_path, apart):
    first, *_ = traces.job(tmp_path, ARRIVALS)
    rewrite(first, relative(traces.BASE_US))
    found = analyze([tmp_path])
    assert same(found) == apart
    assert any(
        "rank1.json and 1 more file without baseTimeNanoseconds" in warning
        and "count from 1970" in warning
        for warning in found.warnings
    )


def test_files_whose_times_count_from_nobody_knows_when_are_not_left_out(tmp_path, apart):
    first, second, third = traces.job(tmp_path, ARRIVALS)
    for path in (first, second):
        rewrite(path, relative(traces.BASE_US - 10**9 * (path == second)))
    rewrite(third, relative(traces.BASE_US - 77_000, known=False))
    found = analyze([tmp_path])
    assert len(found.ranks) == 3 and [row.collective_wait_us for row in found.ranks] == [
        row.collective_wait_us for row in apart[0]
    ]
    assert any(
        "rank2.json without baseTimeNanoseconds" in warning and "unknown" in warning
        for warning in found.warnings
    )


@pytest.mark.parametrize(
    "form",
    [
        "arguments",
        *(pytest.param(form, marks=pytest.mark.slow) for form in ("places", "ids", "names")),
    ],
)
def test_a_merged_file_gives_what_the_files_of_its_ranks_give(tmp_path, apart, form):
    ranks = ranks_of(tmp_path / "apart")
    for rank, events in enumerate(ranks):
        for event in events:
            if form == "ids":
                event["pid"] = f"[rank {rank}] {event['pid']}"
            elif form == "places":
                event["pid"] = f"[TP{rank % 2:02d}-DP{rank // 2:02d}] {event['pid']}"
            else:
                event["pid"] += 1_000_000 * rank
            if form == "arguments":
                event["args"] = event.get("args", {}) | {"rank": rank}
        if form == "names":
            events += [named(event, f"[rank {rank}] python3") for event in events[:5]]
    path = merged(
        tmp_path / "merged" / "all.json", ranks, distributedInfo={"rank": 0, "world_size": 3}
    )
    found = analyze([path])
    assert same(found) == apart
    (said,) = (
        warning for warning in found.warnings if warning.startswith("all.json contains 3 ranks, ")
    )
    assert ("numbered in the order" in said) == (form == "places")
    rows = ask([path], "SELECT rank, kept, world_size FROM files ORDER BY rank").rows
    assert rows == [(rank, True, 3) for rank in range(3)]


@pytest.mark.slow
def test_what_names_no_rank_in_a_merged_file_is_counted(tmp_path, apart):
    ranks = ranks_of(tmp_path / "apart")
    for rank, events in enumerate(ranks):
        for event in events:
            event["pid"] = f"rank{rank}_{event['pid']}"
    other = traces.kernel("lost", traces.BASE_US, 5, 9)
    span = traces.span("PyTorch Profiler (0)", 0, 9, cat="Trace", pid="Spans", tid=1)
    found = analyze([merged(tmp_path / "all.json", [*ranks, other, [span]])])
    assert same(found) == apart
    assert any(
        "2 kernels, launches and operators of all.json name no rank" in warning
        for warning in found.warnings
    )


def test_ranks_of_which_nothing_but_names_was_recorded_do_not_hide_the_others(tmp_path):
    events = traces.events([400, 400])
    for event in events:
        event["pid"] = f"rank3_{event['pid']}"
    empty = {
        "ph": "X",
        "name": "impossible",
        "pid": "rank1_100",
        "tid": 1,
        "ts": traces.BASE_US,
        "dur": -5,
    }
    found = analyze([merged(tmp_path / "all.json", [events, [empty]])])
    assert [row.rank for row in found.ranks] == [3]


@pytest.mark.slow
def test_memory_of_merged_ranks_is_kept_apart(tmp_path):
    ranks = ranks_of(tmp_path / "apart")
    for rank, events in enumerate(ranks):
        events.append(
            {
                "ph": "i",
                "name": "[memory]",
                "pid": 100,
                "tid": 1,
                "ts": traces.BASE_US,
                "args": {"Total Allocated": 2**30 * (rank + 1), "Device Type": 1, "Device Id": 0},
            }
        )
        for event in events:
            event["pid"] = f"rank {rank}: {event['pid']}"
    found = analyze([merged(tmp_path / "all.json", ranks)])
    assert [row.memory_peak_gib for row in found.ranks] == [1, 2, 3]


@pytest.mark.slow
def test_several_ranks_that_nothing_tells_apart_are_said(tmp_path):
    ranks = ranks_of(tmp_path / "apart")
    for rank, events in enumerate(ranks):
        for event in events:
            event["pid"] += 10 * rank * (event["pid"] == 100)  # the devices' ids are all alike
        # three names for one process tell nothing
        events += [named(events[1] | {"pid": 0}, f"rank {rank}")]
    found = analyze([merged(tmp_path / "all.json", ranks)])
    assert len(found.ranks) == 1
    assert any(
        "all.json seems to contain several ranks (3 processes" in warning
        for warning in found.warnings
    )
    assert not any("missing" in warning or "numbered" in warning for warning in found.warnings)
    assert (found.verdict.cause, found.verdict.confidence) == ("unknown", 0)
    assert "read as one" in found.verdict.headline
    events = traces.events([400, 400])
    for event in events:
        event["args"] = event.get("args", {}) | {"rank": event["ts"] % 2}
    found = analyze([merged(tmp_path / "mixed.json", [events])])
    assert any(
        "mixed.json seems to contain several ranks (their numbers" in warning
        for warning in found.warnings
    )


@pytest.mark.slow
def test_one_rank_is_not_taken_for_several(tmp_path):
    events = traces.events([400, 400])
    events += [named(events[1], "rank 5: python3"), named({"pid": "Spans"}, "rank 5")]
    path = traces.write(tmp_path / "trace.json", {"traceEvents": events})
    found = analyze([path])
    assert [row.rank for row in found.ranks] == [5]
    assert not any(
        "several ranks" in warning or "numbered" in warning for warning in found.warnings
    )
    for event in events[3:9]:  # some events of a rank speak of others
        event["args"] = event.get("args", {}) | {"rank": 1 + (event["ts"] % 2)}
    assert len(analyze([traces.write(path, traces.document(events, 5, 8))]).ranks) == 1


@pytest.mark.parametrize(
    ("text", "label"),
    [
        ("[rank 3] Spans", 3),
        ("rank3_4711", 3),
        ("Rank 12", 12),
        ("[WR03] 9", 3),
        ("[TP02] 9", 2),
        ("[TP-2] 9", 2),
        ("[TP01-DP00] 9", (("DP", 0), ("TP", 1))),
        ("python3", None),
        ("4711", None),
        ("frank3", None),
        ("GPU 3", None),
        ("rank 99999999", None),
        ("[TP] x", None),
    ],
)
def test_labels_of_ranks(text, label):
    assert label_in(text) == label


def test_labels_are_numbered_the_last_written_slowest():
    labels = [label_in(f"[TP{tp:02d}-DP{dp:02d}] 1") for dp in range(2) for tp in range(2)]
    assert [numbers_of(labels)[label] for label in labels] == [0, 1, 2, 3]
    assert numbers_of([7, 3]) == {3: 3, 7: 7}


def files_of(names, **more):
    """Files of one moment that say nothing of their ranks, in the order of the names."""
    return [
        TraceFile(number, Path(name), None, None, 0, 10**18, 10**18 + 100 + number, 9, **more)
        for number, name in enumerate(names)
    ]


@pytest.mark.parametrize(
    ("names", "ranks"),
    [
        ([f"175.12-TP-{rank}.trace.json" for rank in (0, 1, 10, 11, 2)], [0, 1, 10, 11, 2]),
        (["h100-gpu8-rank1.json", "h100-gpu8-rank0.json"], [1, 0]),
        (["job-worker-0_PID9.json", "job-worker-0_PID10.json"], [0, 1]),
        (["job-worker-1_PID9.json", "job-worker-0_PID10.json"], [1, 0]),
        (["node0/rank0.json", "node0/rank1.json", "node1/rank0.json"], [0, 1, 2]),
        (["n_local_rank0_rank4.json", "n_local_rank1_rank5.json"], [4, 5]),
        (["a-2/local_rank0.json", "a-10/local_rank0.json", "a-2/local_rank1.json"], [0, 2, 1]),
        (["dp0_pp0_tp1_rank1.9.json", "dp0_pp0_tp0_rank0.8.json"], [1, 0]),
        (["x-TP-1-PP-0.json", "x-TP-0-PP-1.json", "x-TP-0-PP-0.json"], [1, 2, 0]),
        (["host-10.json", "host-9.json", "host-11.json"], [1, 0, 2]),
        (["gpu0/trace.json", "gpu1/trace.json"], [0, 1]),
        ([f"rank[{rank}].json" for rank in (2, 0, 1)], [2, 0, 1]),
        ([f"step_30_r{rank}_v2.json" for rank in (3, 1)], [3, 1]),
        (["n0_r0.json", "n0_r1.json", "n1_r0.json", "n1_r1.json"], [0, 1, 2, 3]),
        (["rank3/trace.json", "rank10/trace.json", "other/trace.json"], [3, 10, 0]),
        (["llama_tp8.json"], [0]),
        (["tp8_pp2/a.json", "tp8_pp2/b.json"], [0, 1]),
    ],
)
def test_ranks_are_taken_from_names_where_these_tell_files_apart(names, ranks):
    files = files_of(names)
    said = choose_job(files, [])
    assert [file.rank for file in files] == ranks and all(file.kept for file in files)
    assert not any("left out" in text for text in said)


def test_names_may_number_the_ranks_of_a_group():
    files = files_of([f"x-TP-{place}.json" for place in (1, 0)])
    choose_job(files, [6, 7])
    assert [file.rank for file in files] == [7, 6]
    choose_job(numbered := files_of(["a.json", "b.json"]), [6, 7])
    assert [file.rank for file in numbered] == [6, 7]
    choose_job(files := files_of(["rank0.json", "rank1.json"]), [0, 1, 2])
    assert [file.rank for file in files] == [0, 1]


def test_files_of_other_moments_may_be_of_one_rank():
    files = files_of([f"worker{rank}_step_{step}.json" for step in (9, 10) for rank in (0, 1)])
    for file in files[2:]:
        file.first_ns, file.last_ns = file.first_ns + 10**10, file.last_ns + 10**10
    choose_job(files, [])
    assert [(file.rank, file.kept) for file in files] == [
        (0, False),
        (1, False),
        (0, True),
        (1, True),
    ]


@pytest.mark.slow
def test_copies_of_files_are_no_other_ranks(tmp_path):
    """Packed beside unpacked; ranks of one moment and length are not taken for copies."""
    for rank, events in enumerate(ranks_of(tmp_path / "apart")):
        text = json.dumps({"traceEvents": events})
        traces.write(tmp_path / "job" / f"h-gpu8-rank{rank}.json", text)
        (tmp_path / "job" / f"h-gpu8-rank{rank}.json.gz").write_bytes(gzip.compress(text.encode()))
        traces.write(tmp_path / "pods" / f"worker-0_PID{rank + 9}.json", text)
    for folder, copies in (("job", 3), ("pods", 0)):
        found = analyze([tmp_path / folder])
        assert [row.rank for row in found.ranks] == [0, 1, 2]
        assert sum("again; left out" in text for text in found.warnings) == copies


def test_processes_that_each_take_themselves_for_rank_0_are_told_apart():
    files = files_of([f"worker_rank{rank}.json" for rank in (2, 1, 0)])
    for file in files:
        file.rank, file.world_size = 0, 1
    choose_job(files, [])
    assert [(file.rank, file.kept) for file in files] == [(2, True), (1, True), (0, True)]
    merged = [file for name in ("a.json", "b.json") for file in files_of([name, name])]
    for number, file in enumerate(merged):
        file.rank, file.last_ns = number % 2, file.last_ns + number
    choose_job(merged, [])
    assert [file.rank for file in merged] == [0, 1, 2, 3]


@pytest.mark.slow
@pytest.mark.parametrize("same_process", first_fast([True, False]))
def test_devices_of_one_process_are_ranks(tmp_path, apart, same_process):
    """Kernels go to the device, with the calls and operators that they came from; what else the
    host did is of all."""
    merged_events = []
    for device, events in enumerate(ranks_of(tmp_path / "apart")):
        for event in events:
            args = event.get("args", {})
            if "correlation" in args:
                args["correlation"] += 10_000 * device
            if event["pid"] == 0:
                args["device"] = device
                event["pid"] = 0 if same_process else device
            if event["cat"] != "user_annotation" or not device:
                merged_events.append(event)
    path = merged(tmp_path / "all.json", [merged_events])
    found = analyze([path])
    verdict, expected = found.verdict, apart[3]
    assert (verdict.cause, verdict.place.rank) == (expected.cause, expected.place.rank)
    assert found.ranks[1].collective_wait_us == apart[0][1].collective_wait_us
    assert [row.compute_us for row in found.ranks] == [row.compute_us for row in apart[0]]
    assert "all.json contains 3 devices: each is read as a rank" in found.warnings
    document = json.loads(path.read_text())
    document["distributedInfo"] = {"rank": 1, "world_size": 8}
    path.write_text(json.dumps(document))
    assert [row.rank for row in analyze([path]).ranks] == [1]


@pytest.mark.parametrize(
    ("numbered_alike", "delay_us"), first_fast([(True, 400), (True, 0), (False, 400)])
)
def test_processes_that_launch_on_devices_of_their_own_are_ranks(
    tmp_path, apart, numbered_alike, delay_us
):
    """Where they number their launches alike, the times must tell which launched what: delays of
    all kernels hide it."""
    ranks = ranks_of(tmp_path / "apart")
    for rank, events in enumerate(ranks):
        for event in events:
            args = event.get("args", {})
            if "correlation" in args:
                args["correlation"] += 0 if numbered_alike else 10_000 * rank
            if event["pid"] == 0:
                event["pid"] = args["device"] = 7 - rank
                event["ts"] += delay_us
            else:
                event["pid"] += rank
            event["ts"] += 50 * (rank if event["ts"] < traces.BASE_US + 1000 else 2 - rank)
    path = merged(
        tmp_path / "all.json", ranks, distributedInfo={"rank": 0, "world_size": len(ranks)}
    )
    found = analyze([path])
    assert not any("missing" in warning for warning in found.warnings)
    if numbered_alike and delay_us:
        assert len(found.ranks) == 1 and found.verdict.cause == "unknown"
        return
    assert "all.json contains 3 devices: each is read as a rank" in found.warnings
    launched = ask(
        [path],
        "SELECT rank, list_sort(list(DISTINCT process)) FROM events GROUP BY rank ORDER BY rank",
    ).rows
    assert launched == [(5, ["102", "5"]), (6, ["101", "6"]), (7, ["100", "7"])]


@pytest.mark.slow
def test_devices_that_have_processes_of_their_own_are_ranks(tmp_path):
    """As XLA names them."""
    events = []
    for device, own in enumerate(ranks_of(tmp_path / "apart")):
        kernels = [event for event in own if event["cat"] == "kernel"]
        for event in kernels:
            event["pid"] = device + 1
            del event["args"]["device"]
        events += [*kernels, named(kernels[0], f"/device:GPU:{device}")]
    host = {"ph": "X", "name": "main", "pid": 701, "tid": 1, "ts": traces.BASE_US, "dur": 9}
    events += [host, named(host, "/host:CPU")]
    first = merged(tmp_path / "hosts" / "host-2.json", [events])
    assert [row.rank for row in analyze([first]).ranks] == [0, 1, 2]
    merged(tmp_path / "hosts" / "host-10.json", [events[:-1]])
    assert [row.rank for row in analyze([first.parent]).ranks] == list(range(6))


@pytest.mark.slow
def test_ranks_that_collectives_name_and_no_file_holds_are_missing(tmp_path):
    members = {"Process Group Name": "0", "Process Group Ranks": "[0, 1, 2, 3]", "Group size": 4}
    for rank, events in enumerate(ranks_of(tmp_path / "apart")):
        for event in events:
            if event["name"] == traces.ALL_REDUCE:
                event["args"] |= members
        traces.write(tmp_path / "job" / f"rank{rank}.json", {"traceEvents": events})
    found = analyze([tmp_path / "job"])
    assert any(text.startswith("1 of 4 ranks is missing (3)") for text in found.warnings)
    evidence = {row.what: row.value for row in found.verdict.evidence}
    assert evidence["ranks with traces"] == 0.75
    assert found.verdict.confidence < analyze([tmp_path / "apart"]).verdict.confidence
