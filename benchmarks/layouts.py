"""Units whose layers are spread evenly over their stages."""

from __future__ import annotations

from collections.abc import Mapping

from disttrain_cli.spec.plan import UnitPlan

Shape = tuple[int, int, int]  # TP, DP, PP


def even_units(shapes: Mapping[str, Shape], layers: Mapping[str, int]) -> list[UnitPlan]:
    """A unit for each module, in the order of `shapes`."""
    return [
        UnitPlan(
            name=name,
            modules=[name],
            tp=tp,
            dp=dp,
            pp=pp,
            gpus=tp * dp * pp,
            layers_per_stage=[
                (stage + 1) * layers[name] // pp - stage * layers[name] // pp for stage in range(pp)
            ],
        )
        for name, (tp, dp, pp) in shapes.items()
    ]
