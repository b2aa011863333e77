"""What it would gain to run encoder and generator on the LLM's GPUs, inside its pipeline's gaps.

Optimus (arXiv 2408.03505) schedules encoders into the gaps of LLM pipelines, BigMac (arXiv
2605.25451) nests encoders and generators in them. Here both are simulated on the frozen costs of
`benchmarks.waiting`: `benchmarks.placements` says what a group of GPUs costs and holds,
`benchmarks.list_schedule` when it does what. "Perfect packing" is below every schedule of all
shapes looked at. Plans reduce and gather behind their passes; of colocated steps both ends are
shown: all of it after the step, and all of it hidden. TP messages are hidden in both as in plans.
Simulated; nothing here was measured on a GPU. Deterministic. Takes some ten minutes.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from benchmarks.common import Tables, main
from benchmarks.list_schedule import Group, Rules, ends_s
from benchmarks.placements import (
    Case,
    Inside,
    Knobs,
    Priced,
    Shape,
    case_of,
    module_of,
    priced,
    whole_ms,
    work_of,
)
from benchmarks.waiting import CASES, costs
from disttrain_cli.costs.memory import layout_memory
from disttrain_cli.planning.bounds import divisors
from disttrain_cli.planning.predict import simulated_step
from disttrain_cli.planning.solve import solve
from disttrain_cli.spec.plan import Plan

#: Modules on the LLM's GPUs: encoder, generator.
VARIANTS = {
    "neither": (False, False),
    "encoder": (True, False),
    "generator": (False, True),
    "both": (True, True),
}
APART_SHARE = 0.4  # of a group's GPUs that a module apart may have
LEAST_USED = 0.9  # of the GPUs
MOST_MICROBATCH, MOST_STAGES, MOST_SLOTS = 2, 16, 64
QUICK = 60  # shapes of a variant that are scheduled once, those of the lowest floors
TRIED = 6  # of these whose schedules are searched, the fastest
LEAST_GAIN = 1e-3  # of a step, for which a search goes on
STARTS = [Knobs(recompute=recompute) for recompute in (False, True)]
KNOBS = {"ahead": (1, 2, 3), "delay": (0, 1, 2, 4, 8, 16), "images": (1, 2, 4)}
RULES = [Rules(lead, soon) for lead in (0, 1, 2, 4) for soon in (False, True)]


class Found(NamedTuple):
    """A scheduled shape."""

    step_s: float
    shape: Shape
    knobs: Knobs
    rules: Rules


def shapes(case: Case, inside: Inside) -> Iterator[Shape]:
    """Groups that use most GPUs."""
    batch, gpus, llm = case.cluster.batch, case.cluster.gpus, case.profile.modules[case.modules[1]]
    for tp, dp in itertools.product(map(int, llm.costs["block"].tp), divisors(batch)):
        size = gpus // dp
        apart = [[0] if here else range(1, int(APART_SHARE * size) + 1) for here in inside]
        for encoders, generators in itertools.product(*apart):
            pp = (size - encoders - generators) // tp
            for microbatch in range(1, MOST_MICROBATCH + 1):
                shape = Shape(tp, dp, pp, encoders, generators, microbatch)
                slots, left = divmod(batch, dp * microbatch)
                possible = 0 < pp <= MOST_STAGES and not left and 1 < slots <= MOST_SLOTS
                if possible and shape.gpus * dp >= LEAST_USED * gpus:
                    yield shape


def floor_s(case: Case, inside: Inside, shape: Shape) -> float:
    """Computing time of the busiest kind of GPU of a group, if all of it could be divided at
    will."""
    encoder, llm, generator = case.modules
    sequences = case.cluster.batch / shape.dp
    on_llm_ms = whole_ms(case.profile, llm, shape.tp) * shape.tp
    alone_ms = [0.0]
    for name, here, own in zip(
        (encoder, generator), inside, (shape.encoders, shape.generators), strict=True
    ):
        if here:
            on_llm_ms += whole_ms(case.profile, name)
        else:
            alone_ms.append(whole_ms(case.profile, name) / own)
    return sequences * max(on_llm_ms / (shape.tp * shape.pp), *alone_ms) / 1e3


def bound_s(one: Priced, group: Group) -> float:
    """A step that no schedule beats: all computing time packed perfectly on the GPUs that may do
    it, with the gaps at both ends of the LLM's pipeline that nothing can fill, and reduction and
    optimizer after it."""
    pp, (encoder_in, generator_in) = one.shape.pp, one.inside
    read_s, back_s = (
        sum(getattr(batch, f"{way}_s") for batch in group.encoded)
        for way in ("forward", "backward")
    )
    made_s = sum(map(sum, group.generated))
    llm_s = sum(np.sum(part) for part in (group.forward_s, group.backward_s, group.weight_s))
    hops = np.cumsum([0.0, *group.hop_s])
    begins = np.cumsum([0.0, *group.forward_s[0][:-1]]) + hops
    ends = np.cumsum([0.0, *group.backward_s[-1][:-1]]) + hops
    later = sum(
        sum(row[stage] for row in group.weight_s[-1 - delay :])
        for stage, delay in enumerate(group.delay)
    )
    idle = max(0.0, begins.sum() - read_s * encoder_in)
    idle += max(0.0, ends.sum() - later - back_s * encoder_in)
    inside_s = llm_s + (read_s + back_s) * encoder_in + made_s * generator_in + idle
    alone = [] if encoder_in else [(read_s + back_s) / one.shape.encoders]
    alone += [] if generator_in else [made_s / one.shape.generators]
    return float(max(inside_s / pp + one.after_s[:pp].min(), *alone, 0.0)) + one.step_s


class Search:
    """Schedules of a variant's shapes, and the lowest bound that it has met."""

    def __init__(self, case: Case, inside: Inside, quick: int = QUICK, tried: int = TRIED) -> None:
        self.case, self.inside, self.quick, self.tried = case, inside, quick, tried
        self.lowest_s = np.inf
        self.fitting = cache(self._fitting)

    def best(self) -> Found:
        """The fastest schedule of those shapes that are fastest before anything is searched."""
        case, inside = self.case, self.inside
        floors = sorted((floor_s(case, inside, shape), shape) for shape in shapes(case, inside))
        quick = [
            min(self.timed(shape, knobs, Rules()) for knobs in STARTS)
            for _, shape in floors[: self.quick]
        ]
        order = np.argsort(quick, kind="stable")[: self.tried].tolist()
        found = [self.climbed(floors[place][1], knobs) for place in order for knobs in STARTS]
        return min(found, key=lambda one: one.step_s)

    def climbed(self, shape: Shape, knobs: Knobs) -> Found:
        """A better schedule of a shape, one knob after the other."""
        rules, before_s = Rules(), np.inf
        while (now_s := self.timed(shape, knobs, rules)) < before_s * (1 - LEAST_GAIN):
            before_s = now_s
            for name, choices in KNOBS.items():
                tried = [knobs._replace(**{name: choice}) for choice in choices]
                knobs = min(tried, key=lambda one: self.timed(shape, one, rules))
            rules = min(RULES, key=lambda one: self.timed(shape, knobs, one))
        return Found(now_s, shape, knobs, rules)

    def timed(self, shape: Shape, knobs: Knobs, rules: Rules) -> float:
        """A scheduled step; infinite where it does not fit."""
        fits = self.fitting(shape, knobs)
        ends = fits and ends_s(fits[1], rules)
        if fits is None or ends is None:
            return np.inf
        return float((np.array(ends) + fits[0].after_s).max()) + fits[0].step_s

    def _fitting(self, shape: Shape, knobs: Knobs) -> tuple[Priced, Group] | None:
        one = priced(self.case, self.inside, shape, knobs)
        if one is None:
            return None
        group = work_of(self.case, one)
        self.lowest_s = min(self.lowest_s, bound_s(one, group))
        return one, group


def plan_of(case: Case, name: str) -> Plan:
    """What `disttrain plan` finds on the costs of a case."""
    run, _ = costs(name)
    return solve(run, case.profile, gpus=case.cluster.gpus, top=0, strategy="disaggregated")


def idle(case: Case, plan: Plan) -> dict[str, Any]:
    """Where the GPUs of a plan do not compute, in % of all GPUs' time, and what of it could take
    images.

    A stage of the LLM can take the images of a module whose weights, gradients and optimizer states
    it has room for, and one image.
    """
    profile, layout = case.profile, plan.plan
    step = simulated_step(profile, layout, case.cluster)
    pipeline, timeline, stages = step.pipeline, step.timeline, step.stages
    all_s = case.cluster.gpus * timeline.iteration_s / 100
    busy_s = np.where(pipeline.present, timeline.busy_s, timeline.iteration_s)
    waits_s = (timeline.iteration_s - busy_s).sum(axis=1) * [stage.tp for stage in stages]
    names = np.array([stage.unit.modules[0] for stage in stages])
    llm = names == case.modules[1]
    memory = layout_memory(profile, layout, case.cluster.memory_gib)
    room_gib = np.array([stage.limit_gib - stage.peak_gib for stage in memory])
    takes = np.zeros(len(stages), dtype=bool)
    for name in (case.modules[0], case.modules[2]):
        module = module_of(case, name, case.cluster.gpus)
        takes |= room_gib >= module.states_gib + module.working_gib + module.image_gib
    takeable_s = waits_s[llm & takes].sum()
    return {
        "LLM idle %": waits_s[llm].sum() / all_s,
        "encoder idle %": waits_s[names == case.modules[0]].sum() / all_s,
        "generator idle %": waits_s[names == case.modules[2]].sum() / all_s,
        "LLM idle with room %": takeable_s / all_s,
        "step if that were filled, s": timeline.iteration_s - takeable_s / case.cluster.gpus,
    }


def colocated(case: Case, variant: str, **effort: int) -> dict[str, Any]:
    """The best schedule found of a variant."""
    search = Search(case, VARIANTS[variant], **effort)
    best = search.best()
    return {
        "on the LLM's GPUs": variant,
        "groups × (encoder → LLM → generator)": str(best.shape),
        "s per step": best.step_s,
        "perfect packing, s": search.lowest_s,
        "recomputes": best.knobs.recompute,
    }


def measure(small: bool = False) -> Tables:
    """Where plans wait, and colocated steps beside them."""
    waiting, steps = [], []
    effort = {"quick": 3, "tried": 1} if small else {}
    for name, gpus in CASES[:1] if small else CASES:
        head: dict[str, Any] = {"model": name, "devices": gpus}
        case = case_of(name, gpus)
        plan = plan_of(case, name)
        plan_s = plan.predicted.iteration_s
        waiting.append(head | {"s per step": plan_s} | idle(case, plan))
        for hidden, variant in itertools.product((False, True), VARIANTS):
            if variant == "both" or not (small or variant == "neither" or hidden):
                row = colocated(case_of(name, gpus, hidden), variant, **effort)
                places = {"reductions": "hidden" if hidden else "after the step"}
                gain = {"gain over the plan": plan_s / row["s per step"]}
                steps.append(head | places | row | gain)
    return {"Where plans wait": waiting, "Colocated": steps}


if __name__ == "__main__":
    main(__doc__, measure)
