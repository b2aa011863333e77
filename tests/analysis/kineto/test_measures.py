"""Measures of Kineto traces: the published figures of real ones, and known ones of made ones."""

import json
import re
from decimal import Decimal
from pathlib import Path

import pytest

from disttrain_cli.analysis.analyze import analyze, ask
from tests.analysis.kineto import traces
from tests.cases import first_fast

DLRM = Path(__file__).parents[4] / "shared" / "data" / "traces" / "dlrm-8rank"
needs_dlrm = pytest.mark.skipif(not DLRM.is_dir(), reason="needs the shared traces")
#: idle, compute, non-compute, span in µs, overlap in %, wait in the collectives in µs;
#: HolisticTraceAnalysis 0.6.1.
PUBLISHED = [
    (6419, 1034, 5556, 13009, 4.50, 5580),
    (6428, 1246, 11075, 18749, 2.47, 11125),
    (7046, 1068, 3236, 11350, 7.88, 3280),
    (8145, 1240, 9468, 18853, 3.31, 9571),
    (8887, 1126, 6576, 16589, 0.56, 6370),
    (9121, 1041, 6230, 16392, 0.64, 6041),
    (7051, 1051, 3308, 11410, 7.56, 3342),
    (8308, 1059, 1600, 10967, 9.51, 1534),
]


@needs_dlrm
def test_the_published_table_of_dlrm_and_its_straggler():
    found = analyze([DLRM])
    assert [
        (
            row.idle_us,
            row.compute_us,
            row.non_compute_us,
            row.span_us,
            round(row.overlap_pct, 2),
            row.collective_wait_us,
        )
        for row in found.ranks
    ] == PUBLISHED
    assert [row.last_to_arrive for row in found.ranks] == [0, 0, 0, 0, 1, 2, 0, 5]
    assert (
        found.verdict.cause == "worker"
        and found.verdict.place.rank == 7
        and 0.5 < found.verdict.confidence < 1
    )
    assert len(found.collectives) == 8 and found.job.unclassified_fraction == 0
    lost = found.stragglers
    assert lost.ideal_s + sum(lost.lost_s.values()) == pytest.approx(traces.mean_step_s([DLRM]))


def test_a_made_job_gives_the_times_it_was_made_of(tmp_path):
    found = analyze(traces.job(tmp_path, [[400, 400, 400], [400, 550, 450]]))
    job, first, second = found.job, *found.ranks
    assert (
        job.ranks,
        job.steps,
        job.steps_measured,
        job.warmup_steps_excluded,
        job.iteration_s,
    ) == (2, 3, 2, 1, 1e-3)
    # from the second step on: GEMMs of 300 µs from 10 on, collectives from 400 to 570 and 470, span
    # to the last end
    assert (first.span_us, first.compute_us, first.communication_us) == (1460, 600, 240)
    assert first.exposed_wait_us == 200
    assert (first.idle_us, first.non_compute_us, first.exposed_communication_us) == (
        1460 - 840,
        240,
        40,
    )
    assert (first.collective_wait_us, first.last_to_arrive) == (200, 0)
    assert (second.collective_wait_us, second.last_to_arrive, second.communication_us) == (0, 2, 40)
    assert [
        (row.name, row.step, row.last_rank, row.longest_wait_us, row.transfer_us)
        for row in found.collectives
    ] == [("all_reduce", 1, 1, 150, 20), ("all_reduce", 2, 1, 50, 20)]
    assert job.exposed_communication_fraction == pytest.approx(80 / (2000 * 2))
    assert any("first of 3 steps counts as warm-up" in warning for warning in found.warnings)
    assert {row.name: (row.kind, row.count, row.total_us) for row in found.kernels} == {
        traces.GEMM: ("compute", 4, 1200),
        traces.ALL_REDUCE: ("communication", 4, 280),
    }


@pytest.mark.slow
def test_times_of_a_fraction_of_a_microsecond_are_kept_exactly(tmp_path):
    starts = ["1694128201435418.123", "5512345678901.457", "12.0005"]
    rows = ", ".join(
        f'{{"ph": "X", "cat": "kernel", "name": "k{number}", "ts": {start}, "dur": 0.5}}'
        for number, start in enumerate(starts)
    )
    for text in (f"[{rows}]", f'[{rows}, {{"ph": "X", "name": "bad \\x", "ts": 1}}]'):
        path = traces.write(tmp_path / "rank0.json", text)
        table = ask(
            [path],
            "SELECT start_ns, duration_ns FROM events WHERE starts_with(name, 'k') ORDER BY name",
        )
        assert table.rows == [(int(Decimal(start) * 1000), 500) for start in starts]


def test_begin_and_end_marks_are_paired_like_a_stack(tmp_path):
    marks = [
        ("B", "outer", 0),
        ("B", "inner", 10),
        ("E", "inner", 20),
        ("B", "inner", 20),
        ("E", None, 35),
        ("E", "outer", 50),
        ("B", "open", 60),
        ("E", "lost", -5),
    ]
    found = [
        {"ph": ph, "pid": 1, "tid": 1, "ts": 100 + at} | ({"name": name} if name else {})
        for ph, name, at in marks
    ]
    found += [
        {"ph": "B", "name": "elsewhere", "pid": 1, "tid": 2, "ts": 105},
        {"ph": "E", "pid": 1, "tid": 2, "ts": 107},
    ]
    path = traces.write(tmp_path / "rank0.json", found)
    rows = ask(
        [path], "SELECT name, start_ns // 1000 - 100, duration_ns // 1000 FROM events ORDER BY ALL"
    ).rows
    assert rows == [("elsewhere", 5, 2), ("inner", 10, 10), ("inner", 20, 15), ("outer", 0, 50)]
    assert any(
        "2 begin or end marks are unmatched" in warning for warning in analyze([path]).warnings
    )


@pytest.mark.slow
def test_clocks_that_differ_are_repaired_by_the_ends_of_collectives(tmp_path):
    arrivals = [[400, 500, 400, 430], [400, 450, 420, 400], [400, 400, 480, 410]]
    right = analyze(traces.job(tmp_path / "right", arrivals))
    wrong = analyze(traces.job(tmp_path / "wrong", arrivals, ahead=[0, 120_000_000, -3000]))
    assert [row.collective_wait_us for row in wrong.ranks] == [
        row.collective_wait_us for row in right.ranks
    ]
    assert any("rank 1: +120000.000 ms ± 0.000 ms" in warning for warning in wrong.warnings)
    assert not any("clock" in warning for warning in right.warnings)


def test_groups_that_the_arguments_name_are_kept_apart(tmp_path):
    def collective(number, start, group, ranks):
        return traces.kernel(
            "ncclDevKernel_Generic(…)",
            start,
            1000 - start,
            number,
            stream=20,
            **{
                "Collective name": "all_gather",
                "Process Group Name": group,
                "Process Group Ranks": ranks,
                "Group size": 2,
            },
        )

    for rank, (tensor, data) in enumerate([(100, 110), (160, 130), (300, 150), (340, 210)]):
        near = ("1", "[0, 1]") if rank < 2 else ("2", "[2, 3]")
        far = ("3", "[0, 2]") if rank % 2 == 0 else ("4", "[1, 3]")
        traces.write(
            tmp_path / f"r{rank}.json",
            traces.document(collective(1, tensor, *near) + collective(2, data, *far), rank, 4),
        )
    found = analyze([tmp_path])
    waits = ask(
        [tmp_path], "SELECT rank, process_group, wait_ns // 1000 FROM waits ORDER BY ALL"
    ).rows
    assert waits == [
        (0, "1", 60),
        (0, "3", 40),
        (1, "1", 0),
        (1, "4", 80),
        (2, "2", 40),
        (2, "3", 0),
        (3, "2", 0),
        (3, "4", 0),
    ]
    assert {row.name for row in found.collectives} == {"all_gather"}


def test_memory_is_the_most_that_was_allocated_on_the_device(tmp_path):
    def change(at, kind, allocated):
        return {
            "ph": "i",
            "name": "[memory]",
            "cat": "cpu_instant_event",
            "pid": 1,
            "tid": 1,
            "ts": at,
            "s": "t",
            "args": {
                "Total Allocated": allocated,
                "Total Reserved": 2 * allocated,
                "Device Type": kind,
                "Device Id": 0,
            },
        }

    path = traces.write(
        tmp_path / "rank0.json",
        traces.document(
            [
                *traces.events([400]),
                change(1, 1, 2**30),
                change(2, 1, 3 * 2**30),
                change(3, 0, 2**40),
                change(4, 1, 5),
            ]
        ),
    )
    assert analyze([path]).ranks[0].memory_peak_gib == 3


def test_a_trace_without_kernels_is_of_operators(tmp_path):
    found = [
        {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 1, "tid": 1, "ts": 0, "dur": 60},
        {"ph": "X", "cat": "cpu_op", "name": "aten::mul", "pid": 1, "tid": 1, "ts": 10, "dur": 10},
        traces.span("gloo:all_reduce", 80, 20, cat="user_annotation", pid=1, tid=2),
    ]
    analysis = analyze([traces.write(tmp_path / "rank0.json", traces.document(found))])
    row = analysis.ranks[0]
    assert (row.span_us, row.compute_us, row.communication_us, row.idle_us) == (100, 60, 20, 20)
    assert any("contain no kernels" in warning for warning in analysis.warnings)
    assert analysis.kernels[0].name == "aten::mm"


@pytest.mark.slow
def test_a_device_is_not_idle_while_it_runs_kernels_of_a_step_that_is_left_out(tmp_path):
    """The device is 20 ms behind its host: the first step's kernels run on while the second one's
    copies do."""
    at, late = traces.BASE_US, 20_000
    found = []
    for step in range(3):
        begins = at + 35_000 * step
        found.append(traces.span(f"ProfilerStep#{step}", begins, 35_000, cat="user_annotation"))
        for place in range(2):
            launch, kernel = traces.kernel(
                traces.GEMM, begins + late + 17_500 * place, 17_400, 10 * step + place
            )
            found += [launch | {"ts": begins + 10 + place}, kernel]
        found += traces.kernel(
            "Memcpy HtoD (Pinned -> Device)",
            begins + 200,
            100,
            10 * step + 5,
            stream=9,
            cat="gpu_memcpy",
        )
    row = analyze([traces.write(tmp_path / "rank0.json", traces.document(found))]).ranks[0]
    assert row.span_us == 3 * 35_000 + late - 35_200 - 100
    assert row.idle_us == 100 * 5 and row.compute_us == row.span_us - row.idle_us


def test_lengths_and_times_that_are_no_numbers_are_left_out_and_counted(tmp_path):
    kernel = (
        '{"ph": "X", "cat": "kernel", "name": "ampere_sgemm", "pid": 0, "tid": 7, "args":'
        ' {"stream": 7}'
    )
    times = [f'"ts": {10 * number}, "dur": 5' for number in range(4)]
    times += [f'"ts": 100, "dur": {length}' for length in ("NaN", "Infinity", "null", "1e400")]
    times += ['"ts": 100', '"dur": 3', '"ts": NaN, "dur": 1']
    events = ",\n".join(f"{kernel}, {time}}}" for time in times)
    found = analyze([traces.write(tmp_path / "rank0.json", f"[{events}]")])
    assert found.kernels[0].count == 4 and found.ranks[0].span_us == 35
    assert "7 events of rank0.json are malformed and left out" in found.warnings


def test_json_of_the_analysis_is_plain(tmp_path):
    document = analyze(traces.job(tmp_path, [[400, 400]])).to_json()
    assert json.loads(json.dumps(document, allow_nan=False))["format"] == "kineto"


def _of(found, name=traces.GEMM):
    """Kernels of a name, from the first to the last."""
    return [event for event in found if event["name"] == name]


def _no_time(found):
    _of(found)[4].update(ts=0, dur=0)


def _lost_start(found):
    _of(found)[4]["ts"] = 0


def _another_clock(found):
    _of(found)[4]["ts"] -= 1e11


def _far_future(found):
    _of(found)[4]["ts"] += 1e9


def _not_launched(found):
    _of(found)[4].update(ts=0, args={"device": 0, "stream": 7})


def _outlasts(found):
    _of(found)[4]["dur"] = 2e6


def _outlasts_everything(found):
    _of(found)[-1]["dur"] = 2e6


def _outlasts_all_files(found):
    _of(found, traces.ALL_REDUCE)[-1]["dur"] = 2e6


def _half_outlast(found):
    for kernel in _of(found)[1::2]:
        kernel["dur"] = 2e6


def _clock_of_the_device(found):
    for event in found:
        event["ts"] -= 5e7 * (event["cat"] == "kernel")


def _a_little_early(found):
    for event in found:
        event["ts"] -= 2000 * (event["cat"] == "kernel")


def _launched_ahead_of_their_turn(found):
    for kernel in _of(found):
        kernel["dur"] += 15


def _one_row(found):
    """An all-reduce runs beside compute, on one row of the profiler."""
    for event in found:
        if event["cat"] == "kernel":
            event["tid"] = event["args"]["stream"] = 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("damage", "said", "tolerance"),
    [
        (_no_time, "left out: the start is", 0.11),
        (_lost_start, "left out: the start is", 0.11),
        (_another_clock, "left out: the start is", 0.11),
        (_far_future, "left out: the start is", 0.11),
        (_not_launched, "left out: the start is", 0.11),
        (_outlasts, "shortened", 0.001),
        (_outlasts_everything, "shortened", 0.001),
        (_outlasts_all_files, "shortened", 0.001),
        (_half_outlast, "shortened", 0.001),
        (_clock_of_the_device, None, 0.001),
        (_a_little_early, None, 0.001),
        (_launched_ahead_of_their_turn, None, 0.06),
        (_one_row, None, 0.001),
    ],
)
def test_impossible_times_of_kernels_are_repaired_and_counted_and_others_kept(
    tmp_path, damage, said, tolerance
):
    files = traces.job(tmp_path, [[320] * 10, [330] * 10])
    found = json.loads(files[0].read_text())
    damage(found["traceEvents"])
    files[0].write_text(json.dumps(found))
    repaired = analyze(files)
    warnings = [one for one in repaired.warnings if re.match(r"\d+ kernels? ", one)]
    assert len(warnings) == (said is not None)
    assert not said or (said in warnings[0] and "rank0.json, rank 0: " in warnings[0])
    assert repaired.job.recorded_at == "2023-11-14 22:13:20 UTC"
    for row in repaired.ranks:  # nine measured steps, the last one until its collective has ended
        assert row.span_us == pytest.approx(8340, rel=tolerance)
        assert row.compute_us == pytest.approx(2700, rel=2 * tolerance)


@pytest.mark.slow
def test_repaired_kernels_lower_the_confidence(tmp_path):
    files = traces.job(tmp_path, [[320] * 10, [330] * 10])
    sound = analyze(files).verdict
    for file in files:
        found = json.loads(file.read_text())
        _half_outlast(found["traceEvents"])
        file.write_text(json.dumps(found))
    repaired = analyze(files).verdict
    assert repaired.cause == sound.cause and repaired.confidence < sound.confidence


@pytest.mark.slow
@pytest.mark.parametrize("excess_us", first_fast([2**32 / 1000, 2**32, 2.5 * 2**32 / 1000]))
def test_overflows_of_every_kernel_of_a_name_are_repaired(tmp_path, excess_us):
    """Also where it runs twice in a row, and of the last ones; what is no multiple of 2^32 ns is
    cut."""
    files = traces.job(tmp_path, [[320] * 10, [330] * 10])
    for file in files:
        found = json.loads(file.read_text())
        for kernel in _of(found["traceEvents"]):
            again = kernel | {"ts": kernel["ts"] + 200, "dur": 100 + excess_us}
            kernel["dur"] = 200 + excess_us
            again["args"] = kernel["args"] | {"correlation": kernel["args"]["correlation"] + 5000}
            found["traceEvents"].append(again)
        file.write_text(json.dumps(found))
    analysis = analyze(files)
    assert any(text.startswith("40 kernels shortened") for text in analysis.warnings)
    whole = excess_us % (2**32 / 1000) == 0
    for row in analysis.ranks:
        assert row.compute_us == pytest.approx(2700) if whole else row.compute_us < 9000


def test_kernels_of_one_cuda_graph_may_run_at_once(tmp_path):
    """A long kernel beside short ones, all of one launch."""
    launch, beside = traces.kernel("gemm_beside", traces.BASE_US, 900, 1)
    found = [launch, beside] + [
        traces.kernel(traces.GEMM, traces.BASE_US + 10 + 100 * number, 90, 1)[1]
        for number in range(8)
    ]
    analysis = analyze([traces.write(tmp_path / "rank0.json", traces.document(found))])
    assert analysis.ranks[0].compute_us == 900
    assert not any("shortened" in warning for warning in analysis.warnings)
