"""What a CP group costs: a share of the work, exchanges, and what several ranks have alike."""

from typing import Any

import numpy as np
import pytest

from disttrain_cli.costs.activations import kept_share, working_share
from disttrain_cli.costs.context import (
    UNEVEN,
    exchanged_bytes,
    exchanged_ms,
    fits_nodes,
    kept_bytes,
    misfit,
)
from disttrain_cli.costs.layout import reduce_s, stages_of
from disttrain_cli.costs.links import all_gather_s, all_to_all_s, exchange_s, reduce_scatter_s
from disttrain_cli.costs.memory import layout_memory
from disttrain_cli.costs.overlap import hidden
from disttrain_cli.planning.traffic import traffic_of
from disttrain_cli.spec.layer_costs import Heads, Polynomial
from disttrain_cli.spec.plan import Layout
from disttrain_cli.spec.profile import Profile
from disttrain_cli.spec.shape import ParallelShape
from tests.costs.test_memory import layout
from tests.planning import synthetic

LENGTH = 256


def with_heads(heads: Heads | None, sequence_length: int = LENGTH) -> Profile:
    """The tests' profile, whose LLM has such attention in its blocks."""
    return synthetic.attending(synthetic.tiny(synthetic.run_file()), heads, sequence_length)


PROFILE = with_heads(Heads(8, 4, 16))
EYE = Heads(4, 4, 8)


def with_eye(profile: Profile) -> Profile:
    """The same, whose encoder has attention in its blocks, too."""
    eye = profile.modules["image_encoder"]
    costs = {
        kind: cost.model_copy(update={"heads": EYE if kind == "block" else None})
        for kind, cost in eye.costs.items()
    }
    modules = profile.modules | {"image_encoder": eye.model_copy(update={"costs": costs})}
    return profile.model_copy(update={"modules": modules})


WITH_EYE = with_eye(PROFILE)


def shared(cp: int, **how: Any) -> Layout:
    """The LLM on CP groups."""
    given = layout(4)
    units = [
        unit.model_copy(update={"cp": cp, "gpus": unit.gpus * cp, **how})
        if unit.modules == ["llm"]
        else unit
        for unit in given.units
    ]
    used = sum(unit.gpus for unit in units)
    return given.model_copy(update={"units": units, "gpus_used": used})


def test_a_rank_has_its_share_of_the_work_and_two_exchanges() -> None:
    alone, four = (stages_of(PROFILE, shared(cp)) for cp in (1, 4))
    link, precision = PROFILE.links, {"fp32": 4, "bf16": 2}[PROFILE.precision]
    for before, after in zip(alone[1:3], four[1:3], strict=True):
        blocks = sum(kind == "block" for _, kind, _ in after.held)
        own_bytes = 2 * LENGTH / 4 * (8 + 4) * 16 * precision
        sent_ms = 1e3 * own_bytes * 3 / 4 / (link.all_gather_gbps * 1e9 / 8)
        for one, two in zip(before.costs, after.costs, strict=True):
            for whole, part in zip(one.parts_ms[:2], two.parts_ms[:2], strict=True):
                np.testing.assert_allclose(part[2:], whole[2:] / 4)
                np.testing.assert_allclose(part[1], whole[1] / 4 + blocks * sent_ms)
                each_ms = 2e-3 * link.all_gather_us
                np.testing.assert_allclose(part[0], whole[0] + blocks * each_ms)
            np.testing.assert_array_equal(one.flops, two.flops)


def test_copies_around_exchanges_take_what_the_optimizer_says_of_memory() -> None:
    slow = PROFILE.model_copy(
        update={"device": PROFILE.device.model_copy(update={"optimizer_ns_per_parameter": 28.0})}
    )  # 1 ns per byte
    block = PROFILE.modules["llm"].costs["block"]
    for cp, again in ((1, 0), (2, 1), (8, 2)):
        llm = shared(cp).units[1].shape
        for before, after in zip(
            exchanged_ms(PROFILE, "llm", block, llm, "trained"),
            exchanged_ms(slow, "llm", block, llm, "trained"),
            strict=True,
        ):
            numbers = 3 * 8 + 2 * 2 * 4 * again if again else 0
            moved_bytes = LENGTH / cp * 16 * 4 * 2 * numbers
            assert after.per_item - before.per_item == pytest.approx(1e-6 * moved_bytes)
            assert after.base == before.base


def test_the_longer_a_sequence_the_closer_to_a_share() -> None:
    """What exchanges take beside the work, in the middle of a pipeline."""
    seconds = []
    for cp in (1, 2, 4):
        cost = stages_of(PROFILE, shared(cp))[1].costs[0]
        seconds.append(float(cost.forward_ms @ [1.0, 1.0, LENGTH, LENGTH**2]))
    assert seconds[0] > seconds[1] > seconds[2]


def test_gradients_are_summed_over_replicas_and_cp_groups() -> None:
    two, twice = stages_of(PROFILE, shared(2)), stages_of(PROFILE, shared(1, dp=4, gpus=8))
    assert reduce_s(PROFILE, shared(2), two[1], 8) == reduce_s(
        PROFILE, shared(1, dp=4, gpus=8), twice[1], 8
    )
    assert two[1].unit.dp_cp_size == 2 * shared(1).units[1].dp


def test_a_rank_keeps_its_share_and_what_attention_has_twice() -> None:
    alone, four = (layout_memory(PROFILE, shared(cp), 4.0) for cp in (1, 4))
    assert four[1].activations_gib < alone[1].activations_gib / 3
    assert four[1].optimizer_gib == pytest.approx(alone[1].optimizer_gib / 4, rel=0.01)
    assert four[1].weights_gib == alone[1].weights_gib
    assert [stage.peak_gib for stage in alone[::3]] == [stage.peak_gib for stage in four[::3]]


def test_keys_that_ranks_share_are_kept_and_sent_again() -> None:
    block = PROFILE.modules["llm"].costs["block"]
    number = {"fp32": 4, "bf16": 2}[PROFILE.precision]
    llm = {cp: shared(cp).units[1].shape for cp in (1, 2, 4, 8)}
    kept = [kept_bytes(PROFILE, "llm", block, llm[cp], "trained") / 16 / number for cp in llm]
    assert kept == [0, 8, 8, 8 + 2 * 4]
    sent = [exchanged_bytes(PROFILE, "llm", block, llm[cp], "trained") / 16 / number for cp in llm]
    assert sent == [0, 2 * 24 / 2, 2 * 24 * 3 / 4, 2 * 32 * 7 / 8]
    assert exchanged_bytes(PROFILE, "llm", block, llm[4], "still") == sent[2] / 2 * 16 * number
    again = shared(4, checkpointing=True).units[1].shape
    assert exchanged_bytes(PROFILE, "llm", block, again, "trained") == sent[2] * 1.5 * 16 * number


@pytest.mark.parametrize("tp", [1, 2])
def test_rows_of_encoders_are_gathered_by_the_ranks_of_the_llm(tp: int) -> None:
    block, unit = PROFILE.modules["llm"].costs["block"], shared(4, tp=tp).units[1].shape
    deep = block.model_copy(update={"gathered_bytes": Polynomial(per_token=3e3)})
    work = PROFILE.modules["llm"].work_per_sequence
    own_rows, sent = LENGTH * work.items / 4, 3 / 4 * 3e3 * work.tokens / tp
    for does, passes in (("still", 1), ("trained", 2)):
        without, found = (
            exchanged_bytes(PROFILE, "llm", cost, unit, does) for cost in (block, deep)
        )
        assert (found - without) * own_rows == pytest.approx(passes * sent)
    without_ms, found_ms = (
        exchanged_ms(PROFILE, "llm", cost, unit, "trained")[0](work) for cost in (block, deep)
    )
    expected_s = all_gather_s(PROFILE.links, 3e3 * work.tokens / tp, 4)
    assert found_ms - without_ms == pytest.approx(1e3 * expected_s)


def test_gathered_keys_and_values_are_sent_kept_and_scattered() -> None:
    block = PROFILE.modules["llm"].costs["block"]
    number = {"fp32": 4, "bf16": 2}[PROFILE.precision]
    row, link = 2 * 4 * 16 * number, PROFILE.links  # keys and values of a row
    for cp in (2, 4, 8):
        how = {"cp_comm_type": "all_gather"}
        unit, again = (
            shared(cp, **how, checkpointing=recomputes).units[1].shape
            for recomputes in (False, True)
        )
        sent = row * (cp - 1)
        for one, does, passes in ((unit, "trained", 2), (unit, "still", 1), (again, "passes", 3)):
            assert exchanged_bytes(PROFILE, "llm", block, one, does) == passes * sent
        kept = kept_bytes(PROFILE, "llm", block, unit, "trained")
        assert kept == 8 * 16 * number + row * (cp - 1)
        forward, backward = exchanged_ms(PROFILE, "llm", block, unit, "trained")
        attended = block.tp["1"].forward_ms.per_length_sq, block.tp["1"].backward_ms.per_length_sq
        for found, seconds, squared in (
            (forward, all_gather_s(link, LENGTH * row, cp), attended[0]),
            (backward, reduce_scatter_s(link, LENGTH * row, cp), attended[1]),
        ):
            assert found.base + found.per_item == pytest.approx(1e3 * seconds)
            assert found.per_length_sq == pytest.approx(UNEVEN * squared / cp)
        recomputed = exchanged_ms(PROFILE, "llm", block, again, "trained")[1]
        assert recomputed.per_item == pytest.approx(forward.per_item + backward.per_item)


def test_copies_of_gathered_rows_take_what_the_optimizer_says_of_memory() -> None:
    slow = PROFILE.model_copy(
        update={"device": PROFILE.device.model_copy(update={"optimizer_ns_per_parameter": 28.0})}
    )  # 1 ns per byte
    block, cp = PROFILE.modules["llm"].costs["block"], 4
    unit = shared(cp, cp_comm_type="all_gather").units[1].shape
    pairs = zip(
        exchanged_ms(PROFILE, "llm", block, unit, "trained"),
        exchanged_ms(slow, "llm", block, unit, "trained"),
        strict=True,
    )
    # heads that are read or written for each of all rows: own ones and gathered ones of keys and
    # values, what attention made; zeros, sums, gradients in the ranks' order and as one tensor
    heads = (2 * 8 / cp + 2 * 8 + 2 * 8 / cp, 8 + 3 * 8 + 2 * 8 + 2 * 8 / cp)
    for (before, after), moved in zip(pairs, heads, strict=True):
        assert after.per_item - before.per_item == pytest.approx(1e-6 * LENGTH * 16 * 4 * moved)


def test_a_rank_that_gathers_has_room_for_the_gradients_of_all_rows() -> None:
    rows = {}
    for way in ("a2a", "all_gather"):
        unit = shared(8, cp_comm_type=way).units[1]
        rows[way] = working_share(PROFILE, ["llm"], unit.shape)
    number = {"fp32": 4, "bf16": 2}[PROFILE.precision]
    kept = kept_share(PROFILE, ["llm"], shared(8, cp_comm_type="all_gather").units[1].shape)
    place = PROFILE.modules["llm"].layers.index("block")
    held = LENGTH * 2 * 2 * 4 * 16 * number
    assert (rows["all_gather"][1:3, place] >= kept[1:3, place] + held - 1).all()


def test_traffic_names_the_exchanges() -> None:
    found = []
    for plan in (shared(1), shared(4)):
        rows = traffic_of(PROFILE, plan, stages_of(PROFILE, plan), 8)
        found.append([row for row in rows if row.kind == "context_parallel"])
    assert found[0] == []
    ((one,),) = found[1:]
    assert one.unit == "l" and one.job_gib > one.rank_gib > 0


def test_buckets_wait_for_less_where_passes_are_shorter() -> None:
    found = []
    for cp in (1, 4):
        plan = shared(cp).model_copy(update={"overlap": True})
        reducing, _ = hidden(PROFILE, plan, stages_of(PROFILE, plan), 8)
        found.append(reducing.mean_s[1])
    assert found[1] < found[0]


@pytest.mark.parametrize(
    ("profile", "modules", "tp", "cp", "why"),
    [
        (PROFILE, ["llm"], 1, 8, None),
        (PROFILE, ["llm"], 2, 2, None),
        (PROFILE, ["image_encoder", "llm"], 2, 1, None),
        (PROFILE, ["image_encoder", "llm"], 1, 2, "image_encoder"),
        (PROFILE, ["image_generator"], 1, 2, "no rows of images to generate"),
        (synthetic.with_audio(PROFILE), ["audio_encoder"], 1, 2, "audio_encoder has no attention"),
        (synthetic.with_audio(WITH_EYE), ["audio_encoder"], 1, 4, None),
        (WITH_EYE, ["image_encoder"], 1, 4, None),
        (WITH_EYE, ["image_encoder"], 2, 2, None),
        (WITH_EYE, ["image_encoder", "llm"], 1, 4, None),
        (WITH_EYE, ["image_encoder"], 1, 8, "CP 8 must divide the 4 heads of image_encoder"),
        (WITH_EYE, ["image_encoder"], 1, 3, "CP 3 must divide the 4 heads of image_encoder"),
        (PROFILE, ["image_encoder"], 1, 2, "image_encoder has no attention"),
        (PROFILE, ["llm"], 1, 16, "CP 16 must divide the 8 heads"),
        (PROFILE, ["llm"], 4, 4, "the 2 heads on each of 4 TP ranks"),
        (with_heads(Heads(12, 4, 16), sequence_length=240), ["llm"], 1, 6, "4 of keys and values"),
        (PROFILE, ["llm"], 1, 3, "TP × CP = 1 × 3 = 3 must divide the sequence length, 256"),
        (with_heads(Heads(64, 64, 4), sequence_length=32), ["llm"], 1, 64, "sequence length, 32"),
        (with_heads(None), ["llm"], 1, 2, "llm has no attention"),
    ],
)
def test_what_does_not_fit_is_named(
    profile: Profile, modules: list[str], tp: int, cp: int, why: str | None
) -> None:
    said = misfit(profile, modules, ParallelShape(tp=tp, cp=cp))
    assert (said is None) if why is None else (said is not None and why in said)


def test_an_encoder_has_its_share_of_the_work_and_two_exchanges_of_its_rows() -> None:
    alone, four = (stages_of(WITH_EYE, eye(cp))[0].costs[0] for cp in (1, 4))
    link = WITH_EYE.links
    blocks = WITH_EYE.modules["image_encoder"].layers.count("block")
    row_bytes = 2 / 4 * (4 + 4) * 8 * {"fp32": 4, "bf16": 2}[WITH_EYE.precision]
    row_ms = 1e3 * row_bytes * 3 / 4 / (link.all_gather_gbps * 1e9 / 8)
    latency_ms = 2e-3 * link.all_gather_us
    for whole, part in zip(alone.parts_ms[:2], four.parts_ms[:2], strict=True):
        more = blocks * np.array([latency_ms, 0.0, row_ms, 0.0])
        assert part == pytest.approx(np.array([whole[0], *whole[1:] / 4]) + more)
    # what it keeps is a share of the work, and attention's result again
    kept = [layout_memory(WITH_EYE, eye(cp), 4.0)[0].activations_gib for cp in (1, 4)]
    assert kept[0] / 4 < kept[1] < kept[0] / 2


def test_a_group_does_not_keep_a_fused_tensor_whole() -> None:
    cost = WITH_EYE.modules["image_encoder"].costs["block"]
    fused = cost.model_copy(update={"fused_heads": True})
    width = 4 * 8 * {"fp32": 4, "bf16": 2}[WITH_EYE.precision]
    unit = eye(4).units[0].shape
    kept = [kept_bytes(WITH_EYE, EYE, one, unit, "trained") for one in (cost, fused)]
    assert kept == [width, -width]
    assert kept_bytes(WITH_EYE, EYE, fused, eye(1).units[0].shape, "trained") == 0.0


def test_what_a_frozen_projection_reads_is_not_kept() -> None:
    frozen, unit = {"frozen_projection": True}, eye(4).units[0].shape
    cost = WITH_EYE.modules["image_encoder"].costs["block"]
    adapted = cost.model_copy(update=frozen)
    assert kept_bytes(WITH_EYE, EYE, cost, unit, "trained") > 0.0
    assert kept_bytes(WITH_EYE, EYE, adapted, unit, "trained") == 0.0
    assert kept_bytes(WITH_EYE, EYE, adapted, unit, "passes") == 0.0


def eye(cp: int) -> Layout:
    """The encoder on CP groups."""
    given = layout(4)
    encoder, *rest = given.units
    encoder = encoder.model_copy(update={"cp": cp, "gpus": encoder.gpus * cp})
    used = encoder.gpus + sum(unit.gpus for unit in rest)
    return given.model_copy(update={"units": [encoder, *rest], "gpus_used": used})


def test_exchanges_between_nodes_take_the_network_at_the_rate_of_a_rank() -> None:
    between = PROFILE.links.model_copy(update={"all_gather_gbps": 8.0, "all_gather_us": 30.0})
    links = PROFILE.links.model_copy(
        update={
            "inter_node": between,
            "gpus_per_node": 2,
            "all_gather_gbps": 80.0,
            "all_gather_us": 5.0,
        }
    )
    assert exchange_s(links, 1e9, 2, 2) == all_to_all_s(links, 1e9, 2)
    assert exchange_s(links, 1e9, 8, 2) == pytest.approx(30e-6 + 6 / 8)  # 1 Gbyte/s
    fast = links.model_copy(update={"all_gather_gbps": 0.08})  # then the link inside is the slower
    assert exchange_s(fast, 1e9, 8, 2) > 12.0
    profile = PROFILE.model_copy(update={"links": links})
    sent = []
    for plan in (shared(2), shared(4)):
        rows = traffic_of(profile, plan, stages_of(profile, plan), 2)
        sent += [row for row in rows if row.kind == "context_parallel"]
    assert [row.inside_a_node for row in sent] == [True, False]
    assert sent[1].rank_s > 4 * sent[0].rank_s
    inside = links.model_copy(update={"gpus_per_node": 4})
    forward = [
        stages_of(one, shared(4))[1].costs[0].forward_ms[1]
        for one in (profile.model_copy(update={"links": inside}), profile)
    ]
    assert forward[1] > forward[0]


@pytest.mark.parametrize(
    ("tp", "cp", "node", "fits"),
    [
        (2, 4, 8, True),
        (4, 4, 8, True),
        (1, 32, 8, True),
        (8, 2, 8, True),
        (2, 3, 8, False),
        (16, 2, 8, False),
        (3, 8, 8, False),
        (2, 6, 8, False),
    ],
)
def test_replicas_are_parts_of_nodes_or_whole_ones(tp: int, cp: int, node: int, fits: bool) -> None:
    assert fits_nodes(ParallelShape(tp=tp, cp=cp), node) == fits
