"""Encoder and generator on the LLM's GPUs or apart: what a group of GPUs costs, holds and does.

A group is one LLM replica: TP × PP GPUs for the LLM and, where a module stays apart, some more. A
module that is inside is whole on every GPU of the LLM, and an image is computed by one GPU. A group
takes an equal share of every slot's images. Modules that share GPUs reduce their gradients one
after the other, after the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from benchmarks.list_schedule import Batch, Group
from benchmarks.waiting import costs
from disttrain_cli.costs.activations import activation_terms, working_terms
from disttrain_cli.costs.layout import (
    GRADIENT_BYTES,
    CostedStage,
    amount,
    optimizer_s,
    reduce_s,
    stages_of,
    transfers_s,
    update_s,
)
from disttrain_cli.costs.links import all_gather_s, p2p_s, reduce_scatter_s, ring_link
from disttrain_cli.costs.memory import GIB, WEIGHT_BYTES, layout_memory, parameters, state_bytes
from disttrain_cli.costs.stage import backward_parts, forward_parts, overlap_helps
from disttrain_cli.data.ordering.levelling import level
from disttrain_cli.data.sizes import Sizes, sampled_batch, sizes_of_sample
from disttrain_cli.data.slots import columns
from disttrain_cli.planning.options import layers_per_stage
from disttrain_cli.planning.solve import cluster_of
from disttrain_cli.planning.split_backward import with_delays
from disttrain_cli.planning.units import Cluster, groupings
from disttrain_cli.spec.plan import Layout, UnitPlan
from disttrain_cli.spec.profile import Profile
from disttrain_cli.spec.shape import ParallelShape

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Inside = tuple[bool, bool]  # whether encoder and generator are on the LLM's GPUs
PASSES = ("forward", "backward", "weight")
MANY = 10**6  # batches that a device may hold which keeps no activations of them


class Shape(NamedTuple):
    """One LLM replica's group of GPUs, and how many of these there are."""

    tp: int
    dp: int
    pp: int
    encoders: int  # GPUs apart
    generators: int
    microbatch: int

    @property
    def gpus(self) -> int:
        """Of one group."""
        return self.tp * self.pp + self.encoders + self.generators

    def __str__(self) -> str:
        return (
            f"{self.dp} × ({self.encoders} → {self.tp}×{self.pp} → {self.generators}),"
            f" M {self.microbatch}"
        )


class Knobs(NamedTuple):
    """What is searched for a shape, beside the rules of the schedule."""

    ahead: int = 2  # slots that a stage holds beyond those of an LLM alone
    delay: int = 8  # slots that gradients of weights wait, at most
    recompute: bool = False  # the encoder's activations
    images: int = 2  # of a GPU at a time


@dataclass(frozen=True)
class Case:
    """A model on a cluster and the global batch that it is judged by."""

    profile: Profile
    cluster: Cluster
    hidden: bool  # reducing and gathering take no time; else they follow the step
    sizes: Sizes
    work: dict[str, Floats]  # [Q, 3] by module
    images: dict[str, list[Floats]]  # by encoder and generator, [images, 3] of every sequence

    @cached_property
    def load_us(self) -> Ints:
        """[Q] what the images of each sequence take, about."""
        load = np.zeros(len(self.sizes))
        for name in self.modules[::2]:
            tokens = self.work[name][:, 1]
            load += 1e3 * whole_ms(self.profile, name) * tokens / tokens.mean()
        return load.astype(np.int64)

    @property
    def modules(self) -> list[str]:
        """Encoder, LLM, generator."""
        return list(self.profile.modules)


@dataclass(frozen=True)
class Priced:
    """A shape with knobs: stages, memory and what follows the last computation."""

    shape: Shape
    knobs: Knobs
    inside: Inside
    stages: list[CostedStage]  # of a layout of encoder, LLM, generator
    empty: Group  # without work
    after_s: Floats  # [D] reduction
    step_s: float  # optimizer, and gathering of weights


def case_of(name: str, gpus: int, hidden: bool = False) -> Case:
    """A model's frozen costs with one global batch."""
    run, profile = costs(name)
    cluster = cluster_of(run, profile, gpus)
    sizes = sampled_batch(sizes_of_sample(profile.data.sample), cluster.batch, 0)
    images = {
        head.module: np.split(
            columns(np.broadcast_to(head.size(1 if head.alike else items.area), items.area.shape)),
            items.start[1:-1],
        )
        for head in profile.inputs.heads
        for items in [sizes.items[head.item]]
    }
    return Case(profile, cluster, hidden, sizes, sizes.work(profile.inputs), images)


class Module(NamedTuple):
    """What a whole encoder or generator takes on each GPU that holds it."""

    states_gib: float
    image_gib: float  # kept of one image
    working_gib: float  # that a layer holds beside
    reduce_s: float
    update_s: float


def module_of(case: Case, name: str, ranks: int) -> Module:
    """A module that so many GPUs hold."""
    profile = case.profile
    kept, shared = (part.sum() for part in state_bytes(profile, [name], 1, tp=1))
    image = np.array([1.0, 0.0, 0.0, 1.0])
    count = float(parameters(profile, [name], tp=1).sum())
    waste = (1.0 + profile.device.fragmentation) / GIB
    link = ring_link(profile.links, case.cluster.gpus_per_node)
    moved = 0.0 if case.hidden else count
    return Module(
        (kept + shared / ranks) / GIB,
        float((image @ activation_terms(profile, [name], tp=1)).sum()) * waste,
        float((image @ working_terms(profile, [name], tp=1)).max()) * waste,
        reduce_scatter_s(link, moved * GRADIENT_BYTES, ranks),
        count / ranks * profile.device.optimizer_ns_per_parameter * 1e-9
        + all_gather_s(link, moved * WEIGHT_BYTES[profile.precision], ranks),
    )


def priced(case: Case, inside: Inside, shape: Shape, knobs: Knobs) -> Priced | None:
    """Costs of a shape; None where it does not fit."""
    profile, cluster, pp = case.profile, case.cluster, shape.pp
    apart = (shape.encoders, shape.generators)
    modules = [
        module_of(case, name, shape.dp * (shape.tp * pp if here else own))
        for name, here, own in zip(case.modules[::2], inside, apart, strict=True)
    ]
    kept = (knobs.images * knobs.recompute, knobs.images)
    running = [
        each.working_gib + count * each.image_gib for each, count in zip(modules, kept, strict=True)
    ]
    # what colocated modules take beside activations that wait
    beside = sum(each.states_gib * here for each, here in zip(modules, inside, strict=True))
    beside += max(size * here for size, here in zip(running, inside, strict=True))
    if inside[0]:  # rows for the LLM's first stage, of all slots, if they are encoded ahead
        rows = profile.modules[case.modules[0]].output_bytes_per_sequence / GIB
        beside += rows * cluster.batch / shape.dp / shape.tp
    layout = _layout(case, shape, knobs, cluster.memory_gib - beside)
    if layout is None:
        return None
    limit = cluster.memory_gib - beside
    whole, at_once, later = (limit - _peaks(case, layout, delay) for delay in (None, 0, 1))
    slot_gib = np.maximum(at_once - later, 1e-9)  # peaks grow by the same for every slot
    waits = at_once >= 0
    delay = np.minimum(knobs.delay, np.where(waits, at_once / slot_gib, 0.0)).astype(int)
    room = np.where(waits, at_once - delay * slot_gib, whole)
    own = cluster.memory_gib - profile.device.context_gib
    own_rooms = [own - each.states_gib - size for each, size in zip(modules, running, strict=True)]
    if min(*room, *own_rooms) < 0:
        return None
    delays = [int(d) if wait else None for d, wait in zip(delay, waits, strict=True)]
    layout = with_delays(layout, [None, *delays, *[None] * knobs.ahead])
    stages = stages_of(profile, layout)
    places = [*room, *[own_rooms[0]] * shape.encoders, *[0.0] * shape.generators]
    batch_gib = modules[0].image_gib * knobs.images
    llm, count, per_node = range(pp), len(places), cluster.gpus_per_node
    devices = (
        [*(llm if inside[0] else range(pp, pp + shape.encoders))],
        [*(llm if inside[1] else range(pp + shape.encoders, count))],
    )
    after_s, stepping_s = np.zeros(count), np.zeros(count)
    for number, stage in enumerate(stages[1 : pp + 1]):
        if case.hidden:
            stepping_s[number] = update_s(profile, layout, stage)
        else:
            after_s[number] = reduce_s(profile, layout, stage, per_node)
            stepping_s[number] = optimizer_s(profile, layout, stage, per_node)
    for module, where in zip(modules, devices, strict=True):
        after_s[where] += module.reduce_s
        stepping_s[where] += module.update_s
    entering, leaving = (
        p2p_s(profile.links.of(False), bytes_ * shape.microbatch / shape.tp)
        for bytes_ in (profile.modules[name].output_bytes_per_sequence for name in case.modules[:2])
    )
    empty = Group(
        forward_s=[],
        backward_s=[],
        weight_s=[],
        encoded=[],
        generated=[],
        encoders=devices[0],
        generators=devices[1],
        flight=[pp - stage + knobs.ahead for stage in llm],
        delay=delay.tolist(),
        hold=[MANY if knobs.recompute else int(size / batch_gib) for size in places],
        anywhere=knobs.recompute,
        hop_s=transfers_s(profile, layout, stages, per_node)[1:pp].tolist(),
        enter_s=entering,
        leave_s=leaving,
    )
    return Priced(shape, knobs, inside, stages, empty, after_s, float(stepping_s.max()))


def _layout(case: Case, shape: Shape, knobs: Knobs, limit_gib: float) -> Layout | None:
    """The LLM with the best split of layers in so much memory, between an encoder and a generator
    of as many stages as the LLM is to hold slots more."""
    cluster = replace(case.cluster, memory_gib=limit_gib, checkpointing="none")
    units = groupings(case.profile, cluster, "disaggregated")[0]
    sequences = shape.dp * shape.microbatch
    slots = cluster.batch // sequences
    degrees = ParallelShape(tp=shape.tp, dp=shape.dp, pp=shape.pp)
    layers = layers_per_stage(units[1], degrees, sequences, slots, knobs.ahead)
    if layers is None:
        return None
    after = [units[2].layers - knobs.ahead + 1, *[1] * (knobs.ahead - 1)]
    # as wide as a node before, so that the LLM's ranks begin one
    plans = [
        UnitPlan(
            name=unit.name,
            modules=list(unit.modules),
            tp=tp,
            dp=dp,
            pp=len(split),
            gpus=tp * dp * len(split),
            layers_per_stage=split,
            checkpointing=recompute,
            tp_overlap=unit.overlaps(ParallelShape(tp=tp)),
        )
        for unit, tp, dp, split, recompute in (
            (units[0], 1, cluster.gpus_per_node, [units[0].layers], knobs.recompute),
            (units[1], shape.tp, shape.dp, layers, False),
            (units[2], 1, 1, after, False),
        )
    ]
    return Layout(
        global_batch_size=cluster.batch,
        microbatch_size=shape.microbatch,
        microbatches=slots,
        gpus_used=sum(plan.gpus for plan in plans),
        units=plans,
    )


def _peaks(case: Case, layout: Layout, delay: int | None) -> Floats:
    """[S] GiB of the LLM's stages with gradients of weights that wait so long."""
    pp = layout.units[1].pp
    delays = [None, *[delay] * pp, *[None] * layout.units[2].pp]
    memory = layout_memory(case.profile, with_delays(layout, delays), case.cluster.memory_gib)
    return np.array([stage.peak_gib for stage in memory[1 : pp + 1]])


def whole_ms(profile: Profile, name: str, tp: int = 1) -> float:
    """Forward and backward of a whole module for the mean sequence, TP messages as is faster."""
    module = profile.modules[name]
    overlap = tp > 1 and overlap_helps(profile, [name], ParallelShape(tp=tp), "tp")
    shards = [module.costs[kind].tp[str(tp)] for kind in module.layers]
    return sum(
        part(module.work_per_sequence)
        for shard in shards
        for part in (
            *forward_parts(shard, overlap),
            *backward_parts(shard, "trained", overlap=overlap),
        )
    )


def work_of(case: Case, priced: Priced) -> Group:
    """What each group has to do, as long as it takes in the slowest of all of them.

    Slots are levelled by what their images take, and all groups do the same in the same order. The
    images of all slots are dealt to the groups one by one, read ones in a row through all slots and
    made ones slot by slot: a share is the images that one round of dealing gives to all groups, and
    takes as long as the largest of them, from its first slot to its last.
    """
    encoder, llm, generator = case.modules
    shape, images, pp = priced.shape, priced.knobs.images, priced.shape.pp
    size = shape.dp * shape.microbatch
    slots = np.array(level(case.load_us, len(case.load_us) // size, size))
    by_group = slots.reshape(len(slots), shape.dp, shape.microbatch)
    work = case.work[llm][by_group].sum(axis=2)
    parts_s = np.zeros((3, len(slots), pp))
    for number, stage in enumerate(priced.stages[1 : pp + 1]):
        for cost in stage.costs:
            for part_s, coefficients in zip(parts_s, cost.parts_ms, strict=True):
                part_s[:, number] += amount(coefficients, work).max(axis=1) / 1e3
    lanes = [shape.tp if here else 1 for here in priced.inside]
    read, made = (
        [np.concatenate([case.images[name][one] for one in slot]) for slot in slots]
        for name in (encoder, generator)
    )
    slot_of = np.repeat(np.arange(len(slots)), [len(own) for own in read])
    shares = _shares(np.concatenate(read), shape.dp)
    forward_s, backward_s = _batches(priced.stages[:1], shares, lanes[0], images)
    step = lanes[0] * images * shape.dp
    ends = [slot_of[at : at + step][[0, -1]].tolist() for at in range(0, len(slot_of), step)]
    return replace(
        priced.empty,
        **{f"{name}_s": part.tolist() for name, part in zip(PASSES, parts_s, strict=True)},
        encoded=[
            Batch(*slots_of, *times_s)
            for slots_of, *times_s in zip(
                ends, forward_s.tolist(), backward_s.tolist(), strict=True
            )
        ],
        generated=[
            sum(
                _batches(priced.stages[pp + 1 :], _shares(own, shape.dp), lanes[1], images)
            ).tolist()
            for own in made
        ],
    )


def _shares(work: Floats, groups: int) -> Floats:
    """[rounds, 3] the largest work of an image in every round of dealing [N, 3] to groups."""
    padded = np.zeros((-(-len(work) // groups) * groups, 3))
    padded[: len(work)] = work
    return padded.reshape(-1, groups, 3).max(axis=1)


def _batches(
    stages: Sequence[CostedStage], work: Floats, lanes: int, images: int
) -> tuple[Floats, Floats]:
    """Forwards and backwards in s of batches of so many images on each of a device's GPUs
    (`lanes`), which wait for each other; `work` of every image [N, 3]."""
    count = -(-len(work) // (lanes * images))
    padded = np.zeros((count * lanes * images, 3))
    padded[: len(work)] = work
    by_lane = padded.reshape(count, images, lanes, 3).sum(axis=1)
    costs_ms = [cost.parts_ms for stage in stages for cost in stage.costs]
    forward, backward = (
        sum(amount(parts[which], by_lane) for parts in costs_ms).max(axis=1) / 1e3
        if count
        else np.zeros(0)
        for which in (0, 1)
    )
    return forward, backward
