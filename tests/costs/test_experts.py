"""What an EP group costs: a share of the experts, exchanges, buffers; and who may have one."""

from __future__ import annotations

import numpy as np
import pytest

from disttrain_cli.costs.experts import exchanged_ms, misfit
from disttrain_cli.costs.layout import optimizer_s, reduce_s, replica_ms, stages_of
from disttrain_cli.costs.links import all_reduce_s, exchange_s
from disttrain_cli.costs.memory import GIB, bytes_per_parameter, layout_memory
from disttrain_cli.costs.overlap import hidden
from disttrain_cli.planning.traffic import traffic_of
from disttrain_cli.spec.plan import Layout
from disttrain_cli.spec.profile import Experts, Profile
from disttrain_cli.spec.shape import ParallelShape
from tests.costs.test_memory import layout
from tests.planning import synthetic

#: Experts of a block, three quarters of its parameters.
TOTAL, CHOSEN, WIDTH = 8, 2, 16


def with_experts(profile: Profile) -> Profile:
    """The profile, with experts in the blocks of its LLM."""
    llm = profile.modules["llm"]
    costs = {
        kind: cost.model_copy(
            update={
                "experts": Experts(
                    TOTAL, CHOSEN, WIDTH, cost.parameters * 3 // 4, cost.parameters * 3 // 4
                )
                if kind == "block"
                else None
            }
        )
        for kind, cost in llm.costs.items()
    }
    modules = profile.modules | {"llm": llm.model_copy(update={"costs": costs})}
    return profile.model_copy(update={"modules": modules})


PROFILE = with_experts(synthetic.tiny(synthetic.run_file()))


def over(ep: int, zero_stage: int = 1) -> Layout:
    """The LLM with DP 4 and this EP."""
    given = layout(4)
    units = [
        unit.model_copy(update={"dp": 4, "ep": ep, "gpus": 8}) if unit.modules == ["llm"] else unit
        for unit in given.units
    ]
    used = sum(unit.gpus for unit in units)
    return given.model_copy(
        update={
            "units": units,
            "zero_stage": zero_stage,
            "microbatch_size": 1,
            "gpus_used": used,
        }
    )


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("zero_stage", [0, 1])
def test_experts_are_divided_over_the_group_and_their_states_over_the_rest(
    precision: str, zero_stage: int
) -> None:
    profile = PROFILE.model_copy(update={"precision": precision})
    kept, shared = bytes_per_parameter(precision, zero_stage)
    dp = 4
    for ep in (1, 2, 4):
        one = over(ep, zero_stage)
        memory = [row for row in layout_memory(profile, one, 1e3) if row.unit == "l"]
        for stage, row in zip(
            (stage for stage in stages_of(profile, one) if stage.unit.name == "l"),
            memory,
            strict=True,
        ):
            costs = profile.modules["llm"].costs
            experts = sum(
                costs[kind].experts.parameters for _, kind, _ in stage.held if costs[kind].experts
            )
            dense = sum(costs[kind].parameters for _, kind, _ in stage.held) - experts
            expected = (kept + shared / dp) * dense + (kept + shared * ep / dp) * experts / ep
            states = row.weights_gib + row.gradients_gib + row.optimizer_gib
            if precision == "bf16":  # fp32's gradients may be absent at the peak
                assert states * GIB == pytest.approx(expected)
            assert stage.trained == pytest.approx(dense + experts / ep)


def test_rows_are_exchanged_twice_a_pass_and_counts_once() -> None:
    profile = balanced(PROFILE)
    cost, links = profile.modules["llm"].costs["block"], profile.links
    work = PROFILE.modules["llm"].work_per_sequence
    rows = work.items * PROFILE.inputs.sequence_length
    size = CHOSEN * WIDTH * {"fp32": 4, "bf16": 2}[PROFILE.precision] * rows / 2  # over CP 2
    shape = ParallelShape(cp=2, ep=4)
    forward, backward = (
        skewed - alone
        for skewed, alone in zip(
            exchanged_ms(profile, "llm", cost, shape, "trained"),
            exchanged_ms(profile, "llm", cost, ParallelShape(cp=2), "trained"),
            strict=True,
        )
    )
    sent_s = exchange_s(links, size, 4, 4)
    assert backward(work) == pytest.approx(2e3 * sent_s)
    latency_ms = 1e3 * exchange_s(links, 0.0, 4, 4)
    assert forward(work) - backward(work) == pytest.approx(latency_ms)
    still = exchanged_ms(PROFILE, "llm", cost, shape, "still")
    assert still[0] == forward and still[1](work) == 0.0
    none = exchanged_ms(PROFILE, "llm", cost, ParallelShape(tp=2), "trained")
    assert [part(work) for part in none] == [0.0, 0.0]


def test_gradients_of_experts_are_reduced_over_those_with_the_same() -> None:
    for zero_stage in (0, 1):
        alone, divided = over(1, zero_stage), over(4, zero_stage)
        for before, after in zip(
            stages_of(PROFILE, alone), stages_of(PROFILE, divided), strict=True
        ):
            if after.trained_experts:
                pairs = ((divided, after), (alone, before))
                assert after.trained_experts * 4 + after.trained - after.trained_experts == (
                    pytest.approx(before.trained)
                )
                assert reduce_s(PROFILE, divided, after, 8) < reduce_s(PROFILE, alone, before, 8)
                if not zero_stage:
                    dense = (after.trained - after.trained_experts) * 4.0
                    expected = all_reduce_s(PROFILE.links, dense, 4)
                    assert reduce_s(PROFILE, divided, after, 8) == pytest.approx(expected)
                else:
                    stepped = (optimizer_s(PROFILE, each, one, 8) for each, one in pairs)
                    assert next(stepped) < next(stepped)
        last = hidden(PROFILE, divided, stages_of(PROFILE, divided), 8)
        assert all(np.isfinite(one.mean_s).all() for one in last)


def test_traffic_lists_what_an_ep_group_exchanges() -> None:
    layouts = {ep: over(ep) for ep in (1, 4)}
    kinds = {
        ep: {
            row.kind: row.job_gib
            for row in traffic_of(PROFILE, one, stages_of(PROFILE, one), 8)
            if row.unit == "l"
        }
        for ep, one in layouts.items()
    }
    assert "expert_parallel" not in kinds[1]
    assert kinds[4]["expert_parallel"] > 0.0
    assert kinds[4]["gradients"] < kinds[1]["gradients"]


def test_replicas_of_a_group_take_as_long_as_the_busiest() -> None:
    loads = np.array([[[0.0, tokens, 0.0] for tokens in (1.0, 3.0, 2.0, 5.0)]])
    times = np.array([0.0, 0.0, 1.0, 0.0])
    assert replica_ms(times, loads, 4).tolist() == [[1.0, 3.0, 2.0, 5.0]]
    assert replica_ms(times, loads, 4, together=2).tolist() == [[3.0, 3.0, 5.0, 5.0]]


@pytest.mark.parametrize(
    ("modules", "ep", "words"),
    [
        (["llm"], 3, "EP 3 must divide the 8 experts of llm"),
        (["image_encoder"], 2, "no layer of image_encoder has experts"),
        (["image_encoder", "llm"], 8, None),
        (["image_encoder"], 1, None),
    ],
)
def test_a_wrong_degree_is_refused_by_name(modules: list[str], ep: int, words: str | None) -> None:
    why = misfit(PROFILE, modules, ParallelShape(dp=24, ep=ep))
    assert (why is None) if words is None else (why is not None and words in why)
