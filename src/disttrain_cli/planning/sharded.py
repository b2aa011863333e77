"""Fully sharded data parallelism as a baseline: FSDP and ZeRO-3.

See Zhao et al. 2023, arXiv 2304.11277, and Rajbhandari et al. 2019, arXiv 1910.02054. Every rank
computes the entire model for its own sequences and their images, TP 1, and holds a shard of every
layer. A layer's weights are gathered ahead of its forward and again ahead of its backward, and its
gradients are scattered in fp32 after the backward of every microbatch. A step runs on two streams:
compute, layer by layer, and messages, one after the other in the order in which they are issued.
The gather of the next layer is issued when a layer starts, so that two layers are gathered at a
time; the last layer's weights are kept for its backward, which follows at once. As every gather is
a collective, a layer takes as long as on the slowest rank. Hybrid sharding (HSDP) gathers and
scatters inside nodes and sums the shards between nodes in a step's last microbatch. With expert
parallelism, consecutive ranks divide the experts, which are sharded over the ranks that hold the
same ones, and gathered and scattered there; rows are exchanged as in layouts (`costs.experts`).

Not modelled: messages that slow down each other, those of
layers and rows of experts among them, kernels that slow down while messages run, the
host's time for every message, a root that stays gathered, and ranks that run up to a layer ahead of
the slowest one (below 0.1 % of a step).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from disttrain_cli.costs import nccl
from disttrain_cli.costs.activations import at_worst, kept_share, working_share
from disttrain_cli.costs.experts import exchanged_ms, local_shard, of_others
from disttrain_cli.costs.flops import mfu
from disttrain_cli.costs.freezing import Backward
from disttrain_cli.costs.layout import (
    GRADIENT_BYTES,
    CostedStage,
    amount,
    stages_of,
    weight_rings,
)
from disttrain_cli.costs.links import all_gather_s, all_reduce_s, reduce_scatter_s, ring_link
from disttrain_cli.costs.memory import (
    GIB,
    WEIGHT_BYTES,
    Groups,
    parameters,
    reserved_bytes,
    tied_in,
)
from disttrain_cli.costs.stage import (
    backward_parts,
    forward_parts,
    overlap_helps,
    shard_of,
    tp_degrees,
)
from disttrain_cli.planning.bounds import divisors
from disttrain_cli.planning.draws import Draws
from disttrain_cli.planning.predict import batches
from disttrain_cli.planning.units import Cluster, Unit
from disttrain_cli.spec.layer_costs import Polynomial, combine
from disttrain_cli.spec.plan import Baseline, Layout, UnitPlan
from disttrain_cli.spec.profile import Profile
from disttrain_cli.spec.runfile.train import Ordering
from disttrain_cli.spec.shape import ParallelShape

Floats = NDArray[np.float64]
#: Bytes of a trained parameter over all ranks of a shard group: fp32 weight, gradient, two moments.
STATE_BYTES = 16.0


@dataclass(frozen=True)
class Pass:
    """A layer's forward or backward in one microbatch, with the messages before and after it."""

    compute_s: float
    gather_s: float = 0.0  # before it
    reduce_s: float = 0.0  # after it


@dataclass(frozen=True)
class Sharding:
    """Run with that many ranks, each of which holds 1/shards of all parameters."""

    profile: Profile
    cluster: Cluster
    ranks: int
    shards: int
    microbatch_size: int
    recomputes: bool
    ep: int = 1  # degree at which experts are divided; 1 if parameters are sharded inside nodes

    def __str__(self) -> str:
        replicas = self.ranks // self.shards
        kind = f"FSDP over {self.ranks}" if replicas == 1 else f"HSDP {replicas} × {self.shards}"
        kind += f", EP {self.ep}" if self.ep > 1 else ""
        return f"{kind}{', recomputing' * self.recomputes}, M {self.microbatch_size}"

    @cached_property
    def layout(self) -> Layout:
        """The same ranks as replicas of the entire model, for computation and saved activations."""
        modules = self.profile.modules
        return Layout(
            strategy="megatron",
            global_batch_size=self.cluster.batch,
            microbatch_size=self.microbatch_size,
            microbatches=self.cluster.batch // (self.ranks * self.microbatch_size),
            gpus_used=self.ranks,
            trained=None if self.cluster.trained is None else list(self.cluster.trained),
            units=[
                UnitPlan(
                    name="model",
                    modules=list(modules),
                    dp=self.ranks,
                    ep=self.ep,
                    ep_overlap=overlap_helps(
                        self.profile,
                        list(modules),
                        ParallelShape(ep=self.ep),
                        "ep",
                        self.cluster.trained,
                    ),
                    gpus=self.ranks,
                    layers_per_stage=[sum(len(module.layers) for module in modules.values())],
                    checkpointing=self.recomputes,
                )
            ],
        )

    @cached_property
    def stage(self) -> CostedStage:
        return stages_of(self.profile, self.layout)[0]

    @cached_property
    def held(self) -> Floats:
        """[2, L] parameters of each layer that a rank computes, and those in experts under EP."""
        known = parameters(self.profile, list(self.profile.modules), tp=1)
        shape = self.layout.units[0].shape
        others = np.array(
            [of_others(self.profile, name, kind, shape)[0] for name, kind, _ in self.stage.held]
        )
        return np.array([known - others, others / max(1, self.ep - 1)])

    def peak_gib(self) -> float:
        """Return a rank's peak memory.

        It occurs in the backward of some layer, with the next one gathered and the gradients of the
        previous one being scattered.
        """
        profile, unit = self.profile, self.layout.units[0]
        kept = at_worst(kept_share, profile, self.layout, unit)
        working = np.maximum(kept, at_worst(working_share, profile, self.layout, unit))
        numbers, weight = np.array(self.stage.numbers, dtype=np.float64), WEIGHT_BYTES
        held, experts = self.held * weight[profile.precision]
        own, alike = np.array(self.stage.expert_numbers), self.ranks // self.ep
        complete = alike == 1  # no other rank has these experts: nothing of them travels
        at_once = held - experts * complete
        gathered = at_once + np.append(0.0, at_once[:-1])
        if (tied := tied_in(profile, self.stage)) is not None:
            held[tied[1]] -= held[tied[0]]
        more = STATE_BYTES - weight[profile.precision]
        states = (held - experts + (numbers - own) * more).sum() / self.shards
        states += (experts + own * more).sum() / alike
        scattered = np.append((numbers - own * complete)[1:] * GRADIENT_BYTES, 0.0)
        moving = (np.cumsum(kept) - kept + working + gathered + scattered).max()
        node = profile.cluster.gpus_per_node
        ranks, shards = (nccl.Spread.of(range(size), node) for size in (self.ranks, self.shards))
        one = nccl.Spread(1, 1, 1)
        groups = Groups(ranks, ranks, one, one, cuts=0, messages_mib=0.0)
        if self.ep > 1:
            groups = groups._replace(
                experts=nccl.Spread.of(range(self.ep), node),
                expert_replicas=nccl.Spread.of(tuple(self.stage.expert_group(0)), node),
            )
        reserved = float(reserved_bytes(profile, unit.modules, groups))
        if 1 < self.shards < self.ranks:
            shards_mib = nccl.collective_mib(profile.device, shards)
            reserved += float(profile.device.communicator_mib + shards_mib) * 2**20
        return float(states + moving * (1.0 + profile.device.fragmentation) + reserved) / GIB

    def step_s(
        self, draws: Draws, numbers: Iterable[int], ordering: Ordering | None = None
    ) -> float:
        """Return the mean time of the steps over these global batches drawn from the data.

        Ordered by the policy of the draws, or by another.
        """
        loads = [draws.loads(self.layout, number, ordering) for number in numbers]
        return float(np.mean(list(map(self._batch_s, loads))))

    def flops(self, draws: Draws, numbers: Iterable[int]) -> float:
        """Return the mean FLOPs of those steps."""
        return float(
            np.mean(
                [
                    sum(amount(cost.flops, loads[cost.module]).sum() for cost in self.stage.costs)
                    for loads in (draws.loads(self.layout, number) for number in numbers)
                ]
            )
        )

    def _batch_s(self, loads: dict[str, Floats]) -> float:
        each_ns, experts = (
            self.profile.device.optimizer_ns_per_parameter,
            self.stage.trained_experts,
        )
        own = (self.stage.trained - experts) / self.shards + experts * self.ep / self.ranks
        return streams_s(self._passes(loads)) + 1e-9 * each_ns * own

    def _passes(self, loads: dict[str, Floats]) -> Iterator[Pass]:
        """Yield all passes of a step in order."""
        computed = {layer: self._computed_s(*layer, loads) for layer in set(self.stage.held)}
        last = self.layout.microbatches - 1
        layers = list(zip(self.stage.held, self._messages_s, strict=True))
        for slot in range(last + 1):
            for layer, (gather_s, _, _) in layers:
                yield Pass(computed[layer][0][slot], gather_s)
            stays = True
            for layer, (gather_s, scatter_s, sum_s) in reversed(layers):
                if layer[2] != "still":
                    yield Pass(
                        computed[layer][1][slot],
                        0.0 if stays else gather_s,
                        scatter_s + (slot == last) * sum_s,
                    )
                stays = False

    def _computed_s(
        self, module: str, kind: str, does: Backward, loads: dict[str, Floats]
    ) -> tuple[list[float], list[float]]:
        """Return forward and backward of a layer on the slowest rank, by microbatch."""
        profile, shape = self.profile, self.layout.units[0].shape
        shard = shard_of(profile.modules[module], kind, tp=1)
        shard = local_shard(profile, module, kind, shape, shard)
        cost = profile.modules[module].costs[kind]
        parts = forward_parts(shard), backward_parts(shard, does, self.recomputes)
        forward, backward = (
            (amount(_coefficients([*part, more]), loads[module]).max(axis=1) / 1e3).tolist()
            for part, more in zip(
                parts, exchanged_ms(profile, module, cost, shape, does), strict=True
            )
        )
        return forward, backward

    @cached_property
    def _messages_s(self) -> list[tuple[float, float, float]]:
        """By layer: gathering its weights, scattering its gradients, summing these over nodes."""
        links, between = self.profile.links, self.ranks // self.shards
        rings = weight_rings(self.profile, self.stage, self.cluster.gpus_per_node)
        if between > 1:
            rings = rings._replace(link=links, size=self.shards)
        weight = WEIGHT_BYTES[self.profile.precision]
        return [
            (
                rings.times_s(all_gather_s, weight, *held),
                rings.times_s(reduce_scatter_s, GRADIENT_BYTES, count, experts),
                all_reduce_s(ring_link(links, 1), count * GRADIENT_BYTES / self.shards, between)
                if count
                else 0.0,
            )
            for held, count, experts in zip(
                self.held.T, self.stage.numbers, self.stage.expert_numbers, strict=True
            )
        ]


def streams_s(passes: Iterable[Pass]) -> float:
    """Return the time until both streams are done.

    Passes compute one after the other, each once its weights have arrived; messages are issued in
    the order in which passes start and end.
    """
    computed_s = sent_s = 0.0
    reduce_s = 0.0  # of the pass that computes, issued when it ends
    started_s = 0.0
    for each in passes:
        # the gather is issued when the previous pass starts, ahead of that pass's own reduction
        ready_s = 0.0
        if each.gather_s:
            sent_s = ready_s = max(sent_s, started_s) + each.gather_s
        if reduce_s:
            sent_s = max(sent_s, computed_s) + reduce_s
        started_s = max(computed_s, ready_s)
        computed_s, reduce_s = started_s + each.compute_s, each.reduce_s
    return max(computed_s, max(sent_s, computed_s) + reduce_s)


def sharded(profile: Profile, cluster: Cluster, draws: Draws) -> Baseline | None:
    """Return the fastest sharded run that fits, over all microbatch sizes.

    Activations are saved or recomputed, parameters sharded over all ranks or inside nodes. None if
    none fits or the global batch has fewer sequences than there are devices. It is chosen by the
    policy of the draws, and timed by the better of that and the cluster's: `best` levels the sum of
    a replica's microbatches, while here every layer waits for the slowest rank of a microbatch.
    """
    if cluster.batch < cluster.gpus or 1 not in tp_degrees(profile, list(profile.modules)):
        return None
    fitting = [one for one in _shardings(profile, cluster) if one.peak_gib() <= cluster.memory_gib]
    if not fitting:
        return None
    best = min(fitting, key=lambda one: one.step_s(draws, range(1)))
    iteration_s = min(
        best.step_s(draws, batches(cluster), ordering)
        for ordering in dict.fromkeys((None, cluster.ordering))
    )
    return Baseline(
        iteration_s=iteration_s,
        sequences_per_s=cluster.batch / iteration_s,
        mfu=mfu(best.flops(draws, batches(cluster)), iteration_s, profile.device, cluster.gpus),
        gpus_used=best.ranks,
        layout=str(best),
    )


def _shardings(profile: Profile, cluster: Cluster) -> Iterator[Sharding]:
    """Yield all runs over the most devices that share the global batch evenly."""
    ranks = max(count for count in divisors(cluster.batch) if count <= cluster.gpus)
    node, unit = cluster.gpus_per_node, Unit("model", tuple(profile.modules), profile, cluster)
    recomputes = {"none": [False], "full": [True], "auto": [False, True]}[cluster.checkpointing]
    for size in divisors(cluster.batch // ranks):
        for shards in [ranks, *([node] if ranks > node and ranks % node == 0 else [])]:
            eps = [ep for ep in unit.eps if ranks % ep == 0] if shards == ranks else [1]
            for choice, ep in itertools.product(recomputes, eps):
                yield Sharding(profile, cluster, ranks, shards, size, choice, ep)


def _coefficients(parts: Sequence[Polynomial]) -> Floats:
    """Return [4] of a sum of times (`costs.layout.amount`)."""
    total = combine(*((1.0, part) for part in parts))
    return np.array([total.base, total.per_item, total.per_token, total.per_length_sq])
