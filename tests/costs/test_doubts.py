"""Expected and pessimistic costs: which doubts hold for a profile, and what each one changes."""

import math
from typing import Any

import pytest

from disttrain_cli.costs.doubts import _all_doubts, costs_at, doubts_of
from disttrain_cli.costs.hardware import analytic_device, catalogue, link_profile
from disttrain_cli.costs.links import COLLECTIVES, GIGABIT_BYTES, all_to_all_s, ring_link
from disttrain_cli.spec.layer_costs import Polynomial, combine
from disttrain_cli.spec.profile import Profile
from disttrain_cli.spec.work import Work
from tests import profiles
from tests.planning import synthetic

WORK = Work(1, 200, 2e4)


def profiled(kind: str, name: str = "H100", nodes: int = 1, **provenance: str) -> Profile:
    """A profile of nodes of four devices, whose links are the catalogue's."""
    run = synthetic.run_file(gpus=4 * nodes, nodes=nodes)
    profile = synthetic.tiny(run, kind=kind, tps=(1, 2))
    device = profile.device.model_copy(update={"name": name, "optimizer_ns_per_parameter": 1.0})
    links = link_profile(analytic_device("H100", run.cluster, "bf16"), run.cluster)
    changed: dict[str, Any] = {"device": device, "links": links, "provenance": provenance}
    return profile.model_copy(update=changed)


def block_ms(profile: Profile, module: str = "llm", tp: int = 1) -> float:
    return next(iter(profile.modules[module].costs.values())).tp[str(tp)].forward_ms(WORK)


def test_every_doubt_changes_something_and_every_device_has_doubts_of_its_kernels() -> None:
    for doubt in _all_doubts():
        assert doubt.changes and doubt.source and doubt.what
        named = [name for name in doubt.curves or [] if name not in catalogue().curves]
        assert not named, named
    for device in [*catalogue().devices, "a device of nobody"]:
        factors = [doubt.pessimistic.llm for doubt in doubts_of(profiled("analytic", device), 4)]
        assert math.prod(factors) > 1.1


@pytest.mark.parametrize(
    ("profile", "gpus", "there", "not_there"),
    [
        (profiled("analytic"), 1, "clocks under load", "the slowest of all ranks"),
        (profiled("analytic"), 4, "the slowest of all ranks", "network between nodes"),
        (profiled("analytic", nodes=2), 8, "network between nodes", "errors of its own fits"),
        (profiled("analytic", nodes=2), 4, "links inside a node", "network between nodes"),
        (profiled("cuda", nodes=2), 8, "errors of its own fits", "network between nodes"),
        (profiled("cuda"), 4, "steps against kernels under load", "clocks under load"),
        (profiled("cpu"), 4, "processes that share a CPU's cores", "clocks under load"),
        (
            profiled("cuda", calibrated="yes"),
            4,
            "errors of its own fits",
            "steps against kernels under load",
        ),
    ],
)
def test_doubts_are_those_of_the_profile(
    profile: Profile, gpus: int, there: str, not_there: str
) -> None:
    names = [doubt.what for doubt in doubts_of(profile, gpus)]
    assert there in names and not_there not in names


def test_a_network_that_was_never_measured_is_the_run_files() -> None:
    measured = profiled("cuda", nodes=2)
    alone = measured.model_copy(
        update={"links": measured.links.model_copy(update={"inter_node": None})}
    )
    assert "network between nodes" in [doubt.what for doubt in doubts_of(alone, 8)]
    between = costs_at(alone, "expected", 8).links.inter_node
    assert between is not None and between.p2p_gbps == pytest.approx(0.9 * 100)
    assert costs_at(alone, "expected", 4).links.inter_node is None


@pytest.mark.parametrize(
    ("module", "expected", "pessimistic"),
    [
        ("llm", 1.10, 1.13 * 1.03),
        ("image_encoder", 1.10 * 1.12, 1.13 * 1.25),
        ("image_generator", 1.10 * 1.15, 1.13 * 1.15),
    ],
)
def test_kernels_of_a_module_take_as_long_as_its_kind_did(
    module: str, expected: float, pessimistic: float
) -> None:
    profile = profiled("analytic")
    for level, factor in (("expected", expected), ("pessimistic", pessimistic)):
        costs = costs_at(profile, level, 1)  # type: ignore[arg-type]
        assert block_ms(costs, module) == pytest.approx(factor * block_ms(profile, module))
        assert costs.modules["llm"].costs["block"].forward_flops == (
            profile.modules["llm"].costs["block"].forward_flops
        )
    assert costs_at(profile, "optimistic", 1) is profile


def test_more_ranks_have_a_slower_slowest_one() -> None:
    profile = profiled("analytic", nodes=256)
    times = [block_ms(costs_at(profile, "expected", gpus)) for gpus in (1, 8, 1024)]
    slower = [1 + 0.01 * math.sqrt(2 * math.log(gpus)) for gpus in (1, 8, 1024)]
    assert times == pytest.approx([times[0] * factor for factor in slower])


def test_a_tp_groups_messages_take_longer_by_their_links_and_not_by_kernels() -> None:
    profile = profiled("analytic")
    sent = Polynomial(per_token=1e5)
    byte_ms = 1e3 / (profile.links.all_gather_gbps * GIGABIT_BYTES)
    messages = combine((byte_ms, sent))

    def with_messages(profile: Profile) -> Profile:
        module = profile.modules["llm"]
        block = module.costs["block"]
        shard = block.tp["2"].model_copy(
            update={
                "forward_ms": messages,
                "recomputing_ms": combine((-1.0, messages)),
                "sent_bytes": {"forward": sent},
            }
        )
        costs = module.costs | {"block": block.model_copy(update={"tp": block.tp | {"2": shard}})}
        changed = module.model_copy(update={"costs": costs})
        return profile.model_copy(update={"modules": profile.modules | {"llm": changed}})

    def times_ms(profile: Profile) -> list[float]:
        shard = profile.modules["llm"].costs["block"].tp["2"]
        return [shard.forward_ms(WORK), shard.recomputing_ms(WORK)]

    only = with_messages(profile)
    for level, factor in (("expected", 1.0), ("pessimistic", 1.15)):
        changed = costs_at(only, level, 4)  # type: ignore[arg-type]
        assert times_ms(changed) == pytest.approx([factor * time for time in times_ms(only)])


def test_errors_of_fits_go_both_ways_and_a_measured_profile_is_surer() -> None:
    measured, computed = profiled("cuda"), profiled("analytic")
    low, high = (
        block_ms(costs_at(measured, level, 1), "image_encoder")
        for level in ("optimistic", "pessimistic")
    )
    one = block_ms(measured, "image_encoder")
    assert low == pytest.approx(one / 1.02) and high == pytest.approx(one * 1.3 * 1.02)
    assert high < block_ms(costs_at(computed, "pessimistic", 1), "image_encoder")


@pytest.mark.parametrize("operation", COLLECTIVES)
def test_the_latency_of_a_ring_grows_with_its_ranks(operation: str) -> None:
    steps = 2 if operation == "all_reduce" else 1
    link = profiles.links().model_copy(update={"hop_us": 3.0})
    flat = profiles.links()
    for ranks in (2, 8, 64):
        more_s = COLLECTIVES[operation](link, 1e6, ranks) - COLLECTIVES[operation](flat, 1e6, ranks)
        assert more_s == pytest.approx(3e-6 * steps * (ranks - 1))
    assert all_to_all_s(link, 1e6, 8) == all_to_all_s(flat, 1e6, 8)


def test_a_ring_over_nodes_takes_most_of_its_steps_inside_them() -> None:
    links = costs_at(profiled("analytic", nodes=2), "expected", 8).links
    assert links.inter_node is not None
    assert ring_link(links, 1).hop_us == links.inter_node.hop_us == 14
    assert ring_link(links, 4).hop_us == pytest.approx((3 * 3.4 + 14) / 4)
