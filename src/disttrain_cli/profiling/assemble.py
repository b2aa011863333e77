"""From the measurements of a module to its part of the profile: fits per kind of layer, means over the data."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from disttrain_cli.data.packing import Packing
from disttrain_cli.data.statistics import mean_and_max_work, sequence_work
from disttrain_cli.models.flops import LayerFlops
from disttrain_cli.models.graph import LayerInfo, live_tensors
from disttrain_cli.models.layer import TensorSpec
from disttrain_cli.profiling.fitting import Floats, fit, held_out_error_pct
from disttrain_cli.spec.inputs import ModelInputs
from disttrain_cli.spec.profile import LayerCost, LayerTime, ModuleProfile, ModuleTime, Polynomial
from disttrain_cli.spec.runfile import Kind
from disttrain_cli.spec.work import Work


@dataclass(frozen=True)
class ModuleMeasurements:
    """What the processes found of one module; lists of equal length, one entry per draw. Both may be empty."""

    works: list[Work]
    times: list[dict[str, list[float]]]  # kind of layer → (forward, backward) in ms
    memory_works: list[Work]
    memory: list[dict[str, float]]  # kind of layer → bytes kept from forward to backward


def module_profile(name: str, kind: Kind, table: list[LayerInfo], packing: Packing, flops: Mapping[str, LayerFlops],
                   found: ModuleMeasurements, sharing: float, value_bytes: int) -> ModuleProfile:
    """Fit everything known of a module. A module that the data brings no work for costs nothing.

    Args:
        packing: sequences that the means are taken over.
        sharing: processes per core, by which CPU times are multiplied.
        value_bytes: bytes of one number of the tensors between modules.
    """
    layers = [layer for layer in table if layer.module == name]
    counts = Counter(layer.kind for layer in layers)
    series = {part: sharing * np.array([draw[part] for draw in found.times]).reshape(-1, 2).T for part in counts}
    costs = {part: _layer_cost(part, flops[part], found, series[part]) for part in counts}
    mean, most = mean_and_max_work(packing)[name]
    idle = 1.0 - float(np.mean(np.any(sequence_work(packing)[name] > 0, axis=1)))

    def mean_ms(times: list[Polynomial]) -> float:
        """Mean over the sequences, each run alone; one without work takes no time, not the base."""
        return sum(time(mean) - idle * time.base for time in times)

    whole = [counts[part] * values for part, pair in series.items() for values in pair]
    return ModuleProfile(
        kind=kind, parameters=sum(layer.parameters for layer in layers), layers=[layer.kind for layer in layers],
        costs=costs, work_per_sequence=mean, max_work_per_sequence=most,
        tp={"1": ModuleTime(forward_ms=mean_ms([costs[layer.kind].tp["1"].forward_ms for layer in layers]),
                            backward_ms=mean_ms([costs[layer.kind].tp["1"].backward_ms for layer in layers]),
                            fit_error_pct=_error_pct(found.works, whole))},
        output_bytes_per_sequence=output_values(name, table, packing) * value_bytes)


def output_values(name: str, table: list[LayerInfo], packing: Packing) -> float:
    """Numbers that cross the module's end per packed sequence: rows × width of every live tensor."""
    end = max(place for place, layer in enumerate(table) if layer.module == name) + 1
    return sum(_rows_per_sequence(spec, packing) * math.prod(spec.shape) for spec in live_tensors(table, end))


def _layer_cost(part: str, flops: LayerFlops, found: ModuleMeasurements, times: Floats) -> LayerCost:
    forward_ms, backward_ms = times
    kept_bytes = np.array([draw[part] for draw in found.memory])
    time = LayerTime(forward_ms=_fit(found.works, forward_ms), backward_ms=_fit(found.works, backward_ms),
                     fit_error_pct=_error_pct(found.works, [forward_ms, backward_ms]))
    return LayerCost(parameters=flops.parameters, tp={"1": time}, activation_bytes=_fit(found.memory_works, kept_bytes),
                     forward_flops=flops.forward, backward_flops=flops.backward)


def _fit(works: list[Work], values: Floats) -> Polynomial:
    return fit(works, values) if works else Polynomial()


def _error_pct(works: list[Work], series: Sequence[Floats]) -> float:
    return held_out_error_pct(works, series) if works else 0.0


def _rows_per_sequence(spec: TensorSpec, packing: Packing) -> float:
    """Mean rows of a state tensor that a packed sequence brings (`data.slots.Slot.rows`)."""
    inputs: ModelInputs = packing.index.inputs
    if spec.item == "sequence":
        return float(inputs.sequence_length)
    if spec.item == "image":
        assert inputs.image is not None
        patches = float(packing.image_grid.prod(axis=1).sum())
        extra = float(inputs.image.extra_tokens * len(packing.image_grid))
        return (patches / inputs.image.merge**2 if spec.rows == "tokens" else patches + extra) / len(packing)
    assert inputs.target is not None
    rows = inputs.target.context_tokens if spec.rows == "context" else 1
    return len(packing.target_segment) * rows / len(packing)
