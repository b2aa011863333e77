"""The policy `best`: simulate several orders of a global batch and take the fastest.

Among them are the packed order and the paper's, so that no step is slower than under those policies
in the simulator. The others balance sequences in every unit's cost at once (`fitting`), give the
slots the work that suits the pipeline (`shaping`), and search over the order of the slots
(`sequencing`). If one unit has all modules, each of its replicas has a separate order (`apart`).
Costs are the profile's.

The result is deterministic on all machines: times are sums and maxima of the same numbers, ties go
to the first, and searches end after a fixed number of evaluations.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property, partial

import numpy as np

from disttrain_cli.costs.layout import stages_of
from disttrain_cli.costs.memory import layout_memory
from disttrain_cli.data.arrays import starts_of
from disttrain_cli.data.ordering.apart import order_apart
from disttrain_cli.data.ordering.assigning import assign, count_costs
from disttrain_cli.data.ordering.fitting import fit
from disttrain_cli.data.ordering.intervals import interval_order
from disttrain_cli.data.ordering.levelling import deal, level
from disttrain_cli.data.ordering.loads import replica_loads
from disttrain_cli.data.ordering.sequencing import search_order
from disttrain_cli.data.ordering.shaping import Shaped, shape
from disttrain_cli.data.sizes import Sizes, sizes_of_sample
from disttrain_cli.data.slots import Assignment, Ints
from disttrain_cli.simulation.grouping import grouped
from disttrain_cli.simulation.makespan import steps_s
from disttrain_cli.simulation.step import pipelines_of
from disttrain_cli.simulation.timeline import Floats, Pipeline
from disttrain_cli.spec.plan import Layout, UnitPlan
from disttrain_cli.spec.profile import Profile

# Slots times stages up to which slots are shaped and searched: with more slots, the first and last
# are too few to matter, and with more stages the search would take minutes.
MOST_PASSES = 1 << 15
MOST_WORK = 1.5  # limit of the mean weight of slots whose activations are kept at once
ROOM = 0.95  # of a device's memory, up to which heavier slots may fill it


class Best:
    """The policy for one profile and layout; batch-independent results are computed once."""

    def __init__(
        self, profile: Profile, layout: Layout, gpus_per_node: int, memory_gib: float
    ) -> None:
        self._profile, self._layout, self._inputs = profile, layout, profile.inputs
        self._gpus_per_node, self._memory_gib = gpus_per_node, memory_gib
        self._stages = stages_of(profile, layout)
        self._llm = layout.unit_of(profile.inputs.llm)

    def order(self, sizes: Sizes) -> Assignment:
        """Return the fastest assignment of a global batch among those tried."""
        tried = list(self.orders(sizes))
        loads_of = partial(replica_loads, sizes, self._inputs, self._layout)
        times_ns = [
            round(1e9 * time_s)
            for time_s in steps_s(self._pipelines(list(map(loads_of, tried)))).tolist()
        ]
        return tried[times_ns.index(min(times_ns))]

    def orders(self, sizes: Sizes) -> Iterator[Assignment]:
        """Yield all assignments to try."""
        counts, costs = count_costs(sizes, self._inputs), self.costs(sizes)
        stages = sum(unit.stages for unit in self._layout.units)
        # the searches simulate 1F1B with a stage for each rank
        many = self._layout.microbatches * stages > MOST_PASSES or self._llm.chunks > 1
        paper = assign(counts, self._layout, self._inputs.llm, "paper")
        yield from (paper, assign(counts, self._layout, self._inputs.llm, "none"))
        if len(self._layout.units) == 1:
            levelled = Assignment(self._levelled(costs))
            yield (
                levelled
                if many
                else Assignment(order_apart(self.pipeline(sizes, levelled), levelled.positions))
            )
            return
        levelled = Assignment(paper.positions, carry=True)
        yield levelled
        if many:
            return
        if np.ptp(_total(costs, self._llm)):
            yield self._searched(sizes, levelled)
        yield self._searched(sizes, Assignment(self._filled(costs), carry=True))

    def costs(self, sizes: Sizes) -> dict[str, Ints]:
        """Return, by module, the time in ns [Q] of each sequence over all stages.

        It is the forward and backward time.
        """
        work = sizes.work(self._inputs)
        costs: dict[str, Ints] = {}
        for of_stage, cost in ((one, cost) for one in self._stages for cost in one.costs):
            shared = of_stage.unit.dealt_over(cost.module)
            rates = (1e6 / shared * np.sum(cost.parts_ms, axis=0)).tolist()[1:]
            items, tokens, length_sq = work[cost.module].T
            own_ns = rates[0] * items + rates[1] * tokens + rates[2] * length_sq
            costs[cost.module] = costs.get(cost.module, 0) + np.rint(own_ns).astype(np.int64)
        return costs

    def pipeline(self, sizes: Sizes, assignment: Assignment) -> Pipeline:
        """Return the simulator's pipeline of a step."""
        return self._pipeline(replica_loads(sizes, self._inputs, self._layout, assignment))

    def _pipeline(self, loads: dict[str, Floats]) -> Pipeline:
        return self._pipelines([loads])[0]

    def _pipelines(self, loads: list[dict[str, Floats]]) -> list[Pipeline]:
        return pipelines_of(self._profile, self._layout, self._stages, loads, self._gpus_per_node)

    def _levelled(self, costs: dict[str, Ints]) -> Ints:
        """Return the positions of one unit's sequences.

        Replicas are balanced in every module's cost, microbatches in the sum of the costs.
        """
        layout, total = self._layout, _total(costs, self._llm)
        columns = [of_module for of_module in costs.values() if np.ptp(of_module)] or [total]
        replicas = fit(
            np.stack(columns, axis=1), np.ones((self._llm.dp, len(columns)), dtype=np.int64)
        )
        return np.stack(
            [
                of_module[
                    np.stack(level(total[of_module], layout.microbatches, layout.microbatch_size))
                ]
                for of_module in replicas
            ],
            axis=1,
        )

    @cached_property
    def _alone(self) -> list[UnitPlan]:
        """Units without the LLM to which sequences bring unequal work, so that slots may differ."""
        costs = self.costs(sizes_of_sample(self._profile.data.sample))
        return [
            unit
            for unit in self._layout.units
            if unit is not self._llm and np.ptp(_total(costs, unit))
        ]

    @cached_property
    def _weights(self) -> Ints:
        """[n, units of `_alone`] target work of each slot, in millionths of the mean slot's."""
        layout, n = self._layout, self._layout.microbatches
        sizes = sizes_of_sample(self._profile.data.sample)
        costs, work = self.costs(sizes), sizes.work(self._inputs)
        loads = {
            module: np.broadcast_to(
                work[module].sum(axis=0) * (layout.global_batch_size / len(sizes) / n / ranks),
                (n, ranks, 3),
            )
            for unit in layout.units
            for module in unit.modules
            for ranks in [unit.dp * unit.dealt_over(module)]
        }
        pipeline = self._pipeline(loads)
        pipeline = grouped(pipeline, [[int(count)] for count in pipeline.replicas])
        memory = layout_memory(self._profile, layout, self._memory_gib)
        units = []
        for unit in self._alone:
            columns = slice(
                *np.flatnonzero([stage.unit is unit for stage in self._stages])[[0, -1]] + [0, 1]
            )
            base_s = np.array(
                [
                    [
                        sum(cost.parts_ms[part].tolist()[0] for cost in stage.costs) / 1e3
                        for stage in self._stages[columns]
                    ]
                    for part in range(len(pipeline.parts_s))
                ]
            )
            even_s = np.stack([part[0, columns, 0] for part in pipeline.parts_s])
            ascending = starts_of(np.sort(_total(costs, unit)))
            parts = len(sizes) * np.arange(1, n + 1) / n
            room = min(
                (ROOM * stage.limit_gib - stage.peak_gib) / max(stage.moving_gib, 1e-9) + 1.0
                for stage in memory[columns]
            )
            lightest = np.interp(parts, np.arange(len(ascending)), ascending) * (n / ascending[-1])
            units.append(
                Shaped(
                    columns,
                    base_s,
                    even_s - base_s,
                    lightest,
                    int(pipeline.to_end[columns.start]),
                    min(MOST_WORK, room),
                )
            )
        return np.rint(1e6 * shape(pipeline, units)).astype(np.int64)

    def _filled(self, costs: dict[str, Ints]) -> Ints:
        """Return positions with the target work in every slot.

        The LLM's replicas are balanced in every slot, and over the step.
        """
        total, m = _total(costs, self._llm), self._layout.microbatch_size
        columns, wanted = [_total(costs, unit) for unit in self._alone], self._weights
        if np.ptp(total) or not columns:
            columns, wanted = (
                [*columns, total],
                np.column_stack([wanted, np.full(len(wanted), 10**6)]),
            )
        slots = fit(np.stack(columns, axis=1), wanted)
        shares = np.stack(
            [members[np.stack(level(total[members], self._llm.dp, m))] for members in slots]
        )
        positions = np.empty_like(shares)  # [n, DP, M]
        np.put_along_axis(positions, deal(total[shares].sum(axis=2))[..., None], shares, axis=1)
        return positions

    def _searched(self, sizes: Sizes, assignment: Assignment) -> Assignment:
        """Return the slots in the order that a search finds.

        A slot's duration on a stage is that of the slowest replica.
        """
        pipeline = self.pipeline(sizes, assignment)
        pipeline = grouped(pipeline, [[int(count)] for count in pipeline.replicas])
        costs_ns = np.rint(1e9 * pipeline.computing_s[..., 0]).astype(np.int64)
        order, _ = search_order(pipeline, [np.arange(len(costs_ns)), interval_order(costs_ns)])
        return Assignment(assignment.positions[order], assignment.carry)


def _total(costs: dict[str, Ints], unit: UnitPlan) -> Ints:
    """Return the cost [Q] of each sequence in a unit."""
    return np.sum([costs[module] for module in unit.modules], axis=0, dtype=np.int64)
