"""What is not understood is not judged: it is named, and the list of patterns tells the rest."""

import pytest

from disttrain_cli.analysis.analyze import analyze, ask
from disttrain_cli.analysis.kineto.kernels import pattern_texts, read_patterns, step_of
from tests.analysis.kineto import traces
from tests.cases import first_fast

STEPS, RANKS, STEP_US = 4, 3, 10_000


def span(name, at, length, pid=1, tid=1, **more):
    return {"ph": "X", "name": name, "pid": pid, "tid": tid, "ts": at, "dur": length, **more}


def both(name, at, length, pid, tid):
    """A begin mark and an end mark."""
    return [
        {"ph": "B", "name": name, "pid": pid, "tid": tid, "ts": at},
        {"ph": "E", "pid": pid, "tid": tid, "ts": at + length},
    ]


def pipeline(named, marks):
    """Begin and end marks of a pipeline's ranks; `named` names a rank's process or thread, `marks`
    marks its steps."""
    found = []
    for rank in range(RANKS):
        pid, tid, name = named(rank)
        found.append({"ph": "M", "pid": pid, "tid": tid} | name)
        for step in range(STEPS):
            at = step * STEP_US
            found += marks(at, pid, tid)
            for slot in range(3):
                found += both("forward-compute", at + 500 * rank + 1500 * slot, 1000, pid, tid)
                found += both("forward-send", at + 500 * rank + 1500 * slot + 1000, 100, pid, tid)
            found += both("backward-compute", at + 7000, 2000 + 10 * rank, pid, tid)
    return {"traceEvents": found}


def of_process(rank):
    return 100 + rank, 1, {"name": "process_name", "args": {"name": f"rank {rank}"}}


def of_thread(rank):
    return 7, rank, {"name": "thread_name", "args": {"name": f"Rank {rank} (stage {rank})"}}


def of_places(rank):
    return 100 + rank, 1, {"name": "process_name", "args": {"name": f"DP0-PP{rank}-TP0"}}


def moments(at, pid, tid):
    return [
        {"ph": "i", "s": "p", "name": f"iteration {edge}", "pid": pid, "tid": tid, "ts": at + late}
        for edge, late in (("begin", 0), ("end", STEP_US - 100))
    ]


def around(at, pid, tid):
    return both("iteration begin", at, STEP_US - 100, pid, tid)


def of_the_job(at, pid, tid):
    """On a row of its own, which names no rank."""
    return [span(f"step {at // STEP_US}", at, STEP_US - 100, pid=999)] if pid == 100 else []


def ends_only_by_the_next(at, pid, tid):
    return [{"ph": "i", "s": "p", "name": "train_step_start", "pid": pid, "tid": tid, "ts": at}]


def accelerator(step_name="ProfilerStep#{}"):
    """Operators and events of an accelerator that Kineto does not know, without categories."""
    found = []
    for step in range(STEPS):
        at = step * STEP_US
        found.append(span(step_name.format(step), at, STEP_US - 100, cat="user_annotation"))
        found += [span("aten::mm", at + 900 * part, 20, cat="cpu_op") for part in range(8)]
        found += [span(f"MatMulV2_{part}", at + 900 * part + 100, 700, pid=2) for part in range(8)]
        found.append(span(f"hcom_allReduce__{step}_1", at + 8000, 900, pid=3))
    return {"traceEvents": found}


def compiled():
    """As a compiler for accelerators writes them: annotations of steps tell their number in
    arguments."""
    found = [{"ph": "M", "name": "process_name", "pid": 3, "args": {"name": "/device:TPU:0"}}]
    for step in range(STEPS):
        at = step * STEP_US
        found.append(span("train", at, STEP_US - 100, args={"step_num": str(step)}))
        found += [span(f"fusion.{part}", at + 400 + 900 * part, 700, pid=3) for part in range(8)]
    return {"traceEvents": found}


def operators_only():
    return {
        "traceEvents": [
            event
            for step in range(STEPS)
            for event in (
                span(f"ProfilerStep#{step}", step * STEP_US, STEP_US - 100, cat="user_annotation"),
                span("train.py(3): main", step * STEP_US, STEP_US - 200, cat="python_function"),
                *(
                    span("aten::addmm", step * STEP_US + 900 * part, 200, cat="cpu_op")
                    for part in range(8)
                ),
            )
        ]
    }


@pytest.mark.parametrize(
    ("document", "ranks", "strange"),
    first_fast(
        [
            (pipeline(of_process, moments), RANKS, "forward-compute"),
            (pipeline(of_thread, around), RANKS, "backward-compute"),
            (pipeline(of_process, of_the_job), RANKS, "forward-compute"),
            (pipeline(of_places, ends_only_by_the_next), RANKS, "forward-send"),
            (accelerator(), 1, "MatMulV#_#"),
            (accelerator("## step {} ##"), 1, "hcom_allReduce__#_#"),
            (compiled(), 1, "fusion.#"),
            (operators_only(), 1, "aten::addmm"),
        ]
    ),
    ids=[
        "processes",
        "threads",
        "job",
        "places",
        "accelerator",
        "annotated",
        "compiled",
        "operators",
    ],
)
def test_what_is_not_known_as_work_of_a_device_is_not_judged(tmp_path, document, ranks, strange):
    found = analyze([traces.write(tmp_path / "trace.json", document)])
    verdict = found.verdict
    assert (verdict.cause, verdict.confidence, verdict.lost_s) == ("unknown", 0, 0)
    assert (
        "identified as device work" in verdict.headline and "kernel_patterns.txt" in verdict.advice
    )
    evidence = {row.what: row.value for row in verdict.evidence}
    assert any(strange in what for what in evidence)
    assert (
        evidence["a step, as marked"]
        == found.job.iteration_s
        == pytest.approx(STEP_US / 1e6, rel=0.05)
    )
    assert [row.rank for row in found.ranks] == list(range(ranks))
    assert found.job.steps_measured == found.job.steps - 1 >= STEPS - 2
    assert (
        found.job.bubble_fraction is None
        and found.stragglers.lost_s is None
        and not found.job.time_shares
    )
    without_operators = ranks > 1 or strange == "fusion.#"
    assert all((row.compute_us is None) == without_operators for row in found.ranks)


@pytest.mark.slow
def test_lines_of_ones_own_tell_what_is_work_of_a_device(tmp_path, own_cache):
    path = traces.write(tmp_path / "trace.json", pipeline(of_process, moments))
    advice = analyze([path]).verdict.advice
    file = own_cache.parent / "config" / "disttrain" / "kernel_patterns.txt"
    assert str(file) in advice
    file.parent.mkdir(parents=True)
    file.write_text(
        "\n".join(
            part for part in advice.split('"') if part.startswith(("compute", "communication"))
        )
    )
    found = analyze([path])
    assert {(row.name, row.kind) for row in found.kernels} == {
        ("forward-compute", "compute"),
        ("backward-compute", "compute"),
        ("forward-send", "communication"),
    }
    first = found.ranks[0]
    assert first.compute_us == 3 * (3 * 1000 + 2000) and first.communication_us == 3 * 3 * 100
    assert found.verdict.cause == "unknown" and "for no recorded reason" in found.verdict.headline
    assert found.stragglers.lost_s["host"] == 0  # no record of a host is no late host
    assert (
        found.stragglers.lost_s["unexplained"] == found.verdict.lost_s > 0.3 * found.job.iteration_s
    )


@pytest.mark.slow
def test_idle_devices_are_the_hosts_only_where_it_is_seen_to_be_late(tmp_path):
    """Kernels every 1000 µs that take 400: launched when the device idles, long before, or nobody
    knows when; times of kernels that were left out explain what looks idle."""

    def job(launched, damaged=()):
        found = [
            span(
                "ampere_sgemm",
                1000 * number - 9000 * (number in damaged),
                400,
                cat="kernel",
                args={"stream": 7, "correlation": number},
            )
            for number in range(40)
        ]
        found += (
            [
                span(
                    "cudaLaunchKernel",
                    1000 * number - launched,
                    5,
                    cat="cuda_runtime",
                    args={"correlation": number},
                )
                for number in range(40)
            ]
            if launched
            else []
        )
        return analyze([traces.write(tmp_path / f"{launched}.json", found)])

    late, early, nobody = job(10), job(5000), job(0)
    assert late.verdict.cause == "host" and late.stragglers.lost_s["unexplained"] == 0
    assert early.verdict.cause == nobody.verdict.cause == "unknown"
    assert "next kernel was launched long before" in early.verdict.headline
    assert "for no recorded reason" in nobody.verdict.headline
    misplaced = job(5000, damaged={20, 21}).verdict
    assert misplaced.cause == "unknown" and "5 % of the kernels" in misplaced.headline
    for found in (early, nobody):
        assert found.stragglers.lost_s["host"] == 0 and found.verdict.lost_s == pytest.approx(
            39 * 600e-6, rel=0.01
        )


def test_kernels_of_unknown_kinds_are_not_judged(tmp_path):
    found = analyze(
        [
            traces.write(
                tmp_path / "rank0.json",
                [
                    span(f"tpc_blob_{number}", 1000 * number, 990, cat="kernel", args={"stream": 7})
                    for number in range(9)
                ],
            )
        ]
    )
    assert (
        found.verdict.cause == "unknown" and "100 % of the kernels' time" in found.verdict.headline
    )
    assert r'"compute ^tpc_blob_\d+$"' in found.verdict.advice


def test_communication_alone_is_not_judged(tmp_path):
    for rank in range(2):
        kernels = [
            one
            for step in range(4)
            for one in traces.kernel(traces.ALL_REDUCE, 1000.0 * step, 900, step)
        ]
        traces.write(tmp_path / f"rank{rank}.json", traces.document(kernels, rank, 2))
    found = analyze([tmp_path])
    assert found.verdict.cause == "unknown" and "only communication" in found.verdict.headline


@pytest.mark.parametrize(
    ("events", "said"),
    first_fast(
        [
            ([span(None, 10 * at, 5) for at in range(3)], "longest events: (no name)"),
            (
                [span('a(b)*+?{3}|^$\\ "q" #5', 10 * at, 5) for at in range(3)],
                '"compute ^a\\(b\\)\\*\\+\\?\\{\\d+\\}',
            ),
            ([span("x" * 500, 10 * at, 5) for at in range(3)], f'"compute ^{"x" * 60}" to'),
            ([span("x", 10 * at, 0) for at in range(3)], "no other event has a duration"),
            (
                [
                    span("gemm", 10 * at, 5, cat="kernel", args={"stream": 7, "iteration": "abc"})
                    for at in range(3)
                ],
                "for no recorded reason",
            ),
        ]
    ),
)
def test_strange_names_and_lengths_have_an_answer(tmp_path, events, said):
    verdict = analyze([traces.write(tmp_path / "rank0.json", events)]).verdict
    assert verdict.cause == "unknown" and said in verdict.headline + verdict.advice


@pytest.mark.parametrize(
    ("name", "number", "edge"),
    [
        ("ProfilerStep#12", 12, "whole"),
        ("iteration 3", 3, "whole"),
        ("train_step", None, "whole"),
        ("## step 7 ##", 7, "whole"),
        ("global_step=40", 40, "whole"),
        ("iteration begin", None, "begin"),
        ("iteration end 5", 5, "end"),
        ("train_step_start", None, "begin"),
        ("end of iteration", None, "end"),
        ("[pl][profile]run_training_batch", None, "whole"),
    ],
)
def test_names_that_mark_steps(name, number, edge):
    found = step_of(name, read_patterns(pattern_texts()))
    assert found is not None and found[1:] == (number, edge)


@pytest.mark.parametrize(
    "name",
    [
        "Optimizer.step#Adam.step",
        "aten::mm",
        "forward step",
        "step",
        "reiterate 3",
        "optimizer_step",
        "stepped 4",
        "lr_scheduler.step",
    ],
)
def test_names_that_mark_none(name):
    assert step_of(name, read_patterns(pattern_texts())) is None


def test_a_mark_of_ones_own(tmp_path, own_cache):
    file = own_cache.parent / "config" / "disttrain" / "kernel_patterns.txt"
    file.parent.mkdir(parents=True)
    file.write_text("step ^round \\d+\n")
    path = traces.write(
        tmp_path / "rank0.json",
        [
            *(span(f"round {number}", 1000 * number, 900) for number in range(3)),
            *(
                span("ampere_sgemm", 1000 * number + 50, 800, cat="kernel", args={"stream": 7})
                for number in range(3)
            ),
        ],
    )
    assert ask([path], "SELECT step, measured FROM steps ORDER BY step").rows == [
        (0, False),
        (1, True),
        (2, True),
    ]
