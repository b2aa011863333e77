"""Causes ranked by what mending them gains: in a 9B job whose layout no other one beats, and on
times made up here."""

import shutil
from types import SimpleNamespace

import numpy as np
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from disttrain_cli.analysis.analyze import analyze
from disttrain_cli.analysis.causes import Finding, Suspect, find_causes
from disttrain_cli.analysis.confidence import CALIBRATION, FLOOR, calibrated, exceeds, known
from disttrain_cli.analysis.explanations import explain
from disttrain_cli.analysis.job.remedies.reordering import best_share
from disttrain_cli.analysis.result.verdicts import Place
from disttrain_cli.errors import DataError
from disttrain_cli.spec.runfile.rehearse import FaultSpec
from disttrain_cli.spec.trace import Job
from tests.analysis import simulated, synthetic
from tests.cases import first_fast
from tests.planning import synthetic as planning

STEPS = 4
UNITS = {
    "image_encoder": {"dp": 2, "layers_per_stage": [32]},
    "llm": {"tp": 2, "dp": 4, "layers_per_stage": [17, 17]},
    "image_generator": {"dp": 3, "layers_per_stage": [11]},
}


def fault(slow, unit, factor, stage=0, replica=None):
    return FaultSpec(slow=slow, unit=unit, stage=stage, replica=replica, factor=factor)


LLM_RANK, OTHER_RANK = fault("rank", "llm", 1.35, 0, 1), fault("rank", "llm", 1.35, 0, 2)
ENCODER_RANK, STAGE = fault("rank", "image_encoder", 1.6, 0, 1), fault("stage", "llm", 1.25, 1)


@pytest.fixture(scope="module")
def job():
    profile = planning.paper_9b(planning.run_file(batch=48, gpus=24, nodes=3))
    return profile, simulated.layout_of(profile, 48, 12, **UNITS)


def found_in(folder, job, *faults, layouts=False, **disturbed):
    """The analysis, and the share of a step that is gained without any of the faults."""
    played = simulated.write(folder, *job, STEPS, faults=faults, **disturbed)
    clean = [line for *_, line in simulated.play(*job, STEPS)]
    clean_s, step_s = (
        np.mean([line.iteration_s for line in lines[1:]]) for lines in (clean, played)
    )
    return analyze([folder]) if layouts else synthetic.judged(folder), 1 - clean_s / step_s


@pytest.mark.slow
def test_bubbles_that_no_layout_regains_are_no_fault(tmp_path, job):
    found, _ = found_in(tmp_path, job, layouts=True)
    lost = found.stragglers.lost_s["unit"]
    assert found.verdict.cause == "none" and lost > 0.05 * found.job.iteration_s
    assert "the plan's inherent bubbles" in found.verdict.headline
    (bubbles,) = [
        row.value
        for row in found.verdict.evidence
        if row.what.startswith("the plan's inherent bubbles")
    ]
    assert bubbles == pytest.approx(lost, rel=0.35)
    assert all(cause.gain_pct < 5 for cause in found.causes)


def test_bubbles_do_not_hide_a_fault(tmp_path, job):
    found, share = found_in(tmp_path, job, STAGE)
    place = found.verdict.place
    assert (found.verdict.cause, place.unit, place.stage) == ("stage", "llm", 1)
    assert found.verdict.lost_s / found.job.iteration_s == pytest.approx(share, abs=0.01)
    assert "slower than its work explains" in found.verdict.headline


@pytest.mark.slow
def test_of_two_slow_ranks_the_one_is_named_whose_mending_gains(tmp_path, job):
    found, share = found_in(tmp_path, job, LLM_RANK, ENCODER_RANK)
    place = found.verdict.place
    assert (found.verdict.cause, place.unit, place.stage, place.replica) == ("worker", "llm", 0, 1)
    gains = [cause.gain_s / found.job.iteration_s for cause in found.causes]
    assert sum(gains) <= share + 0.01 and gains == sorted(gains, reverse=True)
    assert found.verdict.lost_s == found.causes[0].gain_s


@pytest.mark.slow
def test_equally_slow_ranks_are_named_together(tmp_path, job):
    found, share = found_in(tmp_path, job, LLM_RANK, OTHER_RANK)
    (cause,) = [one for one in found.causes if one.cause == "worker"]
    assert {place.replica for place in cause.places} == {1, 2}
    assert cause.gain_s / found.job.iteration_s == pytest.approx(share, abs=0.01)
    assert "fixing any one of them alone does not help" in found.verdict.headline


@pytest.mark.slow
def test_all_that_gain_enough_are_named(tmp_path, job):
    found, share = found_in(tmp_path, job, LLM_RANK, STAGE)
    assert {cause.cause for cause in found.causes if cause.gain_pct >= 5} == {"worker", "stage"}
    assert "Also: " in found.verdict.headline
    assert sum(cause.gain_s for cause in found.causes) / found.job.iteration_s == pytest.approx(
        share, abs=0.02
    )


@pytest.mark.slow
def test_a_small_fault_is_none_with_what_it_costs(tmp_path, job):
    found, share = found_in(tmp_path, job, fault("rank", "llm", 1.06, 0, 1))
    assert found.verdict.cause == "none" and 0.01 < share < 0.05
    assert "Rank " in found.verdict.headline and found.verdict.lost_s == 0
    (cause,) = [one for one in found.causes if one.cause == "worker"]
    assert cause.gain_pct == pytest.approx(100 * share, abs=0.5) and cause.confidence < 0.5


@pytest.mark.slow
def test_a_slow_unit_is_no_matter_of_sharing(tmp_path, job):
    found, share = found_in(tmp_path, job, fault("stage", "image_encoder", 12.0), layouts=True)
    assert (found.verdict.cause, found.verdict.place.unit) == ("unit", "image_encoder")
    assert "slower than their work explains" in found.verdict.headline
    assert found.verdict.lost_s / found.job.iteration_s <= share + 0.01


@pytest.mark.slow
def test_a_verdict_due_to_a_single_event_says_so(tmp_path, job):
    held_up = simulated.HeldUp(1, 1, 3.0, step=2, slot=4)
    found, _ = found_in(tmp_path / "once", job, held_up=[held_up])
    always, _ = found_in(tmp_path / "always", job, held_up=[simulated.HeldUp(1, 1, 0.2)])
    assert found.verdict.cause == always.verdict.cause == "host"
    assert "due to a single event in one step" in found.verdict.headline
    assert "single event" not in always.verdict.headline
    assert found.causes[0].one_event and not always.causes[0].one_event
    assert found.verdict.confidence < always.verdict.confidence


@pytest.mark.slow
def test_a_rank_that_is_slow_in_some_steps_is_no_late_host(tmp_path, job):
    found, share = found_in(tmp_path, job, LLM_RANK, during={2})
    (cause,) = [one for one in found.causes if one.gain_pct > 1.5]
    assert (cause.cause, cause.place.unit, cause.place.replica) == ("worker", "llm", 1)
    assert cause.gain_s / found.job.iteration_s == pytest.approx(share, abs=0.01)
    assert "Only in 1 of 3 steps." in found.verdict.headline


def test_a_stage_that_is_slow_in_some_steps_is_named_alone(tmp_path, job):
    found, share = found_in(tmp_path, job, fault("stage", "llm", 1.6, 1), during={2})
    (cause,) = [one for one in found.causes if one.gain_pct > 1.5]
    assert (cause.cause, cause.place.unit, cause.place.stage) == ("stage", "llm", 1)
    assert cause.gain_s / found.job.iteration_s == pytest.approx(share, abs=0.01)


@pytest.mark.slow
def test_most_ranks_of_a_stage_being_slow_is_a_slow_stage(tmp_path, job):
    found, share = found_in(
        tmp_path, job, *(fault("rank", "llm", 1.35, 0, replica) for replica in (0, 1, 3))
    )
    assert (found.verdict.cause, found.verdict.place.unit, found.verdict.place.stage) == (
        "stage",
        "llm",
        0,
    )
    assert found.verdict.lost_s / found.job.iteration_s == pytest.approx(share, abs=0.02)


@pytest.mark.slow
def test_a_slow_reduction_is_found_and_named(tmp_path, job):
    found, _ = found_in(tmp_path / "slow", job, slow_reduce=60.0)
    clean, _ = found_in(tmp_path / "clean", job)
    assert (
        found.verdict.cause == "communication" and "gradient reduction of" in found.verdict.headline
    )
    share = 1 - clean.job.iteration_s / found.job.iteration_s
    assert (
        found.verdict.lost_s / found.job.iteration_s == pytest.approx(share, abs=0.02)
        and share > 0.05
    )


@pytest.mark.parametrize(("stage", "replicas"), first_fast([(1, [0, 1, 2, 3]), (0, [1])]))
def test_waits_for_ranks_without_a_trace_are_nobodys_fault(tmp_path, job, stage, replicas):
    faults = [fault("rank", "llm", 1.35, stage, replica) for replica in replicas]
    simulated.write(tmp_path, *job, STEPS, faults=faults)
    for replica in replicas:  # the encoder has ranks 0 and 1
        shutil.rmtree(tmp_path / f"rank-{2 + 4 * stage + replica:05d}")
    found = synthetic.judged(tmp_path)
    place = found.verdict.place
    assert (found.verdict.cause, place.unit, place.stage) == ("unknown", "llm", stage)
    assert f"traces are missing (llm stage {stage}" in found.verdict.headline
    assert all(cause.cause == "unknown" for cause in found.causes if cause.gain_pct >= 5)
    assert found.verdict.next_command == "disttrain analyze"
    assert any(
        f"missing: llm stage {stage} replica {replicas[0]}" in text for text in found.warnings
    )


def test_a_replica_with_a_stage_without_a_trace_is_not_slow(tmp_path, job):
    simulated.write(tmp_path, *job, STEPS, faults=[fault("stage", "image_generator", 40.0)])
    shutil.rmtree(tmp_path / "rank-00007")  # replica 1 of the LLM's stage 1
    found = synthetic.judged(tmp_path)
    assert not [one for one in found.causes if one.cause == "worker"]
    assert found.verdict.cause in ("unknown", "unit")


def test_units_are_slow_beside_one_that_is_not(tmp_path, job):
    found, share = found_in(
        tmp_path,
        job,
        fault("stage", "image_encoder", 12.0),
        fault("stage", "image_generator", 40.0),
    )
    slow = [
        one.place.unit for one in found.causes if "slower than their work explains" in one.sentence
    ]
    assert sorted(slow) == ["image_encoder", "image_generator"]
    assert sum(one.gain_s for one in found.causes) / found.job.iteration_s == pytest.approx(
        share, abs=0.03
    )


def test_units_that_are_all_slower_than_their_profile_are_said(tmp_path, job):
    found, _ = found_in(
        tmp_path,
        job,
        *(
            fault("stage", unit, 1.5, stage)
            for unit, stage in (
                ("image_encoder", 0),
                ("llm", 0),
                ("llm", 1),
                ("image_generator", 0),
            )
        ),
    )
    assert found.verdict.cause == "none"
    assert (
        "Every unit takes at least 1.5 times as long as the profile predicts"
        in found.verdict.headline
    )
    assert found.verdict.next_command.startswith("disttrain profile")


@pytest.mark.slow
def test_a_layout_claims_no_more_than_the_best_one_gains(tmp_path, job):
    profile, _ = job
    uneven = simulated.layout_of(
        profile, 48, 12, **UNITS | {"llm": UNITS["llm"] | {"layers_per_stage": [22, 12]}}
    )
    found, _ = found_in(tmp_path, (profile, uneven), layouts=True)
    best = max(one.gain_s for one in found.remedies if one.gpus <= 0 and one.basis == "plan")
    assert found.verdict.cause == "stage" and "heavier" in found.verdict.headline
    assert sum(one.gain_s for one in found.causes if one.cause in ("stage", "unit")) <= 1.02 * best


@pytest.mark.slow
def test_uneven_data_claim_no_more_than_an_ordering_regains(tmp_path):
    profile = planning.paper_9b(planning.run_file(batch=16, gpus=8, nodes=1))
    sample = profile.data.sample
    skewed = sample.model_copy(
        update={"images": [[256] * (30 * (place % 7)) for place in range(len(sample.images))]}
    )
    profile = profile.model_copy(
        update={"data": profile.data.model_copy(update={"sample": skewed})}
    )
    layout = simulated.layout_of(
        profile,
        16,
        16,
        image_encoder={"layers_per_stage": [32]},
        llm={"tp": 2, "layers_per_stage": [12, 11, 11]},
        image_generator={"layers_per_stage": [11]},
    )
    found, _ = found_in(tmp_path, (profile, layout), ordering="none")
    (best,) = [one for one in found.remedies if one.change.startswith("train.ordering: best")]
    claimed_s = sum(one.gain_s for one in found.causes if one.cause == "inter_microbatch")
    assert 0 < claimed_s <= best.gain_s + 1e-9
    recorded = Job.model_validate_json((tmp_path / "job.json").read_text())
    assert best.gain_pct <= 100 * best_share(recorded) + 0.5


def test_half_a_step_is_not_measured(tmp_path, job):
    lines = simulated.write(tmp_path, *job, 2)
    half_ns = 10**18 + round(1e9 * (lines[0].iteration_s + lines[1].iteration_s / 2))
    for path in [*tmp_path.glob("rank-*/*.parquet"), *tmp_path.glob("steps/*.parquet")]:
        rows = pq.read_table(path)
        pq.write_table(rows.filter(pc.less(rows["end_ns"], half_ns)), path)
    with pytest.raises(DataError, match="no complete step"):
        analyze([tmp_path])


@pytest.mark.slow
def test_rows_that_contradict_each_other_are_not_judged(tmp_path, job):
    simulated.write(tmp_path, *job, STEPS)
    draws = np.random.default_rng(0)
    for path in sorted(tmp_path.rglob("rank-*/*.parquet")):
        table = pq.read_table(path)
        starts, ends, steps = (
            table[name].to_numpy().copy() for name in ("start_ns", "end_ns", "step")
        )
        long = ends - starts
        for step in range(STEPS):
            starts[steps == step] = draws.permutation(starts[steps == step])
        for name, values in (("start_ns", starts), ("end_ns", starts + long)):
            table = table.set_column(table.column_names.index(name), name, [values])
        pq.write_table(table, path)
    found = synthetic.judged(tmp_path)
    assert found.verdict.cause == "unknown" and "inconsistent" in found.verdict.headline
    assert found.verdict.confidence == 0 and found.causes == []


@pytest.mark.slow
def test_a_rank_whose_trace_ends_early_is_named(tmp_path, job):
    simulated.write(tmp_path, *job, 3)
    path = next(tmp_path.glob("rank-00003/*.parquet"))
    rows = pq.read_table(path)
    pq.write_table(rows.filter(pc.less(rows["step"], 2)), path)
    assert any(
        "the trace of rank 3 (at step 1) ends early" in text
        for text in synthetic.judged(tmp_path).warnings
    )
    pq.write_table(rows.filter(pc.less(rows["step"], 1)), path)
    with pytest.raises(DataError) as caught:
        analyze([tmp_path])
    assert "the trace of rank 3 (at step 0) ends early" in str(caught.value) and "rank-*" in str(
        caught.value
    )


def suspect(place, seconds, cause="worker"):
    """Takes seconds from one of the times side by side."""

    def mend(state):
        times = state[0].copy()
        times[place] -= seconds
        return (times,)

    return Suspect(cause, Place(rank=place), mend, seconds)


def longest(state):
    return state[0].max(axis=0)


def test_causes_that_hide_each_other_are_found_one_after_the_other():
    times = np.array([[10.0, 10.0], [9.0, 9.0], [5.0, 5.0]])
    found, state = find_causes(
        longest, (times,), [suspect(0, 5.0), suspect(1, 4.0, "data"), suspect(2, 1.0, "host")]
    )
    assert [(one.cause, one.gain_s.mean(), one.alone_s.mean()) for one in found] == [
        ("worker", 1.0, 1.0),
        ("data", 4.0, 0.0),
    ]
    assert longest(state).mean() == 5.0


def test_several_that_gain_more_together_come_before_a_single_one_of_another_kind():
    times = np.array([[6.0], [5.0], [5.0], [5.0], [79.0]])
    suspects = [suspect(0, 6.0), *(suspect(place, 5.0, "host") for place in (1, 2, 3))]
    found, _ = find_causes(lambda state: state[0].sum(axis=0), (times,), suspects)
    assert [(one.cause, float(one.gain_s[0])) for one in found] == [("host", 15.0), ("worker", 6.0)]


def test_nothing_that_gains_is_no_cause():
    assert find_causes(longest, (np.ones((2, 3)),), [suspect(0, 0.5)])[0] == []
    assert find_causes(longest, (np.ones((2, 3)),), [])[0] == []


def test_evidence_is_the_chance_that_more_steps_would_say_the_same():
    assert exceeds(np.full(4, 0.05), 0.05) == 0.5
    assert exceeds(np.full(4, 0.05 + 2 * FLOOR), 0.05) == pytest.approx(0.977, abs=1e-3)
    assert exceeds(np.array([0.0, 0.2]), 0.05) < exceeds(np.array([0.1, 0.1]), 0.05)
    assert exceeds(np.array([0.0, 0.2]), 0.05) < exceeds(np.array([0.0, 0.2] * 8), 0.05)
    assert (
        known(0.1, 1) < known(0.0, 1) < known(0.0, 8) and known(-0.1, 2, 0.5) == known(0.1, 2) / 2
    )


@pytest.mark.parametrize("kind", CALIBRATION)
def test_more_evidence_is_never_less_sure(kind):
    sure = [calibrated(raw, kind) for raw in np.linspace(0, 1, 50)]
    assert sure == sorted(sure) and sure[0] >= 0 and sure[-1] <= 1


def test_ranks_that_share_a_replica_are_not_told_apart():
    """Of those of a TP or CP group each pass takes as long as the slowest one's."""
    places = [Place(unit="llm", stage=0, replica=1, cp_rank=at, rank=4 + at) for at in range(2)]
    gain_s = np.array([0.5])
    record = SimpleNamespace(losses=SimpleNamespace(rank_factor={4: 1.5, 5: 1.5}), slow_clocks={})
    explanation = explain(record, Finding("worker", places, gain_s, gain_s))
    assert explanation.sentence.startswith(
        "Ranks 4 and 5 (llm, stage 0, replica 1), which wait for each other"
    )
    assert explanation.place == Place(unit="llm", stage=0, replica=1)
    assert "--profile-steps" in explanation.advice
    others = [Place(unit=unit, stage=0, replica=1, rank=at) for at, unit in ((4, "llm"), (5, "e"))]
    explanation = explain(record, Finding("worker", others, gain_s, gain_s))
    assert (
        "Ranks 4 and 5 are slow" in explanation.sentence
        and "fixing any one of them alone" in explanation.sentence
    )
