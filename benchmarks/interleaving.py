"""Would virtual stages be faster? Interleaved 1F1B in the LLM's unit, simulated operation by
operation.

With v virtual stages a rank of the LLM's unit holds v short pieces of the pipeline instead of a
long one (Narayanan et al. 2021, section 2.2): a slot passes through all ranks v times. Slots go in
groups of as many as the unit has stages. Encoders and generators keep 1F1B. Every rank works
through a fixed order; how many forwards the LLM's ranks run before their first backward is tried
out, and the fastest taken. Each operation waits for its rank, and for the operation before it on
the line and the message between (v - 1 times more of them in the LLM's unit, where chunks follow
chunks).

Costs, plans and slots are those of `benchmarks.paper` (ordering `paper`); of every slot and stage
the slowest replica counts. "formula" divides the LLM's own waiting while its pipeline fills and
drains by v, as the paper does for its warm-up. Slots in flight are those of the LLM's first rank,
in whole stages: its activations grow with them.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from statistics import mean
from typing import Any

import numpy as np

from benchmarks.common import Tables, main
from benchmarks.paper import BATCH, GPUS, SMALL_BATCHES, changed, ours, profiled, shapes
from disttrain_cli.planning.predict import simulated_step
from disttrain_cli.simulation.timeline import Floats, Pipeline, operations
from disttrain_cli.spec.plan import Layout

VIRTUAL = (1, 2, 3, 4)
MOST_EXTRA = 32  # forwards that the LLM's ranks run ahead beyond what the schedule needs

Operation = tuple[bool, int, int]  # is forward, slot, piece of the line


@dataclass(frozen=True)
class Line:
    """A pipeline as pieces in the order in which a slot passes through them; the LLM's ranks own
    several each."""

    forward_s: Floats  # [n, pieces]
    backward_s: Floats  # [n, pieces]
    transfer_s: Floats  # [pieces - 1]
    rank: list[int]  # of every piece
    llm: tuple[int, int]  # first rank of the LLM's unit, and how many
    virtual: int


def line_of(pipeline: Pipeline, llm: slice, virtual: int) -> Line:
    """A pipeline without encoders side by side, the LLM's stages cut into `virtual` equal pieces
    each."""
    forward_s, backward_s = (
        np.nanmax(np.where(pipeline.present, own, np.nan), axis=2)
        for own in (pipeline.forward_s, pipeline.backward_s)
    )
    stages, unit = list(range(forward_s.shape[1])), list(range(forward_s.shape[1]))[llm]
    before, after = stages[: llm.start], stages[llm.stop :]
    rank = before + unit * virtual + after
    share = np.array([1.0 / virtual if stage in unit else 1.0 for stage in rank])
    inside = pipeline.transfer_s[unit[:-1]].mean() if len(unit) > 1 else 0.0
    transfer_s = np.array(
        [pipeline.transfer_s[a] if b == a + 1 else inside for a, b in pairwise(rank)]
    )
    return Line(
        forward_s[:, rank] * share,
        backward_s[:, rank] * share,
        transfer_s,
        rank,
        (llm.start, len(unit)),
        virtual,
    )


def orders_of(line: Line, extra: int) -> list[list[Operation]]:
    """What every rank does, in order."""
    slots, pieces = line.forward_s.shape
    first, width = line.llm
    behind = pieces - (first + width * line.virtual)  # stages of the units after the LLM's
    passes = [
        (slot, chunk)
        for begin in range(0, slots, width)
        for chunk in range(line.virtual)
        for slot in range(begin, min(slots, begin + width))
    ]
    returns = [(slot, line.virtual - 1 - chunk) for slot, chunk in passes]
    # The last rank's first backward comes when the units behind have a slot for each of their
    # stages.
    filled = passes.index((min(slots - 1, behind), line.virtual - 1)) + 1 + extra
    orders: list[list[Operation]] = []
    for rank in range(first, first + width):
        own = [rank + chunk * width for chunk in range(line.virtual)]
        ahead = filled + (2 if line.virtual > 1 else 1) * (first + width - 1 - rank)
        orders.append(
            [
                (forward, slot, own[chunk])
                for forward, number in operations(len(passes), ahead)
                for slot, chunk in [(passes if forward else returns)[number]]
            ]
        )
    done = orders[0].index((False, 0, first))
    begun = len({slot for forward, slot, _ in orders[0][:done] if forward})
    for place in reversed(range(first)):
        ahead = begun + first - place
        orders.insert(
            0, [(forward, slot, place) for forward, slot in operations(slots, min(slots, ahead))]
        )
    for place in range(pieces - behind, pieces):
        orders.append(
            [(forward, slot, place) for forward, slot in operations(slots, pieces - place)]
        )
    return orders


def makespan_s(line: Line, orders: list[list[Operation]]) -> float | None:
    """When the last operation ends; None where ranks wait for each other forever."""
    pieces = line.forward_s.shape[1]
    ended: dict[Operation, float] = {}
    clock, at = [0.0] * len(orders), [0] * len(orders)
    left = sum(map(len, orders))
    while left:
        moved = False
        for rank, order in enumerate(orders):
            while at[rank] < len(order):
                forward, slot, piece = operation = order[at[rank]]
                source = (True, slot, piece - 1) if forward else (False, slot, piece + 1)
                if forward and piece == 0:
                    ready = 0.0
                elif not forward and piece == pieces - 1:
                    ready = ended.get((True, slot, piece), -1.0)
                elif source in ended:
                    ready = ended[source] + line.transfer_s[piece - 1 if forward else piece]
                else:
                    ready = -1.0
                if ready < 0:
                    break
                spent = (line.forward_s if forward else line.backward_s)[slot, piece]
                clock[rank] = ended[operation] = max(clock[rank], ready) + spent
                at[rank] += 1
                left -= 1
                moved = True
        if not moved:
            return None
    return max(clock)


def in_flight(line: Line, orders: list[list[Operation]]) -> float:
    """Most slots that the LLM's first rank keeps at once, in whole stages."""
    kept = np.cumsum([1 if forward else -1 for forward, _, _ in orders[line.llm[0]]])
    return float(kept.max()) / line.virtual


def best_of(line: Line) -> tuple[float, float]:
    """(seconds, slots in flight) of the fastest number of forwards ahead; none before is faster."""
    found = []
    for extra in range(0, MOST_EXTRA + 1, 2):
        orders = orders_of(line, extra)
        spent = makespan_s(line, orders)
        if spent is not None:
            found.append((spent, in_flight(line, orders)))
    return min(found)


def compared(
    preset: str, plan: str, layout: Layout, profile: Any, cluster: Any, steps: int
) -> list[dict[str, Any]]:
    """Rows of one plan by virtual stages."""
    llm = layout.index_of(profile.inputs.llm)
    start = sum(unit.pp for unit in layout.units[:llm])
    unit = slice(start, start + layout.units[llm].pp)
    pipelines = [
        simulated_step(profile, layout, cluster, number).pipeline for number in range(steps)
    ]
    rows, base = [], 0.0
    for virtual in VIRTUAL:
        if virtual > min(layout.units[llm].layers_per_stage):
            continue
        results = [best_of(line_of(pipeline, unit, virtual)) for pipeline in pipelines]
        spent = (
            mean(seconds for seconds, _ in results)
            + float(pipelines[0].reduce_s.max())
            + pipelines[0].step_s
        )
        base = base or spent
        stages_s = [
            float(np.nanmean(pipelines[0].forward_s[:, stage] + pipelines[0].backward_s[:, stage]))
            for stage in range(unit.start, unit.stop)
        ]
        waits_s = sum(stages_s) - max(stages_s)
        rows.append(
            {
                "model": preset,
                "plan": plan,
                "layout": shapes(layout),
                "slots": layout.microbatches,
                "virtual": virtual,
                "s": spent,
                "gain": base / spent,
                "formula": base / (base - waits_s * (1.0 - 1.0 / virtual)),
                "slots in flight": max(flight for _, flight in results),
            }
        )
    return rows


def measure(small: bool = False) -> Tables:
    """One table over presets and plans."""
    rows: list[dict[str, Any]] = []
    for preset in ["mllm-72b", "mllm-15b", "mllm-9b"][: 1 if small else None]:
        run, profile = profiled(preset)
        gpus, batch = (96, SMALL_BATCHES[preset]) if small else (GPUS, BATCH)
        run = changed(run, gpus=gpus, batch=batch)
        mine, _, cluster = ours(run, profile, gpus)
        rows += compared(preset, "units", mine, profile, cluster, 1 if small else 3)
    return {"Virtual stages in the LLM's unit, one step": rows}


if __name__ == "__main__":
    main(__doc__, measure)
