"""Expected and pessimistic costs: a profile scaled by factors for effects that it omits.

A profile contains times of kernels in short bursts, or by a catalogue's curve, and of messages
without contention. Each reason for a run to be slower is a doubt with its evidence
(`templates/doubts.yaml`). The factors of all doubts that apply to a profile are multiplied into its
layers, links and optimizer, and layouts are simulated with these: no factor is applied to an entire
step, since modules, messages and optimizer differ in their slow-down.
"""

from __future__ import annotations

import math
from functools import cache
from importlib.resources import files
from typing import Literal, cast

from pydantic import Field

from disttrain_cli.costs.hardware import lookup, network_times
from disttrain_cli.costs.links import GIGABIT_BYTES
from disttrain_cli.costs.memoised import memoised
from disttrain_cli.errors import SpecError
from disttrain_cli.spec.files import Strict
from disttrain_cli.spec.layer_costs import LayerShard, Pass, Polynomial, combine
from disttrain_cli.spec.prediction import Basis
from disttrain_cli.spec.profile import LinkProfile, LinkTimes, ModuleTime, Profile

#: optimistic: less the errors of a measured profile's own fits; else the profile's costs.
Level = Literal["optimistic", "expected", "pessimistic"]
ProfileKind = Literal["analytic", "cuda", "cpu", "calibrated"]
#: Fields of `LayerShard` that are times of a pass with the messages of its TP group.
PASSES: dict[str, Pass] = {
    "forward_ms": "forward",
    "backward_ms": "backward",
    "backward_input_ms": "backward_input",
}
#: Factors without effect on one device, and on devices of one node.
ALONE = {"spread", "link", "tp_overlap"}
BETWEEN_NODES = {"network", "network_p2p", "network_hop_us", "link_hop_us"}


class Factors(Strict):
    """Multiples of a profile's times; shares and latencies as named."""

    llm: float = Field(1.0, gt=0, description="Kernels of modules of this kind.")
    encoder: float = Field(1.0, gt=0)
    generator: float = Field(1.0, gt=0)
    optimizer: float = Field(1.0, gt=0)
    tp_overlap: float = Field(
        1.0, ge=0, description="Share of the time that overlapped messages save."
    )
    link: float = Field(1.0, gt=0, description="Bytes inside a node.")
    network: float = Field(1.0, gt=0, description="Bytes of collectives between nodes.")
    network_p2p: float = Field(1.0, gt=0, description="Bytes from rank to rank between nodes.")
    link_hop_us: float = Field(0.0, ge=0, description="Latency of a ring's step inside a node.")
    network_hop_us: float = Field(0.0, ge=0, description="Latency of a ring's step between nodes.")
    spread: float = Field(0.0, ge=0, description="Standard deviation of the ranks' speed.")
    fit: float = Field(0.0, ge=0, description="Multiple of a module's mean fit error to add.")


class Doubt(Strict):
    """Reason for a run to take longer than its profile predicts."""

    what: str
    profiles: list[ProfileKind]
    curves: list[str] | None = Field(None, description="Curves of the catalogue; None: all.")
    basis: Basis
    expected: Factors = Factors()
    pessimistic: Factors = Factors()
    source: str

    def factors(self, level: Level) -> Factors:
        """Return the factors at a level; a doubt has none at the optimistic level."""
        return Factors() if level == "optimistic" else cast(Factors, getattr(self, level))

    @property
    def changes(self) -> set[str]:
        """Names of the factors that it sets."""
        return self.expected.model_fields_set | self.pessimistic.model_fields_set


@cache
def _all_doubts() -> list[Doubt]:
    """Return the doubts that come with the package."""
    import yaml

    text = files("disttrain_cli").joinpath("templates/doubts.yaml").read_text()
    return [Doubt.model_validate(value) for value in yaml.safe_load(text).values()]


def doubts_of(profile: Profile, gpus: int) -> list[Doubt]:
    """Return the doubts that apply to a profile on this many devices."""
    kind = "calibrated" if "calibrated" in profile.provenance else profile.device.kind
    network = "analytic" if lacks_network(profile, gpus) else kind
    present = Factors.model_fields.keys() - (ALONE if gpus == 1 else set())
    if gpus <= profile.cluster.gpus_per_node:
        present -= BETWEEN_NODES
    return [
        doubt
        for doubt in _all_doubts()
        if (network if doubt.changes <= BETWEEN_NODES else kind) in doubt.profiles
        and (doubt.curves is None or _curve(profile) in doubt.curves)
        and doubt.changes & present
    ]


def _curve(profile: Profile) -> str:
    """Return the catalogue's kernel curve for a profile's device."""
    try:
        return lookup(profile.device.name).curve
    except SpecError:
        return "generic"


def lacks_network(profile: Profile, gpus: int) -> bool:
    """Return True if devices are on several nodes and the network between them was not measured."""
    return profile.links.inter_node is None and gpus > profile.cluster.gpus_per_node


@memoised
def costs_at(profile: Profile, level: Level, gpus: int) -> Profile:
    """Return the profile with its costs at a level, for a step on this many devices.

    Returns the profile itself if nothing changes.
    """
    doubts = doubts_of(profile, gpus)
    factors = [doubt.factors(level) for doubt in doubts]
    links = _scaled_links(profile, factors, level, gpus)
    slowest = 1.0 + sum(one.spread for one in factors) * math.sqrt(2 * math.log(max(1, gpus)))
    kernels = {
        name: slowest * math.prod(getattr(one, module.kind) for one in factors)
        for name, module in profile.modules.items()
    }
    fits = {
        (name, tp): _fit_factor(doubts, time, level)
        for name, module in profile.modules.items()
        for tp, time in module.tp.items()
    }
    link, overlap = (
        math.prod(getattr(one, name) for one in factors) for name in ("link", "tp_overlap")
    )
    optimizer = math.prod(one.optimizer for one in factors)
    if links == profile.links and {*kernels.values(), *fits.values(), link, overlap, optimizer} == {
        1.0
    }:
        return profile
    byte_ms = 1e3 / (profile.links.all_gather_gbps * GIGABIT_BYTES)
    modules = {
        name: module.model_copy(
            update={
                "costs": {
                    kind: cost.model_copy(
                        update={
                            "tp": {
                                tp: _scaled_shard(
                                    shard,
                                    kernels[name] * fits.get((name, tp), 1.0),
                                    link,
                                    overlap,
                                    byte_ms,
                                )
                                for tp, shard in cost.tp.items()
                            }
                        }
                    )
                    for kind, cost in module.costs.items()
                }
            }
        )
        for name, module in profile.modules.items()
    }
    ns = profile.device.optimizer_ns_per_parameter * optimizer
    device = profile.device.model_copy(update={"optimizer_ns_per_parameter": ns})
    return profile.model_copy(update={"modules": modules, "links": links, "device": device})


def _fit_factor(doubts: list[Doubt], time: ModuleTime, level: Level) -> float:
    """Return the factor of a module's time by its fit's error on held-out sizes, or the inverse."""
    widest = 1.0 + time.fit_error_pct / 100 * sum(doubt.pessimistic.fit for doubt in doubts)
    return {"optimistic": 1.0 / widest, "expected": 1.0, "pessimistic": widest}[level]


def _scaled_shard(
    shard: LayerShard, kernels: float, link: float, overlap: float, byte_ms: float
) -> LayerShard:
    """Return a layer's times with kernels and bytes of the TP group's messages scaled."""

    def with_messages(time: Polynomial, name: Pass) -> Polynomial:
        sent = shard.sent_bytes.get(name)
        messages = [] if sent is None or link == kernels else [((link - kernels) * byte_ms, sent)]
        return combine((kernels, time), *messages)

    times = {field: with_messages(getattr(shard, field), name) for field, name in PASSES.items()}
    times |= {
        field: combine((factor, getattr(shard, field)))
        for field, factor in (("weight_ms", kernels), ("recomputing_ms", link))
    }
    saved = {name: combine((link * overlap, time)) for name, time in shard.hidden_ms.items()}
    return shard.model_copy(update=times | {"hidden_ms": saved})


def _scaled_links(profile: Profile, factors: list[Factors], level: Level, gpus: int) -> LinkProfile:
    def total(name: str) -> float:
        return math.prod(getattr(one, name) for one in factors)

    inside, between = profile.links, profile.links.inter_node
    if lacks_network(profile, gpus) and level != "optimistic":
        between = _stated_network(profile)
    link = total("link")
    changed = _scaled_times(inside, link, link, sum(one.link_hop_us for one in factors))
    if between is not None:
        network = total("network")
        hop_us = sum(one.network_hop_us for one in factors)
        changed["inter_node"] = between.model_copy(
            update=_scaled_times(between, network, network * total("network_p2p"), hop_us)
        )
    return inside.model_copy(update=changed)


def _scaled_times(
    link: LinkTimes, collectives: float, p2p: float, hop_us: float
) -> dict[str, float | LinkTimes]:
    names = ("all_reduce", "all_gather", "reduce_scatter")
    return {
        **{f"{name}_gbps": getattr(link, f"{name}_gbps") / collectives for name in names},
        "p2p_gbps": link.p2p_gbps / p2p,
        "hop_us": link.hop_us + hop_us,
    }


def _stated_network(profile: Profile) -> LinkTimes:
    """Return the run file's network, no faster than the links inside a node."""
    stated = network_times(profile.cluster)
    slower = {
        name: min(getattr(stated, name), getattr(profile.links, name))
        for name in LinkTimes.model_fields
        if name.endswith("_gbps")
    }
    return stated.model_copy(update=slower)
