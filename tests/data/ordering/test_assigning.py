"""Every policy keeps the set of a step's samples, gives each item out once, and levels as
promised."""

from itertools import permutations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from disttrain_cli.data.epochs.mixture import Mixture
from disttrain_cli.data.index.sample_index import Index
from disttrain_cli.data.ordering.assigning import Costs, assign, count_costs
from disttrain_cli.data.ordering.assigning import order_step as order_assigned
from disttrain_cli.data.ordering.intervals import interval_order
from disttrain_cli.data.ordering.levelling import level
from disttrain_cli.data.packing import Packing, SequenceStream
from disttrain_cli.data.sizes import sizes_of
from disttrain_cli.data.slots import Ints, StepOrder
from disttrain_cli.spec.index import IMAGE, TARGET, TEXT
from disttrain_cli.spec.plan import Layout
from tests.data.dataset import DISAGGREGATED, INPUTS, MONOLITHIC, PROPERTY, make_layout, unit
from tests.data.test_packing import make_index

ENCODER_WITH_LLM = make_layout(
    [unit("front", ["encoder", "llm"], 3), unit("generator", ["generator"], 2)]
)
GENERATOR_WITH_LLM = make_layout(
    [unit("encoder", ["encoder"], 5), unit("back", ["llm", "generator"], 2)], microbatch_size=3
)
LAYOUTS = [DISAGGREGATED, MONOLITHIC, ENCODER_WITH_LLM, GENERATOR_WITH_LLM]


def random_batch(seed: int, count: int = 12) -> Packing:
    """Sequences of samples with skewed numbers of images and targets."""
    random = np.random.default_rng(seed)
    kinds = [
        [TEXT, *random.choice([IMAGE, IMAGE, TARGET], size=random.integers(0, 5))]
        for _ in range(80)
    ]
    index = make_index(
        kinds, [[int(random.integers(5, 90)) if k == TEXT else 4 for k in row] for row in kinds]
    )
    grids = np.where(
        index.kinds[:, None] == IMAGE,
        random.integers(1, 6, size=(len(index.kinds), 2)) * 2,
        index.grids,
    )
    object.__setattr__(index, "grids", grids)
    return SequenceStream(Mixture(index, seed)).batch(0, count)


def order_step(
    batch: Packing, layout: Layout, step: int, policy: str, costs: Costs | None = None
) -> StepOrder:
    """The order of a batch under `none` or `paper`; costs default to counts."""
    costs = count_costs(sizes_of(batch), INPUTS) if costs is None else costs
    return order_assigned(batch, layout, step, assign(costs, layout, "llm", policy))


def check_step(batch: Packing, layout: Layout, order: StepOrder) -> None:
    """Each sequence once in the step; each image and target once in every unit that works on it."""
    listed = np.concatenate([slot.sequences for slot in order.slots])
    assert sorted(listed) == batch.ids.tolist()
    assert len(order.slots) == layout.microbatches
    llm = layout.unit_of("llm")
    for slot in order.slots:
        assert len(slot.sequences) == llm.dp * layout.microbatch_size
        chosen = slot.sequences - batch.ids[0]
        assert np.array_equal(slot.sequence_tokens, batch.tokens[chosen])
        for owner, start in (
            (slot.items["image"].sequence, batch.items["image"].start),
            (slot.items["target"].sequence, batch.items["target"].start),
        ):
            assert np.array_equal(np.bincount(owner, minlength=len(chosen)), np.diff(start)[chosen])
        assert np.array_equal(
            slot.items["image"].grid,
            np.concatenate(
                [
                    batch.items["image"].grid[
                        batch.items["image"].start[q] : batch.items["image"].start[q + 1]
                    ]
                    for q in chosen
                ]
            ),
        )
        for name, replicas in slot.replicas.items():
            own = next(u for u in layout.units if u.name == name)
            assert len(replicas) == own.dp
            works_on = {
                "image": {"encoder", "llm"},
                "target": {"generator", "llm"},
                "sequence": {"llm"},
            }
            sizes = {
                "image": len(slot.items["image"].sequence),
                "target": len(slot.items["target"].sequence),
                "sequence": len(chosen),
            }
            for item, modules in works_on.items():
                given_out = np.concatenate([replica[item] for replica in replicas])
                expected = list(range(sizes[item])) if modules & set(own.modules) else []
                assert sorted(given_out) == expected
            for replica in replicas:
                grids = slot.items["image"].grid[replica["image"]].tolist()
                by_grid = list(zip(grids, replica["image"].tolist(), strict=True))
                assert by_grid == sorted(by_grid)
                if "llm" in own.modules:
                    assert len(replica["sequence"]) == layout.microbatch_size
                    assert set(slot.items["image"].sequence[replica["image"]]) <= set(
                        replica["sequence"].tolist()
                    )
                    assert set(slot.items["target"].sequence[replica["target"]]) <= set(
                        replica["sequence"].tolist()
                    )


@pytest.mark.slow
@given(st.integers(0, 10_000), st.sampled_from(LAYOUTS), st.sampled_from(["none", "paper"]))
@PROPERTY
def test_items_are_given_out_once(seed: int, layout: Layout, policy: str) -> None:
    batch = random_batch(seed)
    order = order_step(batch, layout, 4, policy)
    check_step(batch, layout, order)
    assert order.step == 4
    assert order.label_tokens == batch.label_tokens.sum()
    assert order.targets == len(batch.items["target"].segment)


def flat(order: StepOrder) -> list[list[int]]:
    return [
        array.tolist()
        for slot in order.slots
        for array in (
            slot.sequences,
            *(
                part
                for replicas in slot.replicas.values()
                for r in replicas
                for part in (r["sequence"], r["image"], r["target"])
            ),
        )
    ]


@pytest.mark.parametrize("policy", ["none", "paper"])
def test_same_arguments_same_order(policy: str) -> None:
    first, second = (flat(order_step(random_batch(1), DISAGGREGATED, 0, policy)) for _ in range(2))
    assert first == second


def test_none_keeps_the_packed_order() -> None:
    batch = random_batch(2)
    slots = order_step(batch, DISAGGREGATED, 0, "none").slots
    assert np.concatenate([slot.sequences for slot in slots]).tolist() == batch.ids.tolist()


def llm_loads(order: StepOrder, cost: Ints, first: int) -> Ints:
    """Cost of each LLM replica over the step."""
    return sum(
        np.array([cost[slot.sequences[r["sequence"]] - first].sum() for r in slot.replicas["llm"]])
        for slot in order.slots
    )


def test_paper_levels_replicas_with_equal_counts() -> None:
    layout = make_layout([unit("llm", ["llm"], 4)], global_batch_size=48)
    worst = {"none": 0.0, "paper": 0.0}
    for seed in range(5):
        batch = random_batch(seed, 48)
        cost = np.random.default_rng(seed).lognormal(5, 1, 48).astype(np.int64)
        # No order beats the mean, nor the largest sequence with the eleven smallest beside it.
        bound = max(cost.mean() * 12, cost.max() + np.sort(cost)[:11].sum())
        for policy in worst:
            loads = llm_loads(order_step(batch, layout, 0, policy, {"llm": cost}), cost, 0)
            worst[policy] = max(worst[policy], loads.max() / bound)
    assert worst["paper"] < 1.02 and worst["none"] > 1.2


def test_given_costs_decide() -> None:
    layout = make_layout([unit("llm", ["llm"], 2)], global_batch_size=4)
    batch = random_batch(0, 4)
    slots = order_step(batch, layout, 0, "paper", {"llm": np.array([100, 1, 2, 50])}).slots
    replicas = [{int(slot.sequences[r]) for slot in slots} for r in range(2)]
    assert replicas == [{0, 1}, {3, 2}]
    assert slots[0].sequences.tolist() == [1, 2]  # the smallest microbatch first


def test_a_batch_without_images() -> None:
    index = make_index([[TEXT]] * 30, [[100]] * 30)
    batch = SequenceStream(Mixture(index, 0)).batch(0, 12)
    for layout in LAYOUTS:
        for policy in ("none", "paper"):
            check_step(batch, layout, order_step(batch, layout, 0, policy))


def test_count_costs(index: Index) -> None:
    batch = SequenceStream(Mixture(index, 0)).batch(0, 12)
    costs = count_costs(sizes_of(batch), INPUTS)
    assert (
        costs["encoder"].sum()
        == (batch.items["image"].grid[:, 0] * batch.items["image"].grid[:, 1]).sum()
    )
    assert costs["generator"].sum() == 256 * len(batch.items["target"].segment)
    assert costs["llm"].tolist() == batch.tokens.tolist()


@given(st.lists(st.integers(0, 1000), max_size=60), st.integers(1, 7))
@PROPERTY
def test_level_within_grahams_bound(costs: list[int], replicas: int) -> None:
    groups = level(np.array(costs, dtype=np.int64), replicas)
    assert sorted(place for group in groups for place in group) == list(range(len(costs)))
    loads = [sum(costs[place] for place in group) for group in groups]
    assert max(loads) <= sum(costs) / replicas + (1 - 1 / replicas) * max(costs, default=0)


@given(st.lists(st.integers(0, 50), min_size=1, max_size=8), st.integers(1, 3))
@PROPERTY
def test_level_with_equal_counts(costs: list[int], replicas: int) -> None:
    costs = costs * replicas
    groups = level(np.array(costs, dtype=np.int64), replicas, len(costs) // replicas)
    assert {len(group) for group in groups} == {len(costs) // replicas}
    assert sorted(place for group in groups for place in group) == list(range(len(costs)))


def makespan(costs: Ints, order: Ints) -> int:
    """End of a 1F1B pipeline, from its dependencies alone: forward a third of each cost, backward
    the rest."""
    count, stages = costs.shape
    forward = costs[order] // 3
    backward = costs[order] - forward
    programs = []
    for stage in range(stages):
        warm = min(stages - 1 - stage, count)
        program = [("F", i) for i in range(warm)]
        for i in range(count):
            program += [("F", i + warm)] * (i + warm < count) + [("B", i)]
        programs.append(program)
    done: dict[tuple[str, int, int], int] = {}
    clock, at = [0] * stages, [0] * stages
    while any(at[s] < len(programs[s]) for s in range(stages)):
        for stage in range(stages):
            if at[stage] == len(programs[stage]):
                continue
            kind, i = programs[stage][at[stage]]
            before = ("F", i, stage - 1) if kind == "F" else ("B", i, stage + 1)
            ready = done.get(before, 0 if before[2] in (-1, stages) else -1)
            if ready < 0:
                continue
            clock[stage] = max(clock[stage], ready) + int(
                (forward if kind == "F" else backward)[i, stage]
            )
            done[kind, i, stage] = clock[stage]
            at[stage] += 1
    return max(clock)


@given(st.integers(0, 10_000), st.integers(1, 12), st.integers(1, 5))
@PROPERTY
def test_interval_order_is_a_permutation_with_its_ends(seed: int, count: int, stages: int) -> None:
    costs = np.random.default_rng(seed).integers(1, 1000, size=(count, stages))
    order = interval_order(costs).tolist()
    assert sorted(order) == list(range(count))
    total = costs.sum(axis=1)
    assert total[order[0]] == total.min()
    rear = min(stages - 1, count - 1)
    assert sorted(total[order[count - rear :]]) == sorted(total)[1 : 1 + rear]


def test_encoders_side_by_side_are_no_longer_pipeline() -> None:
    """A second encoder that takes less time, on fewer stages, changes nothing."""
    random = np.random.default_rng(5)
    costs = {
        "encoder": random.integers(50, 99, 24),
        "ear": random.integers(1, 9, 24),
        "llm": random.integers(50, 99, 24),
    }
    encoder, llm = unit("encoder", ["encoder"], 2, 2), unit("llm", ["llm"], 2, 3)
    alone = make_layout([encoder, llm], global_batch_size=24)
    both = make_layout([encoder, unit("ear", ["ear"], 2, 1), llm], global_batch_size=24)
    assert np.array_equal(
        assign(costs, alone, "llm", "paper").positions,
        assign(costs, both, "llm", "paper").positions,
    )


def test_interval_order_shortens_skewed_pipelines() -> None:
    gains, best = [], []
    for seed in range(4):
        size = np.random.default_rng(seed).lognormal(5, 1, 6).astype(np.int64)
        costs = np.repeat(size[:, None], 3, axis=1)
        ours = makespan(costs, interval_order(costs))
        every = [makespan(costs, np.array(order)) for order in permutations(range(6))]
        gains.append(ours / np.mean(every))
        best.append(ours / min(every))
    assert np.mean(gains) < 0.97
    assert np.mean(best) < 1.1
