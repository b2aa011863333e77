"""The verdict on jobs with a known fault, and on jobs without one."""

import random

import pytest

from disttrain_cli.analysis.analyze import analyze
from disttrain_cli.analysis.figures import seconds
from disttrain_cli.analysis.losses import CAUSES
from disttrain_cli.analysis.sampled import WHOLE, samples_of
from tests.analysis.kineto import traces
from tests.cases import first_fast

RANKS, STEPS = 4, 12


def job(tmp_path, arrivals, **more):
    return analyze(traces.job(tmp_path, arrivals, **more))


def jittered(late=(), seed=0, base=620, by=3):
    """Arrivals of all ranks a few µs apart; those of `late` ranks (rank, µs) later."""
    chance = random.Random(seed)
    delays = dict(late)
    return [
        [base + chance.randrange(by) + delays.get(rank, 0) for _ in range(STEPS)]
        for rank in range(RANKS)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("rank", first_fast(range(RANKS)))
def test_a_rank_that_is_late_is_the_straggler(tmp_path, rank):
    found = job(tmp_path, jittered([(rank, 150)]), compute=[600] * RANKS)
    verdict = found.verdict
    assert (verdict.cause, verdict.place.rank) == ("worker", rank) and verdict.confidence > 0.9
    assert (
        f"Rank {rank} is the straggler: it is the last to join 11 of 11 collectives"
        in verdict.headline
    )
    assert verdict.lost_s == pytest.approx(150e-6, rel=0.1)
    assert verdict.lost_s == pytest.approx(found.stragglers.lost_s["worker"])
    assert "its host delays it" in verdict.advice


@pytest.mark.slow
@pytest.mark.parametrize(("compute", "larger"), first_fast([(100, True), (600, False)]))
def test_a_loss_larger_than_the_stragglers_is_in_the_headline(tmp_path, compute, larger):
    found = job(tmp_path, jittered([(2, 150)], base=960), compute=[compute + 340] * RANKS)
    lost_s, verdict = found.stragglers.lost_s, found.verdict
    assert (verdict.cause, verdict.place.rank) == ("worker", 2)
    assert (lost_s["host"] > verdict.lost_s) == larger
    share = f"({100 * lost_s['host'] / found.job.iteration_s:.0f} %)"
    said = "The larger loss is on all ranks: the devices wait for their hosts to launch work"
    assert (said in verdict.headline and share in verdict.headline) == larger
    assert ("launch fewer and larger" in verdict.advice) == larger
    assert verdict.lost_fraction == pytest.approx(verdict.lost_s / found.job.iteration_s)


def test_a_job_has_one_step_length_though_ranks_mark_different_ones(tmp_path):
    for rank in range(2):
        marks = [
            event | {"dur": event["dur"] * (1 + rank)} if "Step" in event["name"] else event
            for event in traces.events([620], compute=600)
        ]
        traces.write(tmp_path / f"rank{rank}.json", traces.document(marks, rank, 2))
    found = analyze([tmp_path])
    (step_s,) = (row.value for row in found.verdict.evidence if row.what == "a step")
    assert found.job.iteration_s == pytest.approx(1.5e-3) == step_s
    assert samples_of([tmp_path]).series[WHOLE] == pytest.approx([step_s])
    assert f"of the {seconds(step_s)} of a step" in found.verdict.headline


@pytest.mark.slow
def test_a_straggler_that_computes_longer_is_told_from_a_late_host(tmp_path):
    found = job(tmp_path, jittered([(2, 150)]), compute=[600, 600, 750, 600])
    assert found.verdict.place.rank == 2 and "more work" in found.verdict.advice


@pytest.mark.parametrize("seed", first_fast(range(5)))
def test_a_clean_job_has_no_straggler(tmp_path, seed):
    found = job(tmp_path, jittered(seed=seed, base=960), compute=[948] * RANKS)
    assert found.verdict.cause == "none" and found.verdict.confidence > 0.9
    assert found.verdict.headline.startswith("No straggler")


@pytest.mark.slow
@pytest.mark.parametrize("seed", first_fast(range(3)))
def test_late_by_turns_is_no_straggler(tmp_path, seed):
    """Someone is always late, but never the same one: that is communication's jitter."""
    chance = random.Random(seed)
    arrivals = [[620] * STEPS for _ in range(RANKS)]
    order = [*range(RANKS)] * (STEPS // RANKS)
    chance.shuffle(order)
    for step, rank in enumerate(order):
        arrivals[rank][step] += 200
    found = job(tmp_path, arrivals, compute=[600] * RANKS)
    assert found.verdict.cause != "worker" and found.stragglers.lost_s["worker"] == 0
    evidence = {row.what: row.value for row in found.verdict.evidence}
    assert evidence["waiting for other ranks"] == pytest.approx(150e-6)


@pytest.mark.slow
def test_a_device_that_waits_for_launches_is_bound_by_its_host(tmp_path):
    found = job(tmp_path, jittered(base=500), compute=[100] * RANKS)
    assert found.verdict.cause == "host" and "torch.compile" in found.verdict.advice
    assert found.verdict.lost_s > 0.5 * 1e-3


@pytest.mark.slow
def test_a_device_that_waits_for_the_data_loader(tmp_path):
    for rank, path in enumerate(traces.job(tmp_path, jittered(base=900), compute=[400] * RANKS)):
        steps = traces.events([900] * STEPS, compute=400)
        loads = [
            traces.span(
                "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__",
                traces.BASE_US + step * traces.STEP_US + 430,
                430,
                cat="user_annotation",
            )
            for step in range(STEPS)
        ]
        traces.write(path, traces.document(steps + loads, rank, RANKS))
    found = analyze([tmp_path])
    assert found.verdict.cause == "data" and "DataLoader" in found.verdict.advice


@pytest.mark.slow
def test_communication_that_nothing_hides(tmp_path):
    found = job(tmp_path, jittered(base=320), compute=[310] * RANKS, moves=600)
    assert found.verdict.cause == "communication" and found.verdict.lost_s == pytest.approx(
        600e-6, rel=0.05
    )
    assert found.job.exposed_communication_fraction == pytest.approx(0.6, abs=0.05)


def test_copies_that_nothing_hides_are_communication(tmp_path):
    copies = [
        event
        for step in range(STEPS)
        for event in traces.kernel(
            "Memcpy HtoD (Pageable -> Device)",
            traces.BASE_US + step * traces.STEP_US + 320,
            300,
            5000 + step,
            cat="gpu_memcpy",
        )
    ]
    for rank, path in enumerate(traces.job(tmp_path, jittered(base=950), compute=[300] * RANKS)):
        traces.write(path, traces.document(traces.events([950] * STEPS) + copies, rank, RANKS))
    found = analyze([tmp_path])
    assert found.stragglers.lost_s["communication"] == pytest.approx(320e-6, rel=0.02)
    evidence = {row.what: row.value for row in found.verdict.evidence}
    assert evidence["copies between host and device not overlapped with compute"] == pytest.approx(
        300e-6
    )


def test_copies_inside_devices_are_not_between_host_and_device(tmp_path):
    copies = [
        event
        for step in range(STEPS)
        for event in traces.kernel(
            "Memcpy DtoD (Device -> Device)",
            traces.BASE_US + step * traces.STEP_US + 320,
            500,
            5000 + step,
            cat="gpu_memcpy",
        )
    ]
    found = analyze(
        [
            traces.write(
                tmp_path / "rank0.json", traces.document(traces.events([950] * STEPS) + copies)
            )
        ]
    )
    assert found.verdict.headline.startswith(
        "Copies and fills of device memory are not overlapped with compute"
    )
    assert not any(
        "host and device" in text
        for text in (
            found.verdict.headline,
            found.verdict.advice,
            *(row.what for row in found.verdict.evidence),
        )
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("times", "said"),
    first_fast([(6, "So is rank 3: the last to join 5 of 11, "), (8, "Rank 3 costs ")]),
)
def test_every_rank_that_costs_enough_is_named(tmp_path, times, said):
    """Rank 0 is late in some steps, rank 3 in the others and as much in each."""
    arrivals = [[600] * STEPS for _ in range(16)]
    for step in range(1, STEPS):
        arrivals[0 if step <= times else 3][step] += 200
    found = job(tmp_path, arrivals, compute=[590] * 16)
    verdict = found.verdict
    assert (verdict.cause, verdict.place.rank) == ("worker", 0)
    assert (
        f"Rank 0 is the straggler: it is the last to join {times} of 11" in verdict.headline
        and said in verdict.headline
    )
    assert ("which may be chance" in verdict.headline) == (times == 8)
    gains = {row.what: row.value for row in verdict.evidence if row.what.startswith("saved")}
    assert gains["saved by fixing rank 0"] == pytest.approx(times / 11 * 200e-6, rel=0.01)
    assert times == 8 or gains["saved by fixing rank 3"] == pytest.approx(5 / 11 * 200e-6, rel=0.01)
    assert verdict.lost_s == pytest.approx(found.stragglers.lost_s["worker"])


def test_every_part_of_a_cause_is_told_with_its_own_seconds(tmp_path):
    """Transfers are the tile's exposed communication; waiting for one another is said beside them,
    not in them."""
    arrivals = [
        [620 if rank == step % RANKS else 420 for step in range(STEPS)] for rank in range(RANKS)
    ]
    found = job(tmp_path, arrivals, compute=[400] * RANKS, moves=500)
    verdict, exposed = found.verdict, found.job.exposed_communication_fraction
    assert verdict.cause == "communication" and verdict.lost_s == pytest.approx(
        found.stragglers.lost_s["communication"]
    )
    transfers, waits, both = verdict.headline.rstrip(".").split(". ")
    share = f"({100 * verdict.lost_fraction:.0f} %)"
    assert both == f"In all, communication costs {seconds(verdict.lost_s)} {share}"
    assert transfers.startswith("Communication is not overlapped") and transfers.endswith(
        f"({100 * exposed:.0f} %)"
    )
    assert waits.startswith("Ranks wait for one another") and ": 150 µs of the " in waits


def test_a_job_that_computes_nothing_has_no_ideal_and_is_shown(tmp_path, capsys):
    from disttrain_cli.commands.analyze_tables import render
    from disttrain_cli.console import Console

    found = analyze(
        [
            traces.write(
                tmp_path / "rank0.json",
                [
                    event
                    for number in range(9)
                    for event in traces.kernel(traces.ALL_REDUCE, 1000 * number, 900, number)
                ],
            )
        ]
    )
    assert found.stragglers.slowdown is None
    render(Console(), found)
    assert "there is no ideal: nothing was computed" in capsys.readouterr().out


def test_the_keys_of_lost_time_are_those_of_every_analysis(tmp_path):
    lost = job(tmp_path, jittered()).stragglers.lost_s
    assert tuple(lost) == CAUSES
    assert {cause for cause, seconds in lost.items() if seconds} == {"communication", "host"}


@pytest.mark.slow
def test_ranks_without_a_trace_make_a_verdict_less_sure(tmp_path):
    whole = job(tmp_path / "whole", jittered([(1, 150)]), compute=[600] * RANKS)
    part = job(
        tmp_path / "part", jittered([(1, 150)]), compute=[600] * RANKS, world_size=10 * RANKS
    )
    assert 0 < part.verdict.confidence < whole.verdict.confidence / 2
    for found, missing in ((whole, False), (part, True)):
        assert any("ranks are missing" in warning for warning in found.warnings) == missing
        shares = [row.value for row in found.verdict.evidence if row.what == "ranks with traces"]
        assert shares == ([0.1] if missing else [])


def test_one_collective_proves_nothing(tmp_path):
    found = job(tmp_path, [[400], [400], [700], [400]], marked=False)
    assert found.verdict.cause != "worker"


def test_losses_and_compute_sum_to_what_was_measured(tmp_path):
    found = job(tmp_path, jittered([(1, 90)]), compute=[300, 350, 400, 500])
    step_s = traces.STEP_US / 1e6
    assert found.stragglers.ideal_s + sum(found.stragglers.lost_s.values()) == pytest.approx(step_s)
    assert found.stragglers.slowdown == pytest.approx(step_s / found.stragglers.ideal_s)
    assert sum(found.job.time_shares.values()) == pytest.approx(1)
