"""Who holds up whom, against a simulation of the same job with and without the slow ranks."""

import json

import pytest

from disttrain_cli.analysis.analyze import analyze
from disttrain_cli.analysis.figures import seconds
from tests.analysis.kineto import traces
from tests.cases import first_fast

LAYERS, STEPS, WORK_US, MOVE_US = 4, 5, 1000.0, 50.0
WORLD = [[[0, 1, 2, 3, 4, 5, 6, 7]]]
#: Every layer ends with a collective of each tensor group, the last also with one of each data
#: group.
TENSOR_AND_DATA = [[[0, 1], [2, 3], [4, 5], [6, 7]], [[0, 2, 4, 6], [1, 3, 5, 7]]]


def simulate(kinds, slow, ranks, move=MOVE_US):
    """Compute and collectives (rank, start, end, name, group) one after another, and when all
    ended."""
    at, ran = [0.0] * ranks, []
    for step in range(STEPS):
        for layer in range(LAYERS):
            for rank in range(ranks):
                takes = (
                    WORK_US
                    * slow.get((rank, step, layer), slow.get((rank, step), slow.get(rank, 1.0)))
                    * (1 + 0.0002 * ((rank * 7 + layer) % 5))
                )
                ran.append((rank, step, at[rank], at[rank] + takes, traces.GEMM, None))
                at[rank] += takes
            for kind, groups in enumerate(kinds):
                if kind and layer < LAYERS - 1:
                    continue
                for number, group in enumerate(groups):
                    ends = max(at[rank] for rank in group) + move
                    for rank in group:
                        ran.append(
                            (
                                rank,
                                step,
                                at[rank],
                                ends,
                                traces.ALL_REDUCE,
                                (f"{kind}.{number}", group),
                            )
                        )
                        at[rank] = ends
    return ran, max(at)


def job(folder, kinds, slow, ranks=8, named=True, ahead=None, move=MOVE_US):
    """Files of the simulated job; launches stay ahead of the device. Clocks of ranks are `ahead`,
    µs."""
    ran, _ = simulate(kinds, slow, ranks, move)
    for rank in range(ranks):
        found = []
        for number, (_, step, start, end, name, group) in enumerate(
            one for one in ran if one[0] == rank
        ):
            args = (
                {}
                if group is None or not named
                else {
                    "Collective name": "allreduce",
                    "Process Group Name": group[0],
                    "Group size": len(group[1]),
                    "Process Group Ranks": str(group[1]),
                }
            )
            launch, kernel = traces.kernel(
                name, traces.BASE_US + start, end - start, number, stream=20 if group else 7, **args
            )
            found += [launch | {"ts": traces.BASE_US + step + 1e-3 * number}, kernel]
        for step in range(STEPS):
            begins = min(one[2] for one in ran if one[:2] == (rank, step))
            ends = max(one[3] for one in ran if one[:2] == (rank, step))
            for event in found:
                if (
                    event["cat"] == "cuda_runtime"
                    and traces.BASE_US + step <= event["ts"] < traces.BASE_US + step + 1
                ):
                    event["ts"] = traces.BASE_US + begins + event["args"]["correlation"] / 1e3
            found.append(
                traces.span(
                    f"ProfilerStep#{step}",
                    traces.BASE_US + begins,
                    ends - begins,
                    cat="user_annotation",
                )
            )
        for event in found:
            event["ts"] += (ahead or {}).get(rank, 0.0)
        traces.write(folder / f"rank{rank}.json", traces.document(found, rank, ranks))
    return analyze([folder])


def gains(kinds, slow, ranks=8):
    """Seconds per step that mending the slow ranks gains."""
    return (simulate(kinds, slow, ranks)[1] - simulate(kinds, {}, ranks)[1]) / STEPS / 1e6


@pytest.mark.parametrize(
    ("kinds", "slow", "ranks", "said"),
    first_fast(
        [
            (WORLD, {2: 1.4}, 8, "Rank 2 is the straggler: it is the last to join 16 of 16"),
            (
                TENSOR_AND_DATA,
                {5: 1.4},
                8,
                "Rank 5 is the straggler: it is the last to join 20 of 20",
            ),  # rank 4 only waits for it
            (
                WORLD,
                {2: 1.3, 5: 1.3},
                8,
                "Ranks 2 and 5 are the stragglers",
            ),  # each hides the other
            (
                TENSOR_AND_DATA,
                {2: 1.4, 5: 1.25},
                8,
                "Ranks 2 and 5 are the stragglers",
            ),  # rank 5 holds up few
            ([[[0, 1]]], {1: 1.09}, 2, "Rank 1 is the straggler: it is the last to join 16 of 16"),
        ],
        2,
    ),
)
def test_what_mending_stragglers_gains_is_what_a_simulation_without_them_does(
    tmp_path, kinds, slow, ranks, said
):
    found = job(tmp_path, kinds, slow, ranks)
    verdict = found.verdict
    assert verdict.cause == "worker" and verdict.place.rank in slow and said in verdict.headline
    assert verdict.lost_s == pytest.approx(gains(kinds, slow, ranks), rel=0.03)
    assert found.stragglers.lost_s["worker"] == pytest.approx(verdict.lost_s)
    assert found.stragglers.ideal_s + sum(found.stragglers.lost_s.values()) == pytest.approx(
        traces.mean_step_s([tmp_path])
    )
    assert "computes" in verdict.advice or "compute " in verdict.advice
    assert "ank 4 " not in verdict.headline and verdict.confidence > 0.9
    if kinds == TENSOR_AND_DATA and len(slow) == 2:
        alone = gains(kinds, slow, ranks) - gains(kinds, {5: slow[5]}, ranks)
        assert (
            f"Fixing rank 2 alone saves {seconds(alone)[:2]}" in verdict.headline
            and "rank 5 alone" not in verdict.headline
        )


@pytest.mark.parametrize(
    ("longer", "said"),
    first_fast(
        [
            ({"GroupProblemShape": 1.5}, "expert load. Grouped GEMMs take 8 ms longer"),
            ({"GroupProblemShape": 1.5, "flash_fwd_kernel": 1.5}, "a slower device"),
            (
                {"GroupProblemShape": 1.5, "flash_fwd_kernel": 1.3, "nvjet_tst": 1.3},
                "a slower device",
            ),
            # attention is bound by memory, so low clocks leave it as it is
            ({"GroupProblemShape": 1.5, "nvjet_tst": 1.5}, "a slower device"),
            ({"flash_fwd_kernel": 1.5}, "a slower device"),
        ]
    ),
)
def test_expert_load_is_told_from_a_slow_device(tmp_path, longer, said):
    usual = {"flash_fwd_kernel": 1000, "nvjet_tst": 1000, "GroupProblemShape": 2000}
    for rank in range(4):
        found, end = [], traces.BASE_US
        for step in range(8):
            at = end
            for number, (name, takes) in enumerate(usual.items()):
                takes *= (longer if rank == 2 else {}).get(name, 1.0)
                found += traces.kernel(name, at, takes, 10 * step + number)
                at += takes
            end += sum(usual[name] * longer.get(name, 1.0) for name in usual) + 50
            found += traces.kernel(traces.ALL_REDUCE, at, end - at, 10 * step + 9, stream=20)
        traces.write(tmp_path / f"rank{rank}.json", traces.document(found, rank, 4))
    verdict = analyze([tmp_path]).verdict
    assert (verdict.cause, verdict.place.rank) == ("worker", 2) and said in verdict.advice
    assert ("expert load" in verdict.advice) == ("expert load" in said)


@pytest.mark.slow
def test_ranks_that_are_late_in_one_step_are_named_with_it(tmp_path):
    verdict = job(tmp_path, WORLD, {(0, 3): 2.0}).verdict
    assert verdict.cause == "none" and verdict.headline.endswith(
        "One step of 4, step 3, takes 3.5 ms longer than the others (the others wait for rank 0);"
        " the verdict is of the other 3."
    )


def test_where_collectives_name_no_group_little_is_sure_and_clocks_stay(tmp_path):
    """By order alone nobody knows who joined what: rank 5's groups end later than the others, its
    clock is right."""
    found = job(tmp_path, TENSOR_AND_DATA[:1], {5: 1.4}, named=False)
    assert found.verdict.confidence < 0.9
    assert not any("clocks of" in warning for warning in found.warnings)


def test_a_clock_that_is_a_little_ahead_makes_no_straggler(tmp_path):
    """Rank 3 seems to come 150 µs late into every collective, and to leave it as much later."""
    verdict = job(tmp_path, WORLD, {}, ahead={3: 150.0}).verdict
    assert verdict.cause == "none" and verdict.confidence > 0.9


@pytest.mark.slow
def test_a_verdict_names_ranks_that_are_missing(tmp_path):
    job(tmp_path, WORLD, {2: 1.4})
    few = analyze([tmp_path / f"rank{rank}.json" for rank in (0, 1, 3, 4, 5, 6, 7)]).verdict
    assert (few.cause, few.confidence) == ("unknown", 0.0) and few.lost_fraction > 0.2
    assert "may be waiting for rank 2, whose trace is missing" in few.headline
    assert few.advice.startswith("Add the trace of rank 2 ")
    job(tmp_path / "part", TENSOR_AND_DATA, {5: 1.4})
    part = analyze([tmp_path / "part" / f"rank{rank}.json" for rank in (0, 2, 4, 6)]).verdict
    assert part.place.rank == 4 and part.confidence < 0.9 and "may have delayed it" in part.advice


@pytest.mark.slow
def test_communication_among_ranks_that_are_there_waits_for_none_that_are_missing(tmp_path):
    whole = job(tmp_path, TENSOR_AND_DATA[:1], {}, move=1000.0).verdict
    pair = analyze([tmp_path / f"rank{rank}.json" for rank in (0, 1)]).verdict
    assert whole.cause == pair.cause == "communication" and pair.confidence < whole.confidence
    assert analyze([tmp_path / "rank0.json"]).verdict.cause == "unknown"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "late", "cause", "said"),
    first_fast(
        [
            (
                8,
                [0, 0, 0, 0, 0],
                "worker",
                "Rank 0 is the straggler: it is the last to join 4 of the 4 ",
            ),
            (
                2,
                [0, 0, 0, 0, 0],
                "worker",
                "Rank 0 may be the straggler: it is the last to join 4 of the 4 ",
            ),
            (
                2,
                [0, 0, None, 0, None],
                "unknown",
                "of the waiting is for rank 0, but others wait long",
            ),
            (
                8,
                [0, 5, 2, 7, 4],
                "communication",
                "wait for one another, for a different rank each",
            ),
        ]
    ),
)
def test_a_rank_that_is_late_once_a_step_is_named(tmp_path, ranks, late, cause, said):
    """Before the first of many collectives, as its DataLoader makes it: it is the last to join"
    " few."""
    slow = {(rank, step, 0): 3.0 for step, rank in enumerate(late) if rank is not None}
    verdict = job(tmp_path, [[[*range(ranks)]]], slow, ranks).verdict
    assert verdict.cause == cause and said in verdict.headline
    assert (verdict.place.rank == 0) == (cause != "communication")
    if cause == "worker":
        assert verdict.lost_s == pytest.approx(gains([[[*range(ranks)]]], slow, ranks), rel=0.03)


def test_ranks_whose_compute_goes_on_beside_collectives(tmp_path):
    """Reductions run beside the backward; the rank before the last one waits only at the end of a
    step."""
    ranks, buckets, passes = 4, 6, {rank: 1300.0 if rank == 1 else 1000.0 for rank in range(4)}
    begins, files = 0.0, [[] for _ in range(ranks)]
    for step in range(STEPS):
        at, free = dict.fromkeys(range(ranks), begins), dict.fromkeys(range(ranks), begins)
        for bucket in range(buckets):
            for rank in range(ranks):
                launch, kernel = traces.kernel(
                    traces.GEMM, traces.BASE_US + at[rank], passes[rank], 100 * step + 2 * bucket
                )
                files[rank] += [launch | {"ts": traces.BASE_US + begins + 2 * bucket}, kernel]
                at[rank] += passes[rank]
            starts = {rank: max(at[rank], free[rank]) for rank in range(ranks)}
            ends = max(starts.values()) + 100
            for rank in range(ranks):
                launch, kernel = traces.kernel(
                    traces.ALL_REDUCE,
                    traces.BASE_US + starts[rank],
                    ends - starts[rank],
                    100 * step + 2 * bucket + 1,
                    stream=20,
                )
                files[rank] += [launch | {"ts": traces.BASE_US + begins + 2 * bucket + 1}, kernel]
                free[rank] = ends
        for rank in range(ranks):
            files[rank].append(
                traces.span(
                    f"ProfilerStep#{step}",
                    traces.BASE_US + begins,
                    ends - begins,
                    cat="user_annotation",
                )
            )
        begins = ends
    for rank, found in enumerate(files):
        traces.write(tmp_path / f"rank{rank}.json", traces.document(found, rank, ranks))
    verdict = analyze([tmp_path]).verdict
    assert verdict.place.rank == 1 and verdict.lost_s == pytest.approx(buckets * 300e-6, rel=0.02)


def test_a_straggler_among_cpus_is_named_though_nothing_is_a_device(tmp_path):
    for rank in range(3):
        found = []
        for step in range(STEPS):
            at, takes = 10_000 * step, 8000 if rank == 1 else 5000
            found += [
                traces.span(f"ProfilerStep#{step}", at, 9900, cat="user_annotation", pid=1, tid=1),
                traces.span("aten::addmm", at, takes, pid=1, tid=1),
                traces.span(
                    "gloo:all_reduce", at + takes, 8500 - takes, cat="user_annotation", pid=1, tid=2
                ),
            ]
        traces.write(tmp_path / f"rank{rank}.json", traces.document(found, rank, 3))
    found = analyze([tmp_path])
    assert (found.verdict.cause, found.verdict.place.rank) == ("worker", 1)
    assert found.verdict.lost_s == pytest.approx(3000e-6, rel=0.01)
    assert (
        "no device work is recorded" in found.verdict.advice and found.job.bubble_fraction is None
    )


@pytest.mark.parametrize(
    ("lane", "move"),
    first_fast([("Stream #14(Compute)", traces.ALL_REDUCE), ("XLA Ops", "all-reduce.3")]),
)
def test_streams_of_devices_without_categories_are_understood(tmp_path, lane, move):
    """As compilers write them: annotations of steps are a row of the device too, the host's marks
    end early."""
    for rank in range(3):
        found = [
            {"ph": "M", "name": "thread_name", "pid": 3, "tid": tid, "args": {"name": name}}
            for tid, name in ((1, lane), (2, "Steps"))
        ]
        for step in range(STEPS):
            at, takes = 10_000 * step, 8000 if rank == 1 else 5000
            found += [
                {
                    "ph": "X",
                    "name": "train",
                    "pid": 7,
                    "tid": 9,
                    "ts": at,
                    "dur": 90,
                    "args": {"step_num": str(step)},
                },
                {"ph": "X", "name": str(step), "pid": 3, "tid": 2, "ts": at, "dur": 8500},
                {"ph": "X", "name": "fusion.12", "pid": 3, "tid": 1, "ts": at + 100, "dur": takes},
                {
                    "ph": "X",
                    "name": move,
                    "pid": 3,
                    "tid": 1,
                    "ts": at + 100 + takes,
                    "dur": 8500 - takes,
                },
            ]
        traces.write(tmp_path / f"rank{rank}.json", {"traceEvents": found})
    found = analyze([tmp_path])
    assert (found.verdict.cause, found.verdict.place.rank) == ("worker", 1)
    assert found.verdict.lost_s == pytest.approx(3000e-6, rel=0.01)
    assert [row.compute_us for row in found.ranks] == [
        4 * 5000,
        4 * 8000,
        4 * 5000,
    ]  # the last step is whole


@pytest.mark.slow
def test_events_that_are_there_twice_count_once(tmp_path):
    once = job(tmp_path / "once", WORLD, {2: 1.4})
    for rank in range(8):
        read = json.loads((tmp_path / "once" / f"rank{rank}.json").read_text())["traceEvents"]
        traces.write(tmp_path / "twice" / f"rank{rank}.json", traces.document(read * 2, rank, 8))
    twice = analyze([tmp_path / "twice"])
    assert twice.verdict == once.verdict and twice.ranks == once.ranks
    assert sum("duplicated and count once" in warning for warning in twice.warnings) == 8


def test_kernels_that_take_no_time_have_no_critical_path(tmp_path):
    found = analyze(
        [
            traces.write(
                tmp_path / "rank0.json",
                [
                    event
                    for number in range(9)
                    for event in traces.kernel(traces.GEMM, 10 * number, 0, number)
                ],
            )
        ]
    )
    assert found.critical_path is None
