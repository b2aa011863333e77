"""What an EP group costs: a share of the experts, exchanges, buffers; and who may have one."""

from dataclasses import replace

import numpy as np
import pytest

from disttrain_cli.costs.experts import (
    HALF_S,
    SLOWED,
    TILE_ROWS,
    _computing_ms,
    exchanged_bytes,
    exchanged_ms,
    local_shard,
    misfit,
    placed,
)
from disttrain_cli.costs.layout import optimizer_s, reduce_s, replica_ms, stages_of
from disttrain_cli.costs.links import all_reduce_s, exchange_s
from disttrain_cli.costs.memory import GIB, bytes_per_parameter, layout_memory
from disttrain_cli.costs.overlap import hidden
from disttrain_cli.costs.routing import QUANTILE, balanced, drawn, slowest
from disttrain_cli.costs.stage import overlap_helps, unit_times
from disttrain_cli.planning.traffic import traffic_of
from disttrain_cli.spec.layer_costs import Experts, Polynomial, combine
from disttrain_cli.spec.plan import Layout
from disttrain_cli.spec.profile import Profile
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
    profile, shape = balanced(PROFILE), ParallelShape(ep=4)
    cost, links = profile.modules["llm"].costs["block"], profile.links
    assert profile.device.optimizer_ns_per_parameter == 0.0  # copies take no time
    work = profile.modules["llm"].work_per_sequence
    rows = work.items * profile.inputs.sequence_length
    forward, backward = exchanged_ms(profile, "llm", cost, shape, "trained")
    # of four pairs of the eight experts, a rank has one or two of a row's two with 1 - 6·5/(8·7)
    arrived = 4 * rows * (1 - 6 * 5 / (8 * 7))
    row_bytes = WIDTH * {"fp32": 4, "bf16": 2}[profile.precision]
    sent = [exchange_s(links, arrived * (row_bytes + extra), 4, 4) for extra in (0, 8, 16)]
    assert backward(work) == pytest.approx(1e3 * (sent[0] + sent[1]))
    latency_ms = 1e3 * exchange_s(links, 0.0, 4, 4)
    assert forward(work) == pytest.approx(1e3 * (sent[0] + sent[2]) + latency_ms)
    still = exchanged_ms(profile, "llm", cost, shape, "still")
    assert still[0] == forward and still[1](work) == 0.0
    none = exchanged_ms(profile, "llm", cost, ParallelShape(), "trained")
    assert [part(work) for part in none] == [0.0, 0.0]


def test_a_group_waits_for_the_rank_with_most_rows() -> None:
    shape, work = ParallelShape(ep=4), PROFILE.modules["llm"].work_per_sequence
    cost = PROFILE.modules["llm"].costs["block"]
    load = slowest(cost.experts, ep=4, rows=work.items * PROFILE.inputs.sequence_length)
    assert load > 1.1
    even, skewed = (
        exchanged_ms(profile, "llm", profile.modules["llm"].costs["block"], shape, "trained")
        for profile in (balanced(PROFILE), PROFILE)
    )
    # rows of exchanges, and experts, three quarters of the layer's parameters and FLOPs
    computing = cost.tp["1"].forward_ms, cost.tp["1"].backward_ms
    latency_ms = 1e3 * exchange_s(PROFILE.links, 0.0, 4, 4)
    for before, after, time, latencies in zip(even, skewed, computing, (3, 2), strict=True):
        experts_ms = (
            after(work) - before(work) - (load - 1) * (before(work) - latencies * latency_ms)
        )
        assert 0 < experts_ms < (load - 1) * (time(work) - time.base)


@pytest.mark.parametrize("adapters", [False, True])
def test_a_pass_takes_the_weights_of_the_ranks_own_experts_alone(adapters: bool) -> None:
    """An optimizer step moves 42 bytes of a parameter in 42 ms here: a byte of each takes 1 ms."""
    count = 1_000
    byte_ns = {"optimizer_ns_per_parameter": 42.0 * 1e6 / count}
    device = PROFILE.device.model_copy(update={"kind": "analytic"} | byte_ns)
    cost = PROFILE.modules["llm"].costs["block"]
    assert cost.experts is not None
    experts = cost.experts._replace(parameters=count, trained=0 if adapters else count)
    times = {"forward_ms": 3.0, "backward_ms": 20.0, "backward_input_ms": 1.0, "weight_ms": 5.0}
    bases = {name: Polynomial(base=base, per_item=7.0) for name, base in times.items()}
    whole = cost.tp["1"].model_copy(update=bases)
    costs = {"block": cost.model_copy(update={"experts": experts})}
    modules = {"llm": PROFILE.modules["llm"].model_copy(update={"costs": costs})}
    profile = PROFILE.model_copy(update={"device": device, "precision": "bf16", "modules": modules})
    shards = [
        local_shard(profile, "llm", "block", ParallelShape(ep=ep), whole) for ep in (1, 2, 4, 8)
    ]
    assert shards[0] is whole
    # bf16: weights are read; gradients are written, and read to be added to sums of 4 bytes
    bytes_moved = {
        "forward_ms": 2.0,
        "backward_ms": 2.0 if adapters else 2.0 + 2.0 + 2.0 + 8.0,
        "backward_input_ms": 1.0,  # of 2: all of its base
    }
    for ep, shard in zip((1, 2, 4, 8), shards, strict=True):
        for name, moved in bytes_moved.items():
            time = getattr(shard, name)
            assert time.base == pytest.approx(times[name] - moved * (1 - 1 / ep))
            assert time == bases[name].model_copy(update={"base": time.base})
        assert shard.weight_ms.base == pytest.approx(shard.backward_ms.base / 4)
    unknown = profile.model_copy(update={"device": PROFILE.device})
    assert local_shard(unknown, "llm", "block", ParallelShape(ep=4), whole) == whole


def test_searched_and_planned_times_save_the_same_and_more_in_a_larger_group() -> None:
    device = PROFILE.device.model_copy(update={"optimizer_ns_per_parameter": 10.0})
    known = PROFILE.model_copy(update={"device": device})

    def bases(profile: Profile, ep: int) -> tuple[float, float]:
        """Sums over the LLM's layers in plans and in the search, forward and backward."""
        layout = over(ep)
        shape = layout.unit_of("llm").shape
        costs = [
            cost
            for stage in stages_of(profile, layout)
            for cost in stage.costs
            if cost.module == "llm"
        ]
        times = unit_times(profile, ["llm"], shape)
        return (
            float(sum(part[0] for cost in costs for part in cost.parts_ms)),
            float(times.forward_base.sum() + times.backward_base.sum()),
        )

    saved = {ep: np.subtract(bases(PROFILE, ep), bases(known, ep)) for ep in (1, 2, 4)}
    assert saved[1].tolist() == [0.0, 0.0]
    assert saved[2] == pytest.approx(saved[2][0]) and saved[4] == pytest.approx(1.5 * saved[2])
    assert saved[2][0] > 0.0


def held_by_rows() -> Profile:
    """The profile, with bytes that experts save and hold for each of their rows."""
    bytes_of_row = {"kept_bytes": 4e4, "frozen_kept_bytes": 2e4, "working_bytes": 5e4}
    llm = PROFILE.modules["llm"]
    experts = llm.costs["block"].experts
    assert experts is not None
    block = llm.costs["block"].model_copy(update={"experts": experts._replace(**bytes_of_row)})
    costs = {"costs": llm.costs | {"block": block}}
    modules = PROFILE.modules | {"llm": llm.model_copy(update=costs)}
    return PROFILE.model_copy(update={"modules": modules})


def test_of_200_routings_no_more_than_stated_need_more_than_the_priced_memory() -> None:
    profile, given = held_by_rows(), over(4)
    experts = profile.modules["llm"].costs["block"].experts
    assert experts is not None
    even, skewed = (
        [row for row in layout_memory(one, given, 1e3) if row.unit == "l"]
        for one in (balanced(profile), profile)
    )
    stages = [stage for stage in stages_of(profile, given) if stage.unit.name == "l"]
    rows = profile.inputs.sequence_length
    buffers = 2 * WIDTH * {"fp32": 4, "bf16": 2}[profile.precision]
    for before, after, stage in zip(even, skewed, stages, strict=True):
        mixtures = sum(kind == "block" for _, kind, _ in stage.held)
        slots = min(given.microbatches, stage.to_end)
        priced = (
            after.activations_gib
            + after.transient_gib
            - before.activations_gib
            - before.transient_gib
        ) * GIB
        above = 0
        for seed in range(200):
            arrived = drawn(experts, seed, ep=4, rows=rows, layers=mixtures).sum(axis=1)
            more = arrived - rows * CHOSEN
            saved = slots * experts.kept_bytes * more.sum(axis=0)
            held = (experts.working_bytes + buffers) * more.max(axis=0)
            above += bool((saved + held).max() > priced)
        assert above <= 200 * (1 - QUANTILE), (above, mixtures)
        assert (saved + held).max() > 0.1 * priced


def test_without_a_group_memory_is_as_before() -> None:
    profile = held_by_rows()
    assert layout_memory(profile, over(1), 1e3) == layout_memory(PROFILE, over(1), 1e3)
    assert stages_of(profile, over(1))[-1].costs[0].forward_ms.tolist() == (
        stages_of(balanced(profile), over(1))[-1].costs[0].forward_ms.tolist()
    )


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


@pytest.mark.parametrize("factor", [0.0, 1.0, 1e3])
def test_halves_expose_the_first_dispatch_and_the_last_combine(factor: float) -> None:
    """Whether the experts take no time, some, or far longer than the exchanges.

    Of a backward the last combine is overlapped with the gradients of the weights.
    """
    profile, shape = balanced(PROFILE), ParallelShape(ep=4)
    cost, work = profile.modules["llm"].costs["block"], profile.modules["llm"].work_per_sequence
    shard = cost.tp["1"]
    times = {
        name: combine((factor, getattr(shard, name))) for name in ("forward_ms", "backward_ms")
    }
    cost = cost.model_copy(update={"tp": {"1": shard.model_copy(update=times)}})
    experts = [part(work) for part in _computing_ms(profile, "llm", cost, shape, "trained")]
    whole, halves = (
        [part(work) for part in exchanged_ms(profile, "llm", cost, one, "trained")]
        for one in (shape, replace(shape, ep_overlap=True))
    )
    latency_ms = 1e3 * exchange_s(profile.links, 0.0, 4, 4)
    tiles = TILE_ROWS * TOTAL / 4 / (work.items * profile.inputs.sequence_length * CHOSEN)

    def slowed_ms(alone_ms: float, way_ms: float) -> float:
        return alone_ms + SLOWED * min(alone_ms, way_ms)

    for counts_ms, before, after, computing_ms, share in zip(
        (latency_ms, 0.0), whole, halves, experts, (0.0, 0.5), strict=True
    ):
        way_ms = (before - counts_ms) / 4 + latency_ms / 2  # half of the rows, all of the latency
        rows_ms = (1 - share) * computing_ms * (0.5 + tiles) + 1e3 * HALF_S / 2
        rows_ms = slowed_ms(rows_ms, way_ms)
        weights_ms = slowed_ms(share * computing_ms * (1 + 2 * tiles), way_ms)
        longer_ms = max(way_ms, rows_ms)
        expected = way_ms + longer_ms + max(rows_ms + weights_ms, longer_ms + way_ms) - computing_ms
        assert after - counts_ms == pytest.approx(expected)
        assert computing_ms > 0.0 or after > before


def test_halves_are_chosen_where_they_save_time() -> None:
    def helps(profile: Profile, ep: int = 4) -> bool:
        return overlap_helps(profile, ("llm",), ParallelShape(ep=ep), "ep")

    links = PROFILE.links
    slow, instant = (
        links.model_copy(update={"all_gather_gbps": rate, "all_gather_us": 0.0})
        for rate in (1e-3 * links.all_gather_gbps, 1e9)
    )
    assert helps(PROFILE.model_copy(update={"links": slow}))
    assert not helps(PROFILE.model_copy(update={"links": slow}), ep=1)
    assert not helps(PROFILE.model_copy(update={"links": instant}))


def test_groups_that_neither_divide_nor_fill_nodes_are_priced_by_their_nodes() -> None:
    given = over(4)
    # devices of a node, first rank of the LLM → nodes of its groups, True if inside one
    begins_at = {(4, 3): (4, False), (4, 4): (0, True), (10, 10): (1, True)}
    for (node, encoders), (nodes, inside) in begins_at.items():
        profile = synthetic.on_nodes(PROFILE, node)
        units = [
            unit.model_copy(update={"dp": encoders, "gpus": encoders})
            if unit.modules == ["image_encoder"]
            else unit
            for unit in given.units
        ]
        layout = given.model_copy(update={"units": units, "gpus_used": encoders + 9})
        stage = next(one for one in stages_of(profile, layout) if one.unit.name == "l")
        shape = placed(profile, stage)
        assert (stage.ranks[0], shape.ep_nodes) == (encoders, nodes)
        cost = profile.modules["llm"].costs["block"]
        (link, _), *others = exchanged_bytes(profile, "llm", cost, shape, "trained")
        assert not others and (link == profile.links.of(True)) == inside
