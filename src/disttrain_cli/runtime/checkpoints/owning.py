"""Distribution of the training state over ranks: the part each rank writes, and the part it reads.

Every value of the model is written by exactly one rank: parameters that ZeRO partitions by the
owner of the partition, others (no ZeRO, frozen) in equal shares by the replicas of their stage.
Tensor-parallel ranks that replicate a parameter share it in the same way, and so do ranks with the
same experts. Of the two copies of a
tied weight one is written, and both are read from it. So all ranks write at once, nothing is
gathered, and nothing is written twice.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from disttrain_cli.models.division import of_experts, shard_of, whole_shape
from disttrain_cli.models.layer import PipelineLayer
from disttrain_cli.models.tying import copy_of, stored_name
from disttrain_cli.runtime.checkpoints.boxes import Pieces, flat_boxes, spread

if TYPE_CHECKING:
    from disttrain_cli.runtime.engine.engine import UnitEngine

WEIGHT = "weight"
MOMENTS = ("exp_avg", "exp_avg_sq")
AVERAGE = "ema"


@dataclass(frozen=True)
class Part:
    """Elements start .. stop - 1 of a parameter (flat, row-major) that this rank alone writes."""

    name: str  # LAYER/PARAMETER
    module: str
    parameter: nn.Parameter
    start: int
    stop: int

    def pieces(self, values: Tensor) -> Pieces:
        """Return `values` [stop - start] as boxes of the global parameter."""
        shape = self.parameter.shape
        return Pieces(
            torch.Size(whole_shape(self.parameter)),
            values.dtype,
            flat_boxes(values, self.start, shape, shard_of(self.parameter)),
        )


def named_parameters(layers: Iterable[PipelineLayer]) -> list[tuple[str, nn.Parameter]]:
    """Return (LAYER/PARAMETER, parameter) of every parameter, once each.

    A tied parameter has the name of the layer that owns it (`models.tying`).
    """
    named = {
        stored_name(layer, path): parameter
        for layer in layers
        for path, parameter in layer.named_parameters()
    }
    return list(named.items())


def parts_of(engine: UnitEngine) -> list[Part]:
    """Return the parts of its stage's parameters that this rank writes."""
    coords = engine.coords
    modules = {id(p): layer.module for layer in engine.module.layers for p in layer.parameters()}
    named = [
        (name, p)
        for name, p in named_parameters(engine.module.layers)
        if p.numel() and copy_of(p) != "second"
    ]
    replicas, over_tp = (coords.unit.dp_cp_size, coords.holder), (coords.unit.tp, coords.tp_rank)
    experts = coords.unit.expert_replicas, coords.expert_holder
    kinds: dict[tuple[bool, bool], list[tuple[str, nn.Parameter]]] = {}
    for name, p in named:
        kinds.setdefault((shard_of(p) is not None, of_experts(p)), []).append((name, p))
    parts = []
    for (sharded, expert), alike in kinds.items():
        holders, holder = experts if expert else replicas
        copies, copy = (1, 0) if sharded else over_tp  # over the tensor-parallel ranks
        plain = [(name, p) for name, p in alike if not _partitioned(p)]
        ranges = [(*one, 0, one[1].numel()) for one in plain]
        parts += shares(ranges, holders * copies, holder * copies + copy)
        fragments = [(name, p, *_fragment(p)) for name, p in alike if _partitioned(p)]
        parts += shares(fragments, copies, copy)
    return [Part(name, modules[id(p)], p, start, stop) for name, p, start, stop in parts]


Range = tuple[str, nn.Parameter, int, int]  # name, parameter, start, stop


def shares(ranges: Sequence[Range], copies: int, copy: int) -> list[Range]:
    """Return the part of replicated ranges that replica `copy` of `copies` writes.

    The parts are equal and contiguous.
    """
    total = sum(stop - start for *_, start, stop in ranges)
    low, high = total * copy // copies, total * (copy + 1) // copies
    kept, at = [], 0
    for name, parameter, start, stop in ranges:
        first, last = max(start, start + low - at), min(stop, start + high - at)
        if first < last:
            kept.append((name, parameter, first, last))
        at += stop - start
    return kept


def _partitioned(parameter: nn.Parameter) -> bool:
    return hasattr(parameter, "_hp_mapping")


def _fragment(parameter: nn.Parameter) -> tuple[int, int]:
    """Return the range of a parameter that lies in this rank's ZeRO partition."""
    mapping: Any = parameter._hp_mapping
    if mapping is None:
        return 0, 0
    return (
        mapping.lp_fragment_address.start,
        mapping.lp_fragment_address.start + mapping.lp_fragment_address.numel,
    )


def weights(part: Part) -> Tensor:
    """Return a view [stop - start] of a part's weights: of the fp32 masters where there are any."""
    if _partitioned(part.parameter):
        return _of_partition(part, part.parameter._hp_mapping.hp_fragment)
    return part.parameter.detach().view(-1)[part.start : part.stop]


def state_of(engine: UnitEngine, part: Part) -> dict[str, Tensor]:
    """Return views [stop - start] of a part's weights and, where it is trained, its moments."""
    values = {WEIGHT: weights(part)}
    if _partitioned(part.parameter):
        values |= {
            moment: _of_partition(part, _moment(engine, part.parameter, moment))
            for moment in MOMENTS
        }
    elif part.parameter.requires_grad:
        state = engine.basic_optimizer.state[part.parameter]
        values |= {moment: state[moment].view(-1)[part.start : part.stop] for moment in MOMENTS}
    return values


def _of_partition(part: Part, fragment: Tensor) -> Tensor:
    first, _ = _fragment(part.parameter)
    return fragment.view(-1)[part.start - first : part.stop - first]


def _moment(engine: UnitEngine, parameter: nn.Parameter, moment: str) -> Tensor:
    """Return a parameter's range in this rank's partition of a moment.

    Read from the optimizer itself: with several parameter groups, DeepSpeed links moments to
    parameters when the first group has made its first step, so that those of the other groups are
    missing (deepspeed trap 34).
    """
    mapping: Any = parameter._hp_mapping
    partition = engine.basic_optimizer.param_groups[mapping.param_group_index]["params"][0]
    address, values = mapping.hp_fragment_address, engine.basic_optimizer.state[partition][moment]
    return values[address.start : address.start + address.numel]


def allocate_moments(engine: UnitEngine, restart: bool = False) -> None:
    """Allocate the optimizer's moments where no step has done so yet.

    Args:
        restart: reset them to zero, and the step counts to `engine.updates`.
    """
    base: Any = getattr(engine, "basic_optimizer", None)  # a stage that trains nothing has none
    for group in base.param_groups if base is not None else ():
        for parameter in group["params"]:
            state = base.state[parameter]
            if not restart and "step" in state:
                continue
            state |= {moment: torch.zeros_like(parameter) for moment in MOMENTS}
            on_device = group.get("fused") or group.get("capturable")
            state["step"] = torch.tensor(
                float(engine.updates[group["module"]]),
                device=parameter.device if on_device else "cpu",
            )


def wanted(engine: UnitEngine, moments_of: Collection[str] = ()) -> dict[str, Pieces]:
    """Return the boxes that this rank reads from a checkpoint, in place: its weights and moments.

    Moments are read for the trained weights whose owners (`PipelineLayer.owner_of`) are in
    `moments_of`. Where ZeRO partitions a parameter, the rank reads its partition's masters and
    moments, and the whole local weight in the model's precision.
    """
    by_key: dict[str, Pieces] = {}
    with_moments = {
        id(parameter)
        for layer in engine.module.layers
        for path, parameter in layer.named_parameters()
        if layer.owner_of(path) in moments_of
    }
    for name, parameter in named_parameters(engine.module.layers):
        shape, shard = parameter.shape, shard_of(parameter)
        moments = MOMENTS if id(parameter) in with_moments else ()
        whole = torch.Size(whole_shape(parameter))

        def add(group: str, boxes: list[Any], key: str = name, whole: torch.Size = whole) -> None:
            if whole.numel():
                pieces = by_key.setdefault(f"{group}/{key}", Pieces(whole, torch.float32, []))
                pieces.boxes += boxes

        def everything(
            values: Tensor, part: nn.Parameter = parameter, shard: Any = shard
        ) -> list[Any]:
            return list(spread((0,) * part.ndim, values, part.shape, shard))

        add(WEIGHT, everything(parameter.detach()))
        if _partitioned(parameter):
            start, stop = _fragment(parameter)
            mapping: Any = parameter._hp_mapping
            if start < stop:
                add(WEIGHT, flat_boxes(mapping.hp_fragment, start, shape, shard))
                for moment in moments:
                    add(moment, flat_boxes(_moment(engine, parameter, moment), start, shape, shard))
        elif parameter.requires_grad:
            for moment in moments:
                add(moment, everything(engine.basic_optimizer.state[parameter][moment]))
    return by_key


def staged(engine: UnitEngine) -> Iterator[tuple[str, Part, Tensor]]:
    """Yield (key, part, values) of everything that this rank writes."""
    for part in parts_of(engine):
        for group, values in state_of(engine, part).items():
            yield f"{group}/{part.name}", part, values
