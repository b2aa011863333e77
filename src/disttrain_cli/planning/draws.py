"""Sampled global batches on which layouts are simulated, and the work that they bring.

All layouts of a plan are simulated on the same batches, and many of them differ in one unit only.
So batches are drawn once, and results of an ordering are cached by their dependencies: for the
policy `paper` the sequences of every slot, before slots are ordered, by the LLM's replicas and
microbatch, and a module's work by these and its unit's replicas. The last few of each are cached,
and every order of slots; for other policies, which take longer, every layout's work.
"""

from __future__ import annotations

from collections.abc import Hashable
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from disttrain_cli.data.ordering.assigning import (
    Costs,
    count_costs,
    levelled_slots,
    slot_order,
    unit_costs,
)
from disttrain_cli.data.ordering.loads import module_loads, replica_loads
from disttrain_cli.data.ordering.orders import Policy
from disttrain_cli.data.sizes import Sizes, sampled_batch, sizes_of_sample
from disttrain_cli.data.slots import Assignment, Ints
from disttrain_cli.planning.units import Cluster
from disttrain_cli.spec.plan import Layout
from disttrain_cli.spec.profile import Profile
from disttrain_cli.spec.runfile.train import Ordering

Floats = NDArray[np.float64]
Slots = tuple[int, tuple[str, ...], int, int, int]  # batch, modules of the LLM's unit, DP, n, M
KEPT = 64


class Draws:
    """Global batches of a profile's data, and the work that they bring to a layout's replicas."""

    def __init__(self, profile: Profile, cluster: Cluster) -> None:
        self._profile, self._cluster = profile, cluster
        self._sample = sizes_of_sample(profile.data.sample)
        self._batch = lru_cache(KEPT)(self._drawn)
        self._positions = lru_cache(KEPT)(self._levelled)
        self._loads = lru_cache(KEPT)(self._loads_of)
        # by `split_backward.timed`: layouts with their best delays, and times
        self.timed: dict[Hashable, tuple[Layout, float]] = {}
        self._orders: dict[Hashable, Ints] = {}
        self._ordered: dict[tuple[str, int, Ordering], dict[str, Floats]] = {}

    def loads(
        self, layout: Layout, number: int, ordering: Ordering | None = None
    ) -> dict[str, Floats]:
        """Return by module [n slots, DP, 3] the work of every replica in global batch `number`.

        Ordered as training would by `ordering`; None = the cluster's policy.
        """
        profile, ordering = self._profile, ordering or self._cluster.ordering
        inputs, (sizes, costs) = profile.inputs, self._batch(number)
        if ordering != "paper":
            known = self.alike(layout), number, ordering
            if known not in self._ordered:
                self._ordered[known] = self._by(ordering, layout, sizes)
            return self._ordered[known]
        llm = layout.unit_of(inputs.llm)
        n, m = layout.microbatches, layout.microbatch_size
        slots: Slots = (number, tuple(llm.modules), llm.dp, n, m)
        pipeline = slots, tuple((tuple(unit.modules), unit.dp, unit.pp) for unit in layout.units)
        if pipeline not in self._orders:
            self._orders[pipeline] = slot_order(layout, inputs.llm, costs, self._positions(slots))
        order = self._orders[pipeline]
        return {
            module: self._loads(
                slots, module, unit.dealt_over(module), None if unit is llm else unit.dp
            )[order]
            for unit in layout.units
            for module in unit.modules
        }

    def alike(self, layout: Layout) -> str:
        """Return a key that is equal for layouts that differ in their strategy only."""
        return layout.model_copy(update={"strategy": "auto"}).model_dump_json()

    def _by(self, ordering: Ordering, layout: Layout, sizes: Sizes) -> dict[str, Floats]:
        profile, cluster = self._profile, self._cluster
        known = layout, profile.inputs, profile, cluster.gpus_per_node, cluster.memory_gib
        policy = Policy(ordering, *known)
        return replica_loads(sizes, profile.inputs, layout, policy(sizes))

    def _drawn(self, number: int) -> tuple[Sizes, Costs]:
        sizes = sampled_batch(self._sample, self._cluster.batch, number)
        return sizes, count_costs(sizes, self._profile.inputs)

    def _levelled(self, slots: Slots) -> Ints:
        number, modules, dp, n, m = slots
        return levelled_slots(unit_costs(modules, self._batch(number)[1]), n, m, dp=dp)

    def _loads_of(self, slots: Slots, module: str, ranks: int, dp: int | None) -> Floats:
        sizes, assignment = self._batch(slots[0])[0], Assignment(self._positions(slots))
        return module_loads(sizes, self._profile.inputs, module, assignment, ranks, dp=dp)
