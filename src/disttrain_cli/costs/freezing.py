"""What a backward has to do in every layer, given what is trained.

A trained layer makes gradients of its weights (of a module with lora, of its adapters) and inputs.
A frozen one makes those of its inputs
only while something before it trains (it *passes* gradients on), and has no backward at all
otherwise (it is *still*): it then keeps no activations either. Nothing is before an encoder:
encoders stand side by side; only these and the LLM are before a generator.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from disttrain_cli.costs.remembering import remembered
from disttrain_cli.spec.profile import LayerCost, Profile
from disttrain_cli.spec.runfile.model import PROJECTORS

Backward = Literal["trained", "passes", "still"]


def _trainable(cost: LayerCost) -> bool:
    """Whether there is anything to be trained: of a module with lora, layers without adapters have
    nothing."""
    return any(shard.trained_parameters != 0 for shard in cost.tp.values())


def owners(profile: Profile) -> set[str]:
    """Names under which a profile's model has weights that can be trained."""
    return {
        PROJECTORS if index in module.projector else name
        for name, module in profile.modules.items()
        for index, kind in enumerate(module.layers)
        if index not in module.frozen and _trainable(module.costs[kind])
    }


@remembered
def backwards(profile: Profile, trained: Sequence[str] | None) -> dict[str, list[Backward]]:
    """By module name, what the backward of each of its layers does.

    Args:
        trained: names of trained modules, and "projectors" for the layers that join modules; None =
            all.
    """
    result: dict[str, list[Backward]] = {}
    ahead = False  # whether an encoder or the LLM trains
    for name, module in profile.modules.items():
        states: list[Backward] = []
        trainable = {kind: _trainable(cost) for kind, cost in module.costs.items()}
        before = ahead and module.kind != "encoder"  # whether something before the layer trains
        for index, kind in enumerate(module.layers):
            owner = PROJECTORS if index in module.projector else name
            if index in module.frozen:
                states.append("still")
            elif (trained is None or owner in trained) and trainable[kind]:
                states.append("trained")
                before = before or index not in module.side
                ahead = ahead or module.kind != "generator"
            else:
                states.append("passes" if before else "still")
        result[name] = states
    return result
