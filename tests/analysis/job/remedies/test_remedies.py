"""Remedies beside the truth: jobs with faults, and the same jobs without one of them, played
themselves."""

import itertools
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from disttrain_cli.analysis.analyze import analyze
from disttrain_cli.analysis.job.database import open_database
from disttrain_cli.analysis.job.graph import build_graph
from disttrain_cli.analysis.job.remedies.remedies import remedies, with_layouts
from disttrain_cli.analysis.job.remedies.suspects import own_suspects
from disttrain_cli.analysis.losses import explain, split_losses
from disttrain_cli.analysis.record import Record
from disttrain_cli.analysis.report import predictions
from disttrain_cli.analysis.result.verdicts import Remedy
from disttrain_cli.analysis.verdict import fitting, judge
from disttrain_cli.spec.plan import Layout, UnitPlan
from tests.analysis import simulated, synthetic
from tests.planning import synthetic as planning

STEPS = 4
#: Of the recorded step: ends of sends and of the update are taken at their usual time beside the
#: rest.
TOLERANCE = 0.01
#: By cause, what is put in, and what the job has instead once it is mended.
FAULTS = {
    "stage": ({"slow_stage": {1: 1.5}}, {}),
    "worker": ({"slow_rank": {3: 1.6}}, {}),
    "communication": ({"transfer_ms": 20.0}, {}),
    "data": ({"load_ms": 40.0}, {"load_ms": 0.0}),
    "host": ({"gap_ms": 15.0}, {}),
    "inter_microbatch": ({"slot_skew": 0.5}, {}),
}


def windows_s(**faults):
    """Seconds of the measured steps of the job itself."""
    truth = synthetic.simulate(synthetic.Synthetic(steps=STEPS, **faults))
    return np.mean([(end - start) / 1e9 for start, end in truth.windows[-(STEPS - 1) :]])


def found_in(folder, **faults):
    """The remedies of the job other than layouts, without the rest of an analysis."""
    synthetic.write(folder, synthetic.Synthetic(steps=STEPS, **faults), segments=1)
    database = open_database([folder])
    graph = build_graph(database)
    why = explain(graph, graph.recorded.compute, graph.predicted)
    return remedies(database, graph, own_suspects(graph, why, {}), [])


def of(found, cause):
    """The remedy of a cause that gains most."""
    return next(remedy for remedy in found if remedy.cause == cause)


@pytest.mark.parametrize("cause", FAULTS)
def test_a_fault_costs_what_the_job_without_it_saves(tmp_path, cause):
    fault, mended = FAULTS[cause]
    remedy, true_s = of(found_in(tmp_path, **fault), cause), windows_s(**mended)
    assert remedy.step_s == pytest.approx(true_s, rel=TOLERANCE)
    assert remedy.gain_s == pytest.approx(windows_s(**fault) - true_s, rel=0.05)
    assert remedy.gain_pct == pytest.approx(100 * remedy.gain_s / (remedy.step_s + remedy.gain_s))


def test_of_two_faults_each_is_mended_alone(tmp_path):
    found = found_in(tmp_path, **FAULTS["worker"][0], **FAULTS["data"][0])
    left_s = windows_s(**FAULTS["data"][0])
    assert of(found, "worker").step_s == pytest.approx(left_s, rel=2 * TOLERANCE)


def test_stages_of_unequal_work_gain_by_levelling(tmp_path):
    """Without a profile nobody knows that a stage is slower than its work explains."""
    synthetic.write(tmp_path, synthetic.Synthetic(steps=STEPS, slow_stage={1: 1.5}))
    (tmp_path / "job.json").unlink()
    remedy = of(analyze([tmp_path]).remedies, "stage")
    assert remedy.step_s == pytest.approx(windows_s(slow_stage={0: 1.25, 1: 1.25}), rel=TOLERANCE)


def test_levelled_replicas_take_the_mean(tmp_path, monkeypatch):
    """Of two replicas one has three times the work of the other in every slot."""
    signs = itertools.cycle((-1, 1))
    monkeypatch.setattr(
        synthetic.random, "Random", lambda seed: SimpleNamespace(choice=lambda _: next(signs))
    )
    remedy = of(found_in(tmp_path, skew=0.5), "intra_microbatch")
    assert remedy.step_s == pytest.approx(windows_s(), rel=TOLERANCE)
    assert remedy.gain_pct > 20


def test_one_more_generator_halves_its_passes(tmp_path):
    synthetic.write(tmp_path, synthetic.Synthetic(steps=STEPS, unit_factor={"generator": 2.0}))
    found = analyze([tmp_path])
    remedy = fitting(found.remedies, "unit")
    assert remedy.change == "generator DP 1 → 2 on 1 more device" and remedy.gpus == 1
    assert remedy.step_s == pytest.approx(windows_s(), rel=TOLERANCE)
    assert remedy.command == f"disttrain profile --calibrate {tmp_path} && disttrain plan --gpus 7"
    assert f"a step would take {remedy.step_s:.3g} instead of" in found.verdict.advice
    assert found.verdict.next_command == remedy.command


def test_nothing_gains_in_a_clean_even_job(tmp_path):
    found = found_in(tmp_path)
    assert {remedy.cause for remedy in found} >= set(FAULTS) - {"worker", "host"}
    assert all(abs(remedy.gain_pct) < 100 * TOLERANCE for remedy in found)
    assert [remedy.gain_s for remedy in found] == sorted(
        (remedy.gain_s for remedy in found), reverse=True
    )


def test_without_a_profile_nothing_is_said_of_other_layouts(tmp_path):
    synthetic.write(tmp_path, synthetic.Synthetic(steps=STEPS, slow_rank={3: 1.6}))
    (tmp_path / "job.json").unlink()
    found = analyze([tmp_path]).remedies
    assert {remedy.cause for remedy in found} >= {
        "worker",
        "stage",
        "data",
        "communication",
        "intra_microbatch",
    }
    assert "unit" not in {remedy.cause for remedy in found}
    assert of(found, "worker").step_s == pytest.approx(windows_s(), rel=TOLERANCE)


def test_units_of_several_modules_have_replicas_too(tmp_path):
    """A unit with the LLM in it shares sequences, whatever else it holds."""
    units = [["image_encoder", "llm"], ["image_generator"]]
    profile = planning.tiny(planning.run_file(batch=24, gpus=6), kind="cuda")
    layers = {"image_encoder": 4, "llm": 6, "image_generator": 4}
    plans = [
        UnitPlan(
            name="+".join(names),
            modules=names,
            gpus=1,
            layers_per_stage=[sum(layers[n] for n in names)],
        )
        for names in units
    ]
    layout = Layout(
        global_batch_size=24, microbatch_size=1, microbatches=24, gpus_used=len(plans), units=plans
    )
    simulated.write(tmp_path, profile, layout, STEPS)
    remedy = next(
        one
        for one in analyze([tmp_path]).remedies
        if one.change.startswith(f"{plans[0].name} DP 1 → 2")
    )
    twice = [plans[0].model_copy(update={"dp": 2, "gpus": 2}), *plans[1:]]
    then = layout.model_copy(
        update={"units": twice, "gpus_used": len(plans) + 1, "microbatches": 12}
    )
    true_s = np.mean(
        [timeline.iteration_s for *_, timeline in simulated.play(profile, then, STEPS)][1:]
    )
    assert remedy.step_s == pytest.approx(true_s, rel=0.05)


@pytest.mark.slow
@settings(max_examples=10, deadline=None)
@given(
    fault=st.fixed_dictionaries(
        {},
        optional={
            "skew": st.floats(0.0, 0.6),
            "load_ms": st.floats(0.0, 30.0),
            "gap_ms": st.floats(0.0, 20.0),
            "late_ms": st.floats(0.0, 30.0),
            "slow_rank": st.dictionaries(st.integers(0, 5), st.floats(1.0, 2.0), max_size=2),
            "slow_stage": st.dictionaries(st.integers(0, 1), st.floats(1.0, 2.0), max_size=1),
        },
    )
)
def test_taking_delays_away_never_lengthens_a_step(tmp_path_factory, fault):
    """Levelled work may, where it fills the pipeline later: it is left out here."""
    found = found_in(tmp_path_factory.mktemp("fault"), **fault)
    for cause in ("worker", "communication", "data"):
        assert all(remedy.gain_pct > -1e-6 for remedy in found if remedy.cause == cause)


UNBALANCED = {
    "image_encoder": {"dp": 3, "layers_per_stage": [4]},
    "llm": {"dp": 2, "layers_per_stage": [6]},
    "image_generator": {"dp": 3, "layers_per_stage": [4]},
}


@pytest.fixture(scope="module")
def unbalanced(tmp_path_factory):
    """(profile, analysis, folder) of a job whose LLM has too few devices."""
    folder = tmp_path_factory.mktemp("unbalanced")
    profile = planning.tiny(planning.run_file(batch=48, gpus=12), kind="cuda")
    simulated.write(folder, profile, simulated.layout_of(profile, 48, 12, **UNBALANCED), STEPS)
    return profile, analyze([folder]), folder


def test_a_badly_shared_job_is_handed_back_to_planning(unbalanced):
    _, found, folder = unbalanced
    planned = fitting(found.remedies, "unit")
    assert found.verdict.cause == "unit" and planned.basis == "plan" and planned.gpus <= 0
    assert found.verdict.next_command == f"disttrain profile --calibrate {folder} && disttrain plan"
    assert (
        f"By the planner, a step would take {planned.step_s:.3g} instead of" in found.verdict.advice
    )
    assert planned.change in found.verdict.advice
    swapped = [remedy for remedy in found.remedies if "on the same devices" in remedy.change]
    assert len(swapped) == 1 and 0 < swapped[0].gain_s <= planned.gain_s


def test_what_more_devices_would_gain_is_told_too(unbalanced):
    """Where they gain more than what can be done with those there are."""
    folder = unbalanced[2]
    database = open_database([folder])
    losses = split_losses(build_graph(database))
    free, bought = (
        Remedy(
            cause="unit",
            change=change,
            command=change,
            basis="replay",
            gpus=gpus,
            step_s=1.0,
            gain_s=gain_s,
            gain_pct=100 * gain_s,
            at_most=False,
        )
        for change, gpus, gain_s in (("a swap", 0, 0.2), ("one more", 1, 0.5))
    )

    def verdict(*known):
        record = Record(
            losses=losses,
            where={},
            comparisons=[],
            gpus=8,
            kind="disttrain",
            remedies=known,
            shares={"warmup": 0.1, "drain": 0.1},
        )
        return judge(record, with_layouts([], known, losses, lambda some: losses.lost["stage"], []))

    found = verdict(bought, free)
    assert found.cause == "unit" and found.next_command == "a swap"
    assert found.advice.index("with a swap.") < found.advice.index("with one more.")
    assert "one more" not in verdict(free).advice
    little = replace(free, gain_s=0.001, gain_pct=0.1)
    assert verdict(bought, little).cause == verdict(bought).cause == "none"
    assert "which none of the tried layouts avoids" in verdict(bought, little).headline
    assert "with one more." in verdict(bought, little).advice


def test_what_gains_is_shown(unbalanced):
    _, found, _ = unbalanced
    page = predictions.remedies(found)
    worth = [remedy for remedy in found.remedies if remedy.worth]
    assert page.count("<tr>") == 1 + len(worth) < 1 + len(found.remedies)
    assert "disttrain plan --gpus 9" in page  # one more of the LLM


def test_free_changes_come_before_bought_ones():
    def remedy(gain_pct, gpus=0, basis="replay", cause="unit", at_most=False):
        return Remedy(
            cause=cause,
            change=f"{gain_pct}",
            command="",
            basis=basis,
            gpus=gpus,
            step_s=1.0,
            gain_s=gain_pct,
            gain_pct=gain_pct,
            at_most=at_most,
        )

    free = remedy(5.0)
    bought = remedy(30.0, gpus=1)
    planned = remedy(4.0, basis="plan")
    little = remedy(0.5)
    assert fitting([bought, free, little, planned], "unit") is planned
    assert fitting([bought, free, little], "unit") is free
    assert fitting([bought, little], "unit") is bought
    assert fitting([little, remedy(9.0, cause="data")], "unit") is None
    assert fitting([remedy(9.0, at_most=True), free], "unit") is free
