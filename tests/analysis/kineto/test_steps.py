"""Steps from mark to mark: idle time outside of kernels, hosts that run ahead, single events."""

import pytest

from disttrain_cli.analysis.analyze import analyze, ask
from tests.analysis.kineto import traces
from tests.cases import first_fast

WORK_US, LAUNCH_US = 40_000, 100
LOADER = ("user_annotation", "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__")
SAVE = ("cpu_op", "save")


def span(kind, start, length):
    """An event of the host: (category, name), or None for nothing recorded."""
    if kind is None:
        return []
    category, name = kind
    about = {"ph": "X", "pid": 100, "tid": 100}
    return [about | {"cat": category, "name": name, "ts": start, "dur": length}]


def recorded(steps, lead=0, of=None, tail=(), tail_of=None, ahead=False, marked=True, last=None):
    """Steps of one rank: `lead` µs of the host, then kernels; it waits for them, or runs `ahead`.

    `tail[step]` is a pause of the host after the kernels; `last` is how many the last step runs.
    """
    found, host, device = [], traces.BASE_US, 0
    for step in range(steps):
        begin = host
        found += span(of, host, lead) if lead else []
        host += lead + LAUNCH_US
        for number in range(4 if last is None or step < steps - 1 else last):
            start = max(host, device)
            launch, kernel = traces.kernel(traces.GEMM, start, WORK_US // 4, 10 * step + number)
            found += [launch | {"ts": host - 5}, kernel]
            device, host = start + WORK_US // 4, host + 10
        if not ahead:
            host = device
        elif step:
            host = max(host, device - WORK_US)
        pause = tail[step] if step < len(tail) else 0
        found += span(tail_of, host, pause) if pause else []
        host += pause
        found += (
            span(("user_annotation", f"ProfilerStep#{step}"), begin, host - begin) if marked else []
        )
    return found


def job(folder, *ranks):
    for rank, found in enumerate(ranks):
        traces.write(folder / f"rank{rank}.json", traces.document(found, rank, len(ranks)))
    return analyze([folder])


@pytest.mark.parametrize("steps", first_fast([1, 2, 3, 6]))
def test_what_a_step_waits_for_before_its_first_kernel_is_lost_however_many_are_recorded(
    tmp_path, steps
):
    found = job(tmp_path, recorded(steps, 30_000, LOADER))
    assert found.verdict.cause == "data" and found.verdict.lost_s == pytest.approx(0.03)
    assert found.job.iteration_s == pytest.approx(0.0701)
    assert (
        found.verdict.headline
        == "The devices wait for data: 30 ms of the 70.1 ms of a step (43 %)."
    )
    assert found.stragglers.ideal_s + sum(found.stragglers.lost_s.values()) == pytest.approx(0.0701)


@pytest.mark.parametrize(
    ("of", "cause", "said"),
    first_fast(
        [
            (
                ("cpu_op", "aten::tokenize"),
                "host",
                "in one long gap of a step, 30.1 ms while the host runs",
            ),
            (("python_function", "train.py(3): preprocess"), "host", "train.py(3): preprocess"),
            (
                ("python_function", "torch/utils/data/dataloader.py(701): __next__"),
                "data",
                "for data",
            ),
            (("user_annotation", "gloo:barrier"), "communication", "Hosts wait for one another"),
            (("cuda_runtime", "cudaStreamSynchronize"), "unknown", "for no recorded reason"),
            (None, "unknown", "in one long gap of a step, 30.1 ms before ampere_sgemm"),
        ],
        2,
    ),
)
def test_what_the_host_does_before_the_first_kernel_is_the_cause(tmp_path, of, cause, said):
    found = job(tmp_path, recorded(3, 30_000, of))
    assert found.verdict.cause == cause and said in found.verdict.headline
    key = "unexplained" if cause == "unknown" else cause
    assert found.stragglers.lost_s[key] == pytest.approx(0.03, rel=0.01)
    assert "CUDA graphs" not in found.verdict.advice


@pytest.mark.parametrize("steps", first_fast([3, 2, 6]))
def test_a_host_that_runs_ahead_leaves_no_gap(tmp_path, steps):
    """What it does before the first kernel passes while the device runs the step before."""
    found = job(tmp_path, recorded(steps, 10_000, SAVE, ahead=True))
    assert found.verdict.cause == "none"
    lost_s = sum(found.stragglers.lost_s.values())
    assert lost_s < 1e-4 and found.stragglers.ideal_s == pytest.approx(0.04, rel=0.01)
    assert found.job.iteration_s == pytest.approx(0.04, rel=0.01)


@pytest.mark.slow
@pytest.mark.parametrize("steps", first_fast([2, 5]))
def test_communication_beside_the_next_step_is_hidden_in_the_last_one_too(tmp_path, steps):
    found = []
    for step in range(steps):
        mark, end = (traces.BASE_US + 50_000 * (step + more) for more in (0, 1))
        for name, start, length, stream in (
            (traces.GEMM, mark + 1000, 50_000, 7),
            (traces.ALL_REDUCE, end + 1000, 20_000, 20),
        ):
            launch, kernel = traces.kernel(name, start, length, 10 * step + stream, stream)
            found += [launch | {"ts": mark + stream}, kernel]
        found += span(("user_annotation", f"ProfilerStep#{step}"), mark, end - mark)
    verdict = job(tmp_path, found, found).verdict
    assert verdict.cause == "none" and "One step" not in verdict.headline


@pytest.mark.parametrize(
    ("tail_of", "said"),
    [
        (SAVE, "One step of 10, step 5, has a pause of 400 ms while the host runs save; the"),
        (None, "while the host runs nothing that was recorded"),
    ],
)
def test_a_single_pause_is_told_and_the_usual_step_judged(tmp_path, tail_of, said):
    found = job(tmp_path, recorded(11, tail=[0, 0, 0, 0, 0, 400_000], tail_of=tail_of))
    assert found.verdict.cause == "none" and said in found.verdict.headline
    assert sum(found.stragglers.lost_s.values()) < 0.001
    assert found.job.steps_measured == 10 and found.job.iteration_s == pytest.approx(0.0801)


def test_a_pause_in_several_steps_is_a_cause_and_they_are_named(tmp_path):
    pauses = [400_000 if step in (3, 8) else 0 for step in range(11)]
    verdict = job(tmp_path, recorded(11, tail=pauses, tail_of=SAVE)).verdict
    assert verdict.cause == "host" and verdict.headline.endswith("Only in 2 of 10 steps (3, 8).")
    assert "CUDA graphs" not in verdict.advice


@pytest.mark.slow
def test_one_step_that_pauses_of_two_is_not_called_unusual(tmp_path):
    verdict = job(tmp_path, recorded(3, tail=[0, 400_000], tail_of=SAVE)).verdict
    assert verdict.cause == "host" and "Only in 1 of 2 steps (1)." in verdict.headline
    always = job(tmp_path / "always", recorded(3, tail=[400_000] * 3, tail_of=SAVE)).verdict
    assert verdict.confidence < 0.85 * always.confidence


@pytest.mark.slow
def test_the_first_step_is_judged_where_no_other_is_marked_on_every_rank(tmp_path):
    found = job(tmp_path, recorded(4, 30_000, LOADER), recorded(1, 30_000, LOADER))
    single = job(tmp_path / "single", recorded(1, 30_000, LOADER), recorded(1, 30_000, LOADER))
    assert found.verdict.cause == "data"
    assert found.verdict.confidence < 0.8 * single.verdict.confidence
    said = [warning for warning in found.warnings if "every rank" in warning or "first" in warning]
    assert len(said) == 1 and said[0].startswith("only step 0 of 4 is marked on every rank: it")


def test_a_last_step_that_was_cut_off_is_left_out(tmp_path):
    found = job(tmp_path, recorded(4, last=1))
    assert found.verdict.cause == "none" and found.stragglers.ideal_s == pytest.approx(0.04)
    assert any(
        "step 3, the last one, was not recorded to its end" in warning for warning in found.warnings
    )


@pytest.mark.parametrize("steps", first_fast([3, 7]))
def test_data_that_are_loaded_between_the_marks_are_of_the_step(tmp_path, steps):
    """As `for batch in loader: with record_function("train_step"): …` marks them."""
    found = recorded(steps, tail=[30_000] * steps, tail_of=LOADER)
    for event in found:
        if event["name"].startswith("ProfilerStep#"):
            event |= {"name": f"train_step {event['name'][13:]}", "dur": event["dur"] - 30_000}
    lost = job(tmp_path, found).stragglers.lost_s
    assert lost["data"] == pytest.approx(0.03)


@pytest.mark.slow
def test_ranks_without_marks_have_those_of_the_others(tmp_path):
    ranks = [recorded(4, 30_000, LOADER, marked=rank == 0) for rank in range(2)]
    found = job(tmp_path, *ranks)
    assert found.stragglers.lost_s["data"] == pytest.approx(0.03)
    assert "1 rank marks no step: the marks of the first rank that does are used" in (
        found.warnings
    )
    elsewhen = [event | {"ts": event["ts"] + 10**9} for event in ranks[1]]
    apart = job(tmp_path / "apart", ranks[0], elsewhen)
    assert any(
        "no step: all that was recorded there is measured" in warning for warning in apart.warnings
    )


def test_every_moment_of_a_measured_step_is_of_one_cause(tmp_path):
    job(tmp_path, recorded(4, 30_000, LOADER, tail=[0, 5000, 5000, 5000], tail_of=SAVE))
    query = "SELECT step, sum(seconds) FROM losses GROUP BY step ORDER BY step"
    rows = ask([tmp_path], query).rows
    assert [step for step, _ in rows] == [1, 2, 3]
    assert [seconds for _, seconds in rows] == pytest.approx([0.0751] * 3)


def test_marks_of_one_step_in_several_processes_are_one_step(tmp_path):
    """The merged file of a pipeline is read as one rank: its processes begin and end an iteration
    within some µs of one another, or at the same time."""
    found = []
    for number in range(5):
        at = 1_000_000 * number
        for process in range(4):
            about = {"pid": process, "tid": 0, "args": {"iteration": number}}
            late = process // 2 * (number % 2)
            for phase, name, ts in (
                ("i", "iteration begin", at + late),
                ("B", "forward", at + 100),
                ("E", "forward", at + 900_000),
                ("i", "iteration end", at + 900_100 + late),
            ):
                found.append(about | {"ph": phase, "name": name, "ts": ts})
    path = traces.write(tmp_path / "pipeline.json", {"traceEvents": found})
    rows = ask([path], "SELECT step, step_ns / 1e9 FROM step_times ORDER BY step").rows
    assert [step for step, _ in rows] == [1, 2, 3, 4]
    assert [step_s for _, step_s in rows] == pytest.approx([1.0, 1.0, 1.0, 0.9001], abs=1e-4)


@pytest.mark.slow
def test_steps_and_kernels_that_begin_at_the_same_time_are_read_alike_in_any_order(tmp_path):
    found = recorded(4, 30_000, LOADER)
    for event in list(found):
        if event["name"] == "ProfilerStep#2":  # an empty step, as rounded times leave
            found.append(event | {"name": "ProfilerStep#9", "dur": 0})
        if event.get("cat") == "kernel" and event["args"]["correlation"] % 10 == 0:
            number = event["args"]["correlation"] + 5
            launch, kernel = traces.kernel("elementwise", event["ts"], event["dur"], number, 8)
            found += [launch | {"ts": event["ts"] - 20_000}, kernel]
    analyses = [job(tmp_path / name, order) for name, order in (("a", found), ("b", found[::-1]))]
    first, second = ((one.stragglers, one.verdict.lost_s, one.job.steps) for one in analyses)
    assert first == second
    assert analyses[0].job.steps == 4
