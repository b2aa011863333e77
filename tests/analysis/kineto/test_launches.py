"""Launches, queues, kinds of collectives and the critical path of made traces, whose figures are
known."""

import pytest

from disttrain_cli.analysis.analyze import analyze, ask
from tests.analysis.kineto import traces

AT = traces.BASE_US


def call(name, start, duration, correlation=-1, thread=100):
    return traces.span(
        name,
        AT + start,
        duration,
        cat="cuda_runtime",
        tid=thread,
        args={"correlation": correlation},
    )


def kernel(name, start, duration, correlation, stream=7, **args):
    return traces.span(
        name,
        AT + start,
        duration,
        cat="kernel",
        pid=0,
        tid=stream,
        args={"device": 0, "stream": stream, "correlation": correlation, **args},
    )


def launched(name, asked, start, duration, correlation, took=4):
    return [
        call("cudaLaunchKernel", asked, took, correlation),
        kernel(name, start, duration, correlation),
    ]


@pytest.fixture
def one(tmp_path):
    """Three kernels launched ahead, then one that the host launches late, after it has
    synchronised."""
    found = [
        *launched("gemm_a", 0, 10, 100, 1),
        *launched("gemm_b", 5, 110, 100, 2),
        *launched("gemm_c", 10, 210, 2, 3, took=6),
        call("cudaDeviceSynchronize", 20, 200),
        *launched("gemm_d", 400, 405, 50, 4),
    ]
    return traces.write(tmp_path / "rank0.json", traces.document(found))


def test_launches_and_queues(one):
    found = analyze([one])
    (row,) = found.launches
    assert (row.launched, row.short) == (4, 1)  # gemm_c runs for 2 µs, its launch takes 6
    assert (row.kernel_p50_us, row.call_p50_us, row.delay_max_us) == (75, 4, 194)
    assert row.delay_p50_us == (6 + 101) / 2  # 1, 6, 101, 194
    (queue,) = found.queues
    assert (queue.stream, queue.kernels, queue.longest) == (7, 4, 2)
    waiting = 10 + 105 + 200 + 5  # each from its launch to its start
    assert queue.mean == pytest.approx(waiting / 405) and queue.empty_share == pytest.approx(
        190 / 405
    )
    assert ask([one], f"SELECT (at_ns - {AT}000) // 1000, length FROM queue ORDER BY 1").rows == [
        (0, 1),
        (5, 2),
        (10, 2),
        (110, 1),
        (210, 0),
        (400, 1),
        (405, 0),
    ]


def test_the_critical_path_goes_through_kernels_and_the_host_that_was_late(one):
    path = analyze([one]).critical_path
    # all of it: from the first launch to the last end
    assert path.step is None and path.length_us == 455
    assert {part.name: part.us for part in path.parts} == {
        "gemm_a": 100,
        "gemm_b": 100,
        "gemm_c": 2,
        "gemm_d": 50,
        "host": 400 - 212,
        "launch": 10 + 5,
    }
    assert sum(path.shares.values()) == pytest.approx(1) and path.ranks == {"0": 1}


def test_ends_that_are_rounded_do_not_break_the_critical_path(tmp_path):
    found = [
        event
        for number in range(5)
        for event in launched(
            f"gemm_{number}", number, 10 + 100 * number, 100.001 if number % 2 else 100, number
        )
    ]
    path = analyze([traces.write(tmp_path / "rank0.json", traces.document(found))]).critical_path
    assert {part.name: round(part.us) for part in path.parts if part.kind == "compute"} == {
        f"gemm_{number}": 100 for number in range(5)
    }
    assert path.length_us == pytest.approx(510, abs=0.01)


@pytest.mark.slow
@pytest.mark.parametrize("query", ["cudaEventQuery", "cudaStreamQuery", "hipEventQuery"])
@pytest.mark.parametrize(
    ("every", "thread", "device"),
    [
        (10, 100, True),  # a loop that spins
        (90, 100, True),  # one that sleeps between queries
        (10, 999, False),  # NCCL's watchdog, which launches nothing
        (1000, 100, False),  # a single query, of the allocator
    ],
)
def test_the_critical_path_goes_through_what_a_polling_host_waits_for(
    tmp_path, query, every, thread, device
):
    found = [
        *launched("gemm_a", 0, 10, 200, 1),
        *(call(query, at, 2, thread=thread) for at in range(20, 210 + every, every)),
        *launched("gemm_b", 310, 315, 50, 2),
    ]
    path = analyze([traces.write(tmp_path / "rank0.json", traces.document(found))]).critical_path
    times = {part.name: part.us for part in path.parts}
    assert times["gemm_b"] == 50 and times.get("gemm_a") == (200 if device else None)
    assert times["host"] == (310 - 210 if device else 310)


def test_the_critical_path_changes_to_the_rank_that_came_last(tmp_path):
    arrivals = [[400, 400, 400], [400, 700, 550]]
    found = analyze(traces.job(tmp_path, arrivals, compute=[300, 300]))
    path = found.critical_path
    assert path.step in (1, 2) and found.job.steps_measured == 2
    late = arrivals[1][path.step]
    shares = {(part.kind, part.rank): part.us for part in path.parts}
    # what moves; no waiting
    assert [us for (kind, _), us in shares.items() if kind == "communication"] == [20]
    # its device was done long before
    assert shares["launch", 1] == 5 and shares["host", 1] == late - 5
    assert {rank for kind, rank in shares if kind != "communication"} == {1}
    assert path.length_us == pytest.approx(late + 20)
    (kind,) = found.collective_kinds
    assert (kind.kind, kind.ranks, kind.count, kind.transfer_p50_us) == ("all_reduce", 2, 2, 20)
    assert (kind.wait_p50_us, kind.wait_max_us, kind.bytes_p50, kind.bus_gbytes_s) == (
        225,
        300,
        None,
        None,
    )


def test_bandwidth_is_of_the_bytes_that_arguments_tell(tmp_path):
    def rank(number):
        args = {
            "Collective name": "allreduce",
            "In msg nelems": 10**6,
            "dtype": "BFloat16",
            "Process Group Name": "0",
            "Process Group Ranks": "[0, 1, 2, 3]",
            "Group size": 4,
        }
        start = 100 + 10 * number
        found = [
            call("cudaLaunchKernel", 50, 4, 1),
            kernel(traces.ALL_REDUCE, start, 330 - start, 1, **args),
        ]
        return traces.write(tmp_path / f"rank{number}.json", traces.document(found, number, 4))

    (kind,) = analyze([rank(number) for number in range(4)]).collective_kinds
    assert (kind.ranks, kind.count, kind.bytes_p50, kind.transfer_max_us) == (4, 1, 2e6, 200)
    assert kind.bus_gbytes_s == pytest.approx(2 * 3 / 4 * 2e6 / 200e-6 / 1e9)
    assert kind.wait_max_us == 30


def test_traces_of_a_cpu_have_operators_and_no_launches(tmp_path):
    found = [
        traces.span(
            "aten::mm",
            AT + at,
            10,
            pid=1,
            tid=1,
            args={"Input Dims": [[2, 3], [3, 5]], "Input type": ["float", "float"]},
        )
        for at in (0, 20)
    ]
    analysis = analyze([traces.write(tmp_path / "rank0.json", traces.document(found))])
    (row,) = analysis.operators
    assert (row.count, row.total_us, row.tflops) == (2, 20, pytest.approx(120 / 20e-6 / 1e12))
    assert not analysis.launches and not analysis.queues and analysis.critical_path is None
