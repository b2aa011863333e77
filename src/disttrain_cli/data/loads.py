"""Work of every replica in every slot of a step, from sizes and places alone: what the planner's simulation runs.

The same amounts as `Slot.work` gives for the slots of `order_step`, without building them.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from disttrain_cli.data.levelling import even_shares, owners
from disttrain_cli.data.sizes import Sizes
from disttrain_cli.data.slots import Ints, StepOrder
from disttrain_cli.spec.inputs import ModelInputs
from disttrain_cli.spec.plan import Layout

Floats = NDArray[np.float64]


def replica_loads(sizes: Sizes, inputs: ModelInputs, layout: Layout, places: Ints) -> dict[str, Floats]:
    """By module name, [n slots, DP of its unit, 3]: items, tokens, Σ length² of every replica (columns of `Work`).

    `places` [n, LLM replicas, M] as `ordering.assign` gives them. Modules in the LLM's unit work on the replica's
    own sequences; others get the slot's images levelled one by one, or its clips or targets evenly.
    """
    work = sizes.work(inputs)
    loads = {}
    for unit in layout.units:
        for module in unit.modules:
            if inputs.llm in unit.modules:
                loads[module] = work[module][places].sum(axis=2)
            elif inputs.image is not None and module == inputs.image.module:
                loads[module] = _levelled_images(sizes, places, unit.dp)
            else:
                alike = {head.module: (head, counts) for head, counts in (
                    (inputs.audio, sizes.clips), (inputs.target, sizes.targets)) if head is not None}
                head, counts = alike[module]
                shares = even_shares(counts[places].sum(axis=(1, 2)), unit.dp)
                loads[module] = shares[..., None] * np.array(head.work(1))
    return loads


def order_loads(order: StepOrder, layout: Layout, kinds: Mapping[str, str]) -> dict[str, Floats]:
    """The same from the order of a step; `kinds` of the modules by name."""
    return {module: np.array([[slot.work(kinds[module], items) for items in slot.replicas[unit.name]]
                              for slot in order.slots]) for unit in layout.units for module in unit.modules}


def _levelled_images(sizes: Sizes, places: Ints, dp: int) -> Floats:
    """[n, DP, 3] images, patches and Σ patches² of every replica of an encoder on ranks of its own."""
    slots = len(places)
    ordered = sizes.take(places.reshape(-1))
    ends = ordered.image_start[:: places[0].size][1:-1]
    owner = np.concatenate([slot * dp + owners(patches, dp)
                            for slot, patches in enumerate(np.split(ordered.patches, ends))])
    columns = (np.ones_like(ordered.patches), ordered.patches, ordered.patches**2)
    return np.stack([np.bincount(owner, column, slots * dp).reshape(slots, dp) for column in columns], axis=2)
