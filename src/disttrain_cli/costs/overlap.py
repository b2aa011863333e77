"""Overlap of bucket messages with the passes of their stage, and their exposed rest.

The gradients of a bucket (`costs.buckets`) are final once the step's last pass has processed its
layers, from the last one on; weights are gathered from the first bucket on, each before a step's
first forward reaches its layers. The last pass is the last slot's backward or, with split
backwards, the deferred weight gradients of all remaining slots after it, layer by layer. Either way
the buckets up to k take Σ_{j≤k} message_j, and the layers before bucket k overlap with them, so
that

    left = max_k (Σ_{j≤k} message_j − share of the pass before bucket k · its time)

is exact: reductions end that long after the pass, and a forward begins that long after the norm is
known. The gradients of a tied weight's two copies are summed after that, fully exposed. Shares are
those of the data's mean work.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from disttrain_cli.costs.buckets import buckets
from disttrain_cli.costs.experts import exchanged_ms, local_shard, placed
from disttrain_cli.costs.freezing import Backward
from disttrain_cli.costs.layout import (
    CostedStage,
    Rings,
    after_s,
    gather_s,
    reduction_s,
    ring_width,
    update_s,
    weight_rings,
)
from disttrain_cli.costs.memoised import memoised
from disttrain_cli.costs.stage import backward_parts, forward_parts, shard_of
from disttrain_cli.schedule.one_f_one_b import last_slots
from disttrain_cli.spec.layer_costs import Polynomial
from disttrain_cli.spec.plan import Layout
from disttrain_cli.spec.profile import Profile
from disttrain_cli.spec.shape import ParallelShape
from disttrain_cli.spec.trace import BACKWARD, FORWARD, WEIGHTS
from disttrain_cli.spec.work import Work

Floats = NDArray[np.float64]
NUMBERS = 1 << 14  # per operation on arrays, about: more do not fit into the fast caches


@dataclass(frozen=True)
class Hidden:
    """Messages of all stages, each overlapped with one pass of its stage.

    Shape letters: K buckets of the stage that has most · S stages · R replicas.
    """

    operation: NDArray[np.int64]  # [S] operation of the pass, by its index in `COMPUTE`
    until_s: Floats  # [K, S] messages up to each bucket's; −∞ if a stage has fewer
    before: Floats  # [K, S] share of the pass that is computed before each bucket's layers
    mean_s: Floats  # [S] time of the pass for the data's mean work

    def of(self, stages: Sequence[int] | NDArray[np.int64]) -> Hidden:
        """Return the messages of some stages, in this order; a stage may occur several times."""
        until_s = self.until_s[:, stages]
        count = int(np.isfinite(until_s).sum(axis=0).max())
        return Hidden(
            self.operation[stages],
            until_s[:count],
            self.before[:count, stages],
            self.mean_s[stages],
        )

    @property
    def mean_left_s(self) -> Floats:
        """[S] exposed time of every stage's messages with passes of mean work."""
        left_s: Floats = (self.until_s - self.before * self.mean_s).max(axis=0)
        return left_s

    def left_s(self, pass_s: Floats) -> Floats:
        """Return [S, R, ...] exposed times of every stage's messages for passes of that length."""
        left_s = np.full(pass_s.shape, -np.inf)
        at_once = max(1, NUMBERS // pass_s.size)
        for begin in range(0, len(self.until_s), at_once):
            until_s, before = (
                part[begin : begin + at_once, :, *(None,) * (pass_s.ndim - 1)]
                for part in (self.until_s, self.before)
            )
            np.maximum(left_s, (until_s - before * pass_s).max(axis=0), out=left_s)
        return left_s


def hidden(
    profile: Profile, layout: Layout, stages: Sequence[CostedStage], gpus_per_node: int
) -> tuple[Hidden, Hidden]:
    """Return the overlap of reductions with last passes, and of optimizer steps with first ones.

    The first passes are forwards; optimizer steps include the gathers.
    """
    known: dict[Hashable, tuple[Messages, Messages]] = {}  # many stages hold the same layers
    rows: list[tuple[Messages, Messages]] = []
    for stage in stages:
        behind_nothing_s = after_s(profile, layout, stage, gpus_per_node)
        width = ring_width(stage, gpus_per_node)
        layers = stage.unit.name, stage.weight_delay, tuple(stage.held), tuple(stage.numbers)
        nodes = placed(profile, stage).ep_nodes
        if (alike := (*layers, behind_nothing_s, width, nodes)) not in known:
            rings = weight_rings(profile, stage, gpus_per_node)
            known[alike] = _of_stage(profile, layout, stage, rings, behind_nothing_s)
        rows.append(known[alike])
    last = [BACKWARD if stage.weight_delay is None else WEIGHTS for stage in stages]
    reductions, gathers = zip(*rows, strict=True)
    return (
        Hidden(np.array(last), *_stacked(reductions)),
        Hidden(np.full(len(stages), FORWARD), *_stacked(gathers)),
    )


# of one stage: [K] until_s and before, and mean_s
Messages = tuple[list[float], list[float], float]


def _stacked(rows: Sequence[Messages]) -> tuple[Floats, Floats, Floats]:
    until_s, before, mean_s = zip(*rows, strict=True)
    most = max(map(len, until_s))

    def filled(columns: Sequence[list[float]], fill: float) -> Floats:
        """Return [K, S], padded with `fill`."""
        return np.array([[*one, *[fill] * (most - len(one))] for one in columns]).T

    return filled(until_s, -np.inf), filled(before, 0.0), np.array(mean_s)


def _of_stage(
    profile: Profile, layout: Layout, stage: CostedStage, rings: Rings, behind_nothing_s: float
) -> tuple[Messages, Messages]:
    """Return reduction and gather of a stage.

    Args:
        rings: of its ranks with the same weights.
        behind_nothing_s: sums of gradients that overlap with nothing.
    """
    forward_ms, last_ms = _layers(profile, layout, stage)
    numbers = stage.numbers, stage.expert_numbers
    found = buckets(stage.numbers)
    held = [
        [sum(of_layers[bucket.start : bucket.stop]) for of_layers in numbers] for bucket in found
    ]
    reduced = [reduction_s(layout, rings, *counts) for counts in held]
    gathered = [gather_s(profile, layout, rings, *counts) for counts in held]
    last_s = sum(last_ms) / 1e3 * len(last_slots(layout.microbatches, stage.weight_delay))
    return (
        (list(accumulate(reduced, initial=behind_nothing_s))[1:], _before(found, last_ms), last_s),
        (
            list(accumulate(gathered, initial=update_s(profile, layout, stage)))[1:],
            _before(found, forward_ms),
            sum(forward_ms) / 1e3,
        ),
    )


def _before(found: Sequence[range], layers_ms: Sequence[float]) -> list[float]:
    """Return [K] the share of a pass that the layers before each bucket take."""
    *begins, whole = accumulate(layers_ms, initial=0.0)
    return [begins[bucket.start] / (whole or 1.0) for bucket in found]


def _layers(
    profile: Profile, layout: Layout, stage: CostedStage
) -> tuple[list[float], list[float]]:
    """Return by layer the ms of its forward and of its part of the step's last pass, per slot."""
    unit, splits = stage.unit, stage.weight_delay is not None
    sequences = layout.global_batch_size / layout.microbatches / unit.dp
    of_replica = placed(profile, stage).of_replica
    known = {
        (name, kind, does): _layer_ms(
            profile,
            name,
            kind,
            does,
            replace(of_replica, tp=unit.tp_of(name)),
            unit.tp_overlap,
            splits,
            sequences,
            unit.dealt_over(name),
        )
        for name, kind, does in set(stage.held)
    }
    forward_ms, last_ms = zip(*(known[layer] for layer in stage.held), strict=True)
    return list(forward_ms), list(last_ms)


@memoised
def _layer_ms(
    profile: Profile,
    name: str,
    kind: str,
    does: Backward,
    shape: ParallelShape,
    overlap: bool,
    splits: bool,
    sequences: float,
    dealt_over: int,
) -> tuple[float, float]:
    """Return ms of a layer's forward and of its part of the last pass, for a replica's slot.

    Args:
        dealt_over: ranks over which the sequences' items are distributed.
    """
    module = profile.modules[name]
    shard = local_shard(profile, name, kind, shape, shard_of(module, kind, tp=shape.tp))
    work = module.work_per_sequence.scaled(sequences / dealt_over)
    exchanged = exchanged_ms(profile, name, module.costs[kind], shape, does)
    forward = forward_parts(shard, overlap)
    if not splits:
        last = backward_parts(shard, does, shape.recompute, overlap)
        exchanging_ms = _ms([exchanged[1]], work)
    else:
        last, exchanging_ms = [shard.weight_ms] if does == "trained" else [], 0.0
    own = work.scaled(1.0 / shape.cp)
    return (
        _ms(forward, own) + _ms([exchanged[0]], work),
        _ms(last, own) + exchanging_ms,
    )


def _ms(parts: Sequence[Polynomial], work: Work) -> float:
    return max(0.0, sum(part(work) for part in parts)) if work != Work() else 0.0
