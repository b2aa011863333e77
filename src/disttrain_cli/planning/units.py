"""How modules group into units, and the numbers of a unit that every option needs."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from disttrain_cli.costs.memory import GIB, activation_terms, bytes_per_parameter, parameters
from disttrain_cli.costs.stage import tp_degrees, unit_times
from disttrain_cli.errors import InfeasibleError
from disttrain_cli.spec.profile import Profile

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Cluster:
    """What a layout must fit into."""

    gpus: int
    gpus_per_node: int
    memory_gib: float  # of one device
    zero_stage: int
    batch: int  # packed sequences per step


@dataclass(frozen=True)
class Unit:
    """Consecutive modules that will share one (TP, DP, PP)."""

    name: str
    modules: tuple[str, ...]
    profile: Profile
    cluster: Cluster
    fenced: bool = False  # encoder and generator are exactly one stage each (PP ≥ modules)

    @cached_property
    def holds_llm(self) -> bool:
        return self.profile.inputs.llm in self.modules

    @cached_property
    def layers(self) -> int:
        return sum(len(self.profile.modules[name].layers) for name in self.modules)

    @cached_property
    def items_per_sequence(self) -> float:
        """Images that one packed sequence brings (units without the LLM)."""
        return self.profile.modules[self.modules[0]].work_per_sequence.items

    @cached_property
    def tps(self) -> list[int]:
        """TP degrees that were profiled and fit evenly into a node."""
        return [tp for tp in tp_degrees(self.profile, self.modules) if self.cluster.gpus_per_node % tp == 0]

    @cached_property
    def ends_ms(self) -> tuple[Floats, Floats]:
        """Transfers at the unit's two ends, forward and gradient, as (base, slope) per layer [L].

        A transfer holds up the rank at either end for latency + bytes / bandwidth; it is counted with the
        first layer (from the unit before) and the last one (to the unit after).
        """
        base, slope = np.zeros(self.layers), np.zeros(self.layers)
        names = list(self.profile.modules)
        link = self.profile.links
        for layer, sender in ((0, names.index(self.modules[0]) - 1), (-1, names.index(self.modules[-1]))):
            if 0 <= sender < len(names) - 1:
                size = self.profile.modules[names[sender]].output_bytes_per_sequence
                base[layer] += 2 * link.p2p_us / 1e3
                slope[layer] += 2 * size * 8 / (link.p2p_gbps * 1e9) * 1e3
        return base, slope

    def layer_ms(self, tp: int) -> tuple[Floats, Floats]:
        """Forward + backward + transfers of every layer as (base, slope per sequence), in ms."""
        if tp not in self._layer_ms:
            times = unit_times(self.profile, self.modules, tp)
            base, slope = self.ends_ms
            self._layer_ms[tp] = (times.forward_base + times.backward_base + base,
                                  times.forward_slope + times.backward_slope + slope)
        return self._layer_ms[tp]

    @cached_property
    def _layer_ms(self) -> dict[int, tuple[Floats, Floats]]:
        return {}

    @cached_property
    def states_gib(self) -> tuple[Floats, Floats]:
        """Weights, gradients and optimizer of every layer at TP 1: (kept by each replica, shared by all)."""
        kept, shared = bytes_per_parameter(self.profile.precision, self.cluster.zero_stage)
        count = parameters(self.profile, self.modules)
        return count * kept / GIB, count * shared / GIB

    @cached_property
    def activations_gib(self) -> Floats:
        """Activations of one slot as [4, L] terms of `costs.memory.worst_mix`, at TP 1."""
        return activation_terms(self.profile, self.modules) / GIB

    @cached_property
    def allowed(self) -> NDArray[np.bool_] | None:
        """[L+1, L+1] which layer ranges may form a stage; None = any."""
        if not self.fenced:
            return None
        mask = np.zeros((self.layers + 1, self.layers + 1), dtype=bool)
        start = 0
        for name in self.modules:
            stop = start + len(self.profile.modules[name].layers)
            if name == self.profile.inputs.llm:
                mask[start:stop, start + 1:stop + 1] = True
            else:
                mask[start, stop] = True
            start = stop
        return mask


def group(profile: Profile, cluster: Cluster, strategy: str) -> list[Unit]:
    """Units of a strategy in pipeline order.

    `megatron` puts every module into one unit, as `disaggregated` must where there are fewer GPUs than modules.
    In a Megatron pipeline encoder and generator are one stage each; with fewer GPUs than that takes, stages may
    hold several modules.

    Raises:
        InfeasibleError: a unit has no TP degree that fits a node.
    """
    names = list(profile.modules)
    few = cluster.gpus < len(names)
    if strategy == "megatron" or few:
        units = [Unit("model" if len(names) > 1 else names[0], tuple(names), profile, cluster, fenced=not few)]
    else:
        units = [Unit(name, (name,), profile, cluster) for name in names]
    for unit in units:
        if not unit.tps:
            raise InfeasibleError(
                f"No TP degree of unit {unit.name} fits a node",
                f"profiled: TP {tp_degrees(profile, unit.modules)}; cluster.gpus_per_node: {cluster.gpus_per_node}",
                "Profile again: disttrain profile")
    return units
