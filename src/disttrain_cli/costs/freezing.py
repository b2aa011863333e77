"""Backward of every layer, depending on the trained modules.

A trained layer computes gradients of its weights (in a module with LoRA, of its adapters) and
inputs. A frozen one computes those of its inputs only if an earlier layer trains (it *passes*
gradients on), and has no backward at all otherwise (it is forward-only, *still* in the code): then
it saves no activations either. Nothing precedes an encoder: encoders are parallel; only these and
the LLM precede a generator.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from disttrain_cli.costs.memoised import memoised
from disttrain_cli.spec.layer_costs import LayerCost
from disttrain_cli.spec.profile import Profile
from disttrain_cli.spec.runfile.model import PROJECTORS

Backward = Literal["trained", "passes", "still"]


def _trainable(cost: LayerCost) -> bool:
    """Return True if a layer has trainable parameters; with LoRA, if it has adapters."""
    return any(shard.trained_parameters != 0 for shard in cost.tp.values())


def owners(profile: Profile) -> set[str]:
    """Return the names under which a profile's model has weights that can be trained."""
    return {
        PROJECTORS if index in module.projector else name
        for name, module in profile.modules.items()
        for index, kind in enumerate(module.layers)
        if index not in module.frozen and _trainable(module.costs[kind])
    }


@memoised
def backwards(profile: Profile, trained: Sequence[str] | None) -> dict[str, list[Backward]]:
    """Return the backward of each layer, by module name.

    Args:
        trained: names of trained modules, and "projectors" for the layers that join modules; None =
            all.
    """
    result: dict[str, list[Backward]] = {}
    ahead = False  # True if an encoder or the LLM trains
    for name, module in profile.modules.items():
        states: list[Backward] = []
        trainable = {kind: _trainable(cost) for kind, cost in module.costs.items()}
        before = ahead and module.kind != "encoder"  # True if an earlier layer trains
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
