"""How sure a prediction is: expected step and range, and layouts whose order is not known."""

from dataclasses import replace

import pytest

from disttrain_cli.costs.hardware import analytic_device, link_profile
from disttrain_cli.errors import SpecError
from disttrain_cli.planning.draws import Draws
from disttrain_cli.planning.explain import explain
from disttrain_cli.planning.infeasible import infeasible
from disttrain_cli.planning.predict import predict, simulated_s, simulated_step
from disttrain_cli.planning.ranges import (
    Order,
    compared,
    grounds,
    order_of,
    order_sentence,
    orders_of,
    range_sentence,
    with_range,
)
from disttrain_cli.planning.resize import resized
from disttrain_cli.planning.solve import cluster_of, ranked_as, solve
from disttrain_cli.planning.units import Cluster, units_of
from disttrain_cli.spec.layer_costs import Polynomial, combine
from disttrain_cli.spec.plan import Plan
from disttrain_cli.spec.profile import Profile
from disttrain_cli.spec.runfile import RunFile
from tests.cases import first_fast
from tests.planning import synthetic


def profiled(run: RunFile, kind: str) -> Profile:
    profile = synthetic.tiny(run, kind="cuda" if kind == "analytic" else kind)
    device = profile.device.model_copy(update={"kind": kind, "name": "H100"})
    links = link_profile(analytic_device("H100", run.cluster, "bf16"), run.cluster)
    return profile.model_copy(update={"device": device, "links": links})


RUN = synthetic.run_file(batch=12, gpus=6)
Planned = tuple[Plan, Cluster]


@pytest.fixture(scope="module")
def planned() -> Planned:
    costs = synthetic.tiny(RUN, kind="cuda")
    return solve(RUN, costs, top=2), ranked_as(cluster_of(RUN, costs))


@pytest.mark.parametrize("kind", first_fast(["cuda", "analytic", "cpu"]))
def test_the_expected_step_lies_within_its_range(planned: Planned, kind: str) -> None:
    (plan, cluster), profile = planned, profiled(RUN, kind)
    draws = Draws(profile, cluster)
    now_s = simulated_s(profile, plan.plan, cluster, draws=draws)
    before = plan.predicted.model_copy(update={"iteration_s": now_s})
    predicted = with_range(before, profile, plan.plan, cluster, draws)
    assert predicted.iteration_s == now_s and predicted.range_s and predicted.expected_s
    low_s, high_s = predicted.range_s
    assert low_s <= now_s <= predicted.expected_s < high_s
    assert (low_s == now_s) == (kind == "analytic")
    sentence = range_sentence(predicted)
    assert sentence and all(what in sentence for what in predicted.doubts)
    assert range_sentence(before) is None
    other_s = 3 * now_s  # the prediction of another ordering than layouts are ranked by
    scaled = with_range(
        before.model_copy(update={"iteration_s": other_s}), profile, plan.plan, cluster, draws
    )
    assert scaled.expected_s == pytest.approx(3 * predicted.expected_s)


def test_layouts_are_compared_on_the_same_batches(planned: Planned) -> None:
    (plan, cluster), profile = planned, profiled(RUN, "analytic")
    draws, layout = Draws(profile, cluster), plan.plan
    assert compared(profile, cluster, draws, layout, layout) == Order("tie", 0.0, 0.0)
    slower = plan.baselines["disaggregated"]
    assert slower is not None and slower.plan is not None
    order = compared(profile, cluster, draws, layout, slower.plan)
    assert order.verdict == "first" and order.expected > 0.01
    assert compared(profile, cluster, draws, slower.plan, layout).verdict == "second"
    assert orders_of(plan, profile, cluster, draws)["disaggregated"] == order
    assert {"#2", "#3"} <= orders_of(plan, profile, cluster, draws).keys()
    assert orders_of(plan, profiled(RUN, "cpu"), cluster, draws) == {}


@pytest.mark.parametrize(
    ("first_s", "second_s", "verdict"),
    [
        ((1.0, 1.2), (1.009, 1.195), "tie"),
        ((1.0, 1.2), (1.011, 1.21), "first"),
        ((1.0, 1.2), (0.995, 1.15), "second"),
        ((1.0, 1.2), (1.005, 1.15), "flips"),
        ((1.0, 1.2), (0.95, 1.3), "flips"),
        ((1.0, 1.2), (1.05, 1.2), "first"),
    ],
)
def test_verdicts(
    first_s: tuple[float, float], second_s: tuple[float, float], verdict: str
) -> None:
    assert order_of(first_s, second_s).verdict == verdict


def test_what_is_not_known_is_said() -> None:
    sure = {"#2": Order("first", 0.05, 0.04)}
    assert order_sentence(sure) is None
    sentence = order_sentence(
        sure
        | {
            "#3": Order("tie", 0.001, -0.002),
            "#4": Order("flips", 0.02, -0.03),
            "megatron": Order("second", -0.02, -0.04),
        }
    )
    assert sentence is not None and "#2" not in sentence
    for words in (
        "#3 within 1 % of the plan",
        "#4 takes 2.0 % more at the expected and 3.0 % less at the pessimistic",
        "megatron takes 2.0 % less at the expected and 4.0 % less",
    ):
        assert words in sentence


@pytest.mark.parametrize(
    ("kind", "nodes", "words"),
    [
        ("analytic", 1, "the catalogue's kernels and links, none of them measured here"),
        ("cuda", 1, "measured kernels and links"),
        ("analytic", 2, "and the run file's network between nodes, none of them measured here"),
    ],
)
def test_what_was_measured_is_said(kind: str, nodes: int, words: str) -> None:
    profile = profiled(synthetic.run_file(gpus=6, nodes=nodes), kind)
    assert words in grounds(profile, 6)
    assert "network" not in grounds(profile, 6 // nodes)
    calibrated = profile.model_copy(update={"provenance": {"calibrated": "a run"}})
    assert "a run's traces" in grounds(calibrated, 6)
    assert grounds(calibrated, 1) == "kernels corrected by a run's traces"
    alone = profile.links.model_copy(update={"inter_node": None})
    cuda = profile.device.model_copy(update={"kind": "cuda"})
    unknown = profile.model_copy(update={"links": alone, "device": cuda})
    assert ("network between nodes, which was not measured" in grounds(unknown, 6)) == (nodes > 1)


def test_a_margin_is_left_free_and_a_plan_without_room_says_so() -> None:
    run = synthetic.run_file(batch=12, gpus=6, memory_margin_gib=1.5)
    profile = synthetic.tiny(run, kind="cuda")
    cluster = cluster_of(run, profile)
    assert (cluster.memory_gib, cluster.margin_gib) == (2.5, 1.5)
    assert replace(cluster, memory_gib=4.0, margin_gib=0.0) == cluster_of(RUN, profile)
    assert RUN.cluster_fingerprint() != run.cluster_fingerprint()  # its plan is another
    assert resized(run, synthetic.tiny(RUN, kind="cuda")).cluster == run.cluster
    assert resized(RUN, profile).cluster == RUN.cluster
    with pytest.raises(SpecError, match="leaves no memory"):
        cluster_of(synthetic.run_file(gpus=6, memory_margin_gib=4), profile)


def test_where_nothing_fits_the_margin_is_named() -> None:
    profile = synthetic.tiny(RUN, kind="cuda")
    least = replace(cluster_of(RUN, profile), memory_gib=0.01, margin_gib=3.99)
    error = infeasible(profile, least, "disaggregated")
    assert "a device has 4 GiB less cluster.memory_margin_gib: 3.99" in error.why
    assert "a smaller cluster.memory_margin_gib" in error.next_step


@pytest.mark.parametrize(("room", "tight"), [(1.001, True), (1.02, True), (1.04, False)])
def test_a_device_nearly_full_is_reported(planned: Planned, room: float, tight: bool) -> None:
    plan, cluster = planned
    profile = synthetic.tiny(RUN, kind="cuda")
    memory = [
        stage.model_copy(update={"limit_gib": room * stage.peak_gib, "reserve_gib": 0.001})
        for stage in plan.predicted.memory
    ]
    predicted = plan.predicted.model_copy(update={"memory": memory})
    full = plan.model_copy(update={"predicted": predicted, "alternatives": []})
    step = simulated_step(profile, plan.plan, cluster)
    why = explain(full, units_of(profile, cluster, plan.plan), step)
    told = next(sentence for sentence in why.sentences if sentence.startswith("Memory"))
    assert ("Nearly full: less than 3 %" in told) == tight


def test_causal_attention_is_counted_both_ways(planned: Planned) -> None:
    plan, cluster = planned
    profile = synthetic.tiny(RUN, kind="cuda")
    plain = predict(units_of(profile, cluster, plan.plan), plan.plan, cluster)
    assert plain.mfu_causal == pytest.approx(plain.mfu)  # no layer here has attention
    llm = profile.modules["llm"]
    scores = Polynomial(per_length_sq=1e3)
    block = llm.costs["block"]
    counted = {
        name: combine((1.0, getattr(block, name)), (1.0, scores))
        for name in ("forward_flops", "backward_flops")
    }
    costs = llm.costs | {"block": block.model_copy(update=counted)}
    modules = profile.modules | {"llm": llm.model_copy(update={"costs": costs})}
    attending = profile.model_copy(update={"modules": modules})
    both = predict(units_of(attending, cluster, plan.plan), plan.plan, cluster)
    assert both.mfu_causal is not None and both.mfu > plain.mfu
    assert both.mfu_causal == pytest.approx((both.mfu + plain.mfu) / 2)
