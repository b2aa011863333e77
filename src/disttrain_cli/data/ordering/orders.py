"""Orders of a run's steps: functions of the index, the layout, the profile, the seed and the step.

They are the same on every rank and preprocessing worker.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from disttrain_cli.data.epochs.mixture import Mixture, mixture_of
from disttrain_cli.data.once import Once
from disttrain_cli.data.ordering.assigning import assign, count_costs, order_step
from disttrain_cli.data.packing import Packing, SequenceStream
from disttrain_cli.data.sizes import Sizes, sizes_of
from disttrain_cli.data.slots import Assignment, StepOrder
from disttrain_cli.spec.inputs import ModelInputs
from disttrain_cli.spec.plan import Layout
from disttrain_cli.spec.profile import Profile
from disttrain_cli.spec.progress import Progress, silent
from disttrain_cli.spec.runfile import RunFile

if TYPE_CHECKING:
    from disttrain_cli.data.index.sample_index import Index

# steps: the next one, this one, and earlier ones whose last slots may still be in preparation
KEPT = 4

StepWork = tuple[StepOrder, Packing]


class Policy:
    """An ordering policy for the global batches of a layout.

    Args:
        name: `none`, `paper` or `best`.
        profile: required by the policy `best`.
        memory_gib: usable memory of one device; None = the profile's.
    """

    def __init__(
        self,
        name: str,
        layout: Layout,
        inputs: ModelInputs,
        profile: Profile | None,
        gpus_per_node: int,
        memory_gib: float | None = None,
    ) -> None:
        self._name, self._layout, self._inputs = name, layout, inputs
        self._best: Callable[[Sizes], Assignment] | None = None
        if name == "best":
            from disttrain_cli.data.ordering.best import Best

            assert profile is not None, "the policy best needs a profile for its simulation"
            self._best = Best(
                profile, layout, gpus_per_node, memory_gib or profile.device.memory_gib
            ).order

    def __call__(self, sizes: Sizes) -> Assignment:
        """Return the assignment of a global batch of these sizes."""
        if self._best is not None:
            return self._best(sizes)
        return assign(count_costs(sizes, self._inputs), self._layout, self._inputs.llm, self._name)


class Orders:
    """Orders step by step; the last few are cached; thread-safe.

    Args:
        profile: required by the policy `best`.
        known: assignments of steps, computed before for the same arguments.
        progress: reports when an epoch's order is computed or waited for.
    """

    def __init__(
        self,
        run: RunFile,
        layout: Layout,
        index: Index,
        profile: Profile | None = None,
        known: Mapping[int, Assignment] | None = None,
        progress: Progress = silent,
    ) -> None:
        self.layout, self.index = layout, index
        self._policy = Policy(
            run.train.ordering_on(profile.device.kind if profile else None),
            layout,
            index.inputs,
            profile,
            run.cluster.gpus_per_node,
            run.cluster.usable_gib(profile.device.memory_gib) if profile else None,
        )
        seed = run.train.seed
        self._stream = SequenceStream(
            mixture_of(index, seed, profile.data, layout.global_batch_size)
            if profile
            else Mixture(index, seed),
            progress,
        )
        self._known = known or {}
        #: Work of every replica of every unit in a step, and the global batch, in the order of the
        #: stream.
        self.of = Once(self._order, KEPT)
        #: The policy's assignment of a step.
        self.assignment = Once(self._assign, KEPT)

    def _order(self, step: int) -> StepWork:
        batch = self._batch(step)
        return order_step(batch, self.layout, step, self.assignment(step)), batch

    def _batch(self, step: int) -> Packing:
        return self._stream.batch(
            step * self.layout.global_batch_size, self.layout.global_batch_size
        )

    def _assign(self, step: int) -> Assignment:
        return (
            self._known[step] if step in self._known else self._policy(sizes_of(self._batch(step)))
        )
