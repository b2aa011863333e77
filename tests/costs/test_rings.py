"""Rings between nodes: as wide as the node in which they have fewest ranks, no wider than links
inside a node."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from disttrain_cli.costs.layout import CostedStage, in_one_node, reduce_s, replicas_link, stages_of
from disttrain_cli.costs.links import all_reduce_s, ring_link
from disttrain_cli.spec.plan import Layout
from disttrain_cli.spec.profile import LinkProfile, Profile
from tests.analysis.simulated import layout_of
from tests.planning import synthetic

PER_NODE = 8


def linked(profile: Profile, inside_gbps: float = 1000.0, between_gbps: float = 100.0) -> Profile:
    """The profile with links of which only the bandwidths count."""

    def times(gbps: float) -> dict[str, float]:
        names = ("p2p", "all_reduce", "all_gather", "reduce_scatter")
        return {f"{name}_gbps": gbps for name in names} | {f"{name}_us": 0.0 for name in names}

    links = LinkProfile.model_validate(times(inside_gbps) | {"inter_node": times(between_gbps)})
    return profile.model_copy(update={"links": links})


PROFILE = linked(synthetic.paper_9b(synthetic.run_file(batch=1920, gpus=1296, nodes=162)))


def layout(encoder: int, llm: tuple[int, int], generator: int) -> Layout:
    """Stages on ranks in this order: the LLM's two (its TP is the largest), encoder, generator."""
    tp, dp = llm
    units = {
        "image_encoder": {"dp": encoder, "layers_per_stage": [32]},
        "llm": {"tp": tp, "dp": dp, "layers_per_stage": [17, 17]},
        "image_generator": {"dp": generator, "layers_per_stage": [11]},
    }
    return layout_of(PROFILE, 1920, 1920 // dp, **units)


def stages(encoder: int, llm: tuple[int, int], generator: int) -> list[CostedStage]:
    """Those of the layout."""
    return stages_of(PROFILE, layout(encoder, llm, generator))


@given(
    st.integers(1, 40),
    st.sampled_from([(1, 8), (2, 4), (2, 6), (4, 6), (8, 3)]),
    st.integers(1, 40),
)
def test_a_ring_has_the_network_devices_of_its_ranks_in_the_node_where_they_are_fewest(
    encoder: int, llm: tuple[int, int], generator: int
) -> None:
    for stage in stages(encoder, llm, generator):
        link = replicas_link(PROFILE, stage, PER_NODE)
        rings = [stage.dp_group(tp_rank) for tp_rank in range(stage.tp)]
        nodes = [Counter(rank // PER_NODE for rank in ring).values() for ring in rings]
        inside = all(len(counts) == 1 for counts in nodes)
        if in_one_node(stage.ranks, PER_NODE):
            assert inside and link.all_reduce_gbps == 1000.0
        else:
            fewest = min(count for counts in nodes for count in counts)
            assert link.all_reduce_gbps == link.all_gather_gbps == min(1000.0, 100.0 * fewest)


def test_a_stage_that_ends_inside_a_node_reduces_at_its_pace() -> None:
    aligned, ragged = (stages(encoder, (4, 8), 8)[0] for encoder in (136, 137))
    assert [len(stage.ranks) % PER_NODE for stage in (aligned, ragged)] == [0, 1]
    plan = layout(136, (4, 8), 8)
    fast, slow = (reduce_s(PROFILE, plan, stage, PER_NODE) for stage in (aligned, ragged))
    assert slow / fast == pytest.approx(8.0, rel=0.01)


def test_links_inside_a_node_bound_a_ring() -> None:
    slow_inside = linked(PROFILE, inside_gbps=250.0)
    stage = stages(136, (4, 8), 8)[0]
    assert replicas_link(slow_inside, stage, PER_NODE).all_reduce_gbps == 250.0
    assert ring_link(slow_inside.links, 2).all_reduce_gbps == 200.0
    alone = slow_inside.links.model_copy(update={"inter_node": None})
    assert ring_link(alone, 8) == alone  # one node only
    assert all_reduce_s(ring_link(slow_inside.links, 2), 1e9, 4) == pytest.approx(
        2 * 0.75 * 8 / 200
    )
