"""Assemble a module's part of the profile: fits per kind of layer, means over the data."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from disttrain_cli.costs.links import COLLECTIVES, ring_bytes
from disttrain_cli.models.experts import expert_weights
from disttrain_cli.models.flops import LayerFlops
from disttrain_cli.models.graph import LayerInfo
from disttrain_cli.models.layer import PipelineLayer
from disttrain_cli.models.tying import tied_layers
from disttrain_cli.profiling.fitting import Floats, fit, held_out_error_pct
from disttrain_cli.profiling.footprints import Messages, Running
from disttrain_cli.profiling.rows import batch_bytes, cut_bytes, gathered_bytes, input_bytes
from disttrain_cli.spec.inputs import ModelInputs
from disttrain_cli.spec.layer_costs import (
    Experts,
    Heads,
    HidingPass,
    LayerCost,
    LayerShard,
    Pass,
    Polynomial,
    combine,
)
from disttrain_cli.spec.profile import LinkTimes, ModuleProfile, ModuleTime
from disttrain_cli.spec.runfile.model import PROJECTORS, Kind
from disttrain_cli.spec.work import Work

if TYPE_CHECKING:
    from disttrain_cli.profiling.dataset import Dataset

NOTHING = Polynomial()
#: Time that each pass saves where a TP group's messages are overlapped with GEMMs.
Hidden = dict[HidingPass, Polynomial]


@dataclass(frozen=True)
class Series:
    """Measurements of a module at one TP size, trained or frozen, over draws."""

    works: list[Work]
    times: dict[str, Floats]  # kind of layer → [2, draws] forward and backward in ms
    memory_works: list[Work]
    kept_bytes: dict[str, Floats]  # kind of layer → [draws] from forward to backward


@dataclass(frozen=True)
class Part:
    """Properties of a kind of layer that are known without measuring."""

    flops: LayerFlops
    shard_parameters: dict[int, int]  # by TP size
    trained_parameters: dict[int, int | None]  # by TP size; None: all of them
    running: dict[int, Running]  # by TP size
    hidden: dict[int, Hidden]  # by TP size at which its messages may overlap with GEMMs
    heads: Heads | None
    experts: Experts | None
    fused_heads: bool
    frozen_projection: bool


@dataclass(frozen=True)
class Setting:
    """Inputs that all modules share."""

    table: list[LayerInfo]
    inputs: ModelInputs
    data: Dataset
    links: LinkTimes
    value_bytes: int  # of one number of the tensors between layers
    # True if saved bytes are those of a rank in its TP group, not of a shard measured alone
    grouped: bool = False


def known_parts(
    shards: Mapping[int, Mapping[str, PipelineLayer]],
    flops: Mapping[str, LayerFlops],
    running: Mapping[int, Mapping[str, Running]],
    hidden: Mapping[int, Mapping[str, Hidden]],
) -> dict[str, Part]:
    """Collect everything but the times for every kind of layer of a module.

    Args:
        shards: by TP size (1 among them) and kind, one rank's shard of a layer.
        running: by TP size and kind, memory and messages of a rank (`footprints.running`).
        hidden: by TP size and kind, the time that overlapping messages saves, where it is known.
    """
    return {
        kind: Part(
            flops[kind],
            {
                tp: sum(weight.numel() for weight in layers[kind].parameters())
                for tp, layers in shards.items()
            },
            {tp: _trained_parameters(layers[kind]) for tp, layers in shards.items()},
            {tp: kinds[kind] for tp, kinds in running.items()},
            {tp: kinds[kind] for tp, kinds in hidden.items() if kind in kinds},
            None if (heads := shards[1][kind].exchanged) is None else Heads(*heads),
            _experts(shards[1][kind], running[1][kind]),
            shards[1][kind].fused_heads,
            frozen_projection(shards[1][kind]),
        )
        for kind in shards[1]
    }


def _experts(layer: PipelineLayer, running: Running) -> Experts | None:
    """Return the experts of a layer that an EP group may divide, if it has any."""
    if layer.experts is None:
        return None
    assert running.expert_row is not None
    weights = dict(expert_weights(layer))
    return Experts(
        *layer.experts,
        sum(weight.numel() for weight in weights.values()),
        sum(weight.numel() for path, weight in weights.items() if layer.trains(path)),
        *running.expert_row[:3],
        deferred_bytes=running.expert_row.deferred,
    )


def _trained_parameters(layer: PipelineLayer) -> int | None:
    """Return how many parameters of a layer are trained, or None if all or none are.

    Only some are trained where the layer's module has adapters or the layer has tables that are
    never trained.
    """
    sizes = {path: weight.numel() for path, weight in layer.named_parameters()}
    trained = sum(size for path, size in sizes.items() if layer.trains(path))
    partly = not layer.frozen and trained != sum(sizes.values())
    return trained if layer.adapted or partly else None


def frozen_projection(layer: PipelineLayer) -> bool:
    """Return True if the projection of an attention that CP ranks may share is never trained.

    Then it has no adapter either. The projection is the first of the layer's row-parallel linears;
    a layer without any (it has no TP) counts as a whole.
    """
    if layer.exchanged is None:
        return False
    rowwise = (end for end, sharding in layer.division.items() if sharding.dim == 1)
    projection = next((f".{end}." for end in rowwise), "")
    return not any(
        layer.trains(path)
        for path, _ in layer.named_parameters()
        if projection in path and path.endswith("weight")
    )


def module_profile(
    name: str,
    kind: Kind,
    setting: Setting,
    known: Mapping[str, Part],
    trained: Mapping[int, Series],
    frozen: Mapping[int, Series],
) -> ModuleProfile:
    """Fit all measurements of a module into its part of the profile.

    Args:
        known: by kind of layer.
        trained, frozen: by TP size, with the same TP sizes in both.
    """
    data, value_bytes = setting.data, setting.value_bytes
    layers = [layer for layer in setting.table if layer.module == name]
    first = {part: next(layer for layer in layers if layer.kind == part) for part in known}
    costs = {
        part: LayerCost(
            parameters=counts.flops.parameters,
            tp={
                str(tp): _shard(
                    part,
                    counts,
                    trained,
                    frozen,
                    setting.links,
                    input_bytes(
                        first[part], setting.table, setting.inputs, data.mean, value_bytes, tp=tp
                    ),
                    batch_bytes(first[part], setting.table, setting.inputs, value_bytes),
                    kind != "generator" and not setting.grouped,
                    _later_share(counts.flops, data.mean[name]),
                    tp=tp,
                )
                for tp in trained
            },
            forward_flops=counts.flops.forward,
            backward_flops=counts.flops.backward,
            backward_input_flops=counts.flops.backward_input,
            weight_flops=counts.flops.weights,
            heads=counts.heads,
            experts=counts.experts,
            fused_heads=counts.fused_heads,
            frozen_projection=counts.frozen_projection,
            gathered_bytes=gathered_bytes(
                first[part], setting.table, setting.inputs, data.mean, value_bytes
            ),
        )
        for part, counts in known.items()
    }
    kinds = [layer.kind for layer in layers]
    return ModuleProfile(
        kind=kind,
        parameters=sum(layer.parameters for layer in layers),
        layers=kinds,
        costs=costs,
        tp={
            str(tp): _module_time(kinds, costs, series, data.mean[name], data.idle[name], tp=tp)
            for tp, series in trained.items()
        },
        work_per_sequence=data.mean[name],
        max_work_per_sequence=data.most[name],
        cut_bytes_per_sequence=cut_bytes(
            name, setting.table, setting.inputs, data.mean, value_bytes
        ),
        projector=[index for index, layer in enumerate(layers) if PROJECTORS in layer.owners],
        frozen=[index for index, layer in enumerate(layers) if layer.frozen],
        side=_side_branches(layers),
        tied=list(tied_layers(layers) or ()),
    )


def _side_branches(layers: Sequence[LayerInfo]) -> list[int]:
    """Return the layers, except the module's last, whose outputs no later layer of it reads."""
    read: set[str] = set()
    side: list[int] = []
    for index in range(len(layers) - 1, -1, -1):
        written = {spec.name for spec in layers[index].writes}
        if index < len(layers) - 1 and read.isdisjoint(written):
            side.insert(0, index)
        read = read - written | set(layers[index].reads)
    return side


def message_ms(links: LinkTimes, messages: Messages, *, tp: int) -> Polynomial:
    """Return the time of a layer's collectives in one pass: latencies, and bytes / bandwidth."""
    terms = []
    for operation, count in messages.counts.items():
        latency_s = COLLECTIVES[operation](links, 0.0, tp)
        byte_s = COLLECTIVES[operation](links, 1.0, tp) - latency_s
        terms += [
            (1e3 * byte_s, messages.bytes[operation]),
            (1e3 * latency_s * count, Polynomial(base=1.0)),
        ]
    return combine(*terms)


def sent_bytes(messages: Messages, *, tp: int) -> Polynomial:
    """Return the bytes that a layer's collectives in one pass put on one rank's link, in rings."""
    return combine(
        *(
            (1.0 if operation == "pass" else ring_bytes(operation, 1.0, tp), size)
            for operation, size in messages.bytes.items()
        )
    )


def _shard(
    part: str,
    known: Part,
    trained: Mapping[int, Series],
    frozen: Mapping[int, Series],
    links: LinkTimes,
    input_size: Polynomial,
    batch_size: Polynomial,
    divides: bool,
    later: float,
    *,
    tp: int,
) -> LayerShard:
    """Fit one rank's TP shard of a kind of layer.

    Args:
        input_size: bytes of the rank's input.
        batch_size: bytes that it reads of a slot's inputs.
        divides: assume that a TP group divides all saved activations of the unsharded layer: inside
            attention and MLP by heads and width, between them by rows (Korthikanti et al. 2022,
            arXiv 2205.05198, section 4.2). A shard measured alone keeps all rows.
        later: share of the time of the weight gradients that may be deferred (W of a split
            backward).
    """
    running = known.running[tp]
    passes: dict[Pass, Messages] = {
        "forward": running.forward,
        "backward": running.backward,
        "backward_input": running.backward_input,
        "recomputing": running.recomputing,
    }
    messages = {name: message_ms(links, sent, tp=tp) for name, sent in passes.items()}
    passes["recomputing_overlapped"] = running.recomputing_overlapped
    forward_ms, backward_ms = trained[tp].times[part]
    _, input_ms = frozen[tp].times[part]
    works, input_works = trained[tp].works, frozen[tp].works
    divided = divides and known.shard_parameters[tp] < known.shard_parameters[1]
    share, measured = (1.0 / tp, 1) if divided else (1.0, tp)
    return LayerShard(
        parameters=known.shard_parameters[tp],
        trained_parameters=known.trained_parameters[tp],
        forward_ms=_time(works, forward_ms, messages["forward"]),
        backward_ms=_time(works, backward_ms, messages["backward"]),
        weight_ms=combine((later, fit(works, backward_ms)), (-later, fit(input_works, input_ms))),
        backward_input_ms=_time(input_works, input_ms, messages["backward_input"]),
        recomputing_ms=combine(
            (1.0, messages["recomputing"]),
            (-1.0, messages["forward"]),
            (-1.0, messages["backward"]),
        ),
        sent_bytes={name: sent_bytes(sent, tp=tp) for name, sent in passes.items() if sent.counts},
        hidden_ms=known.hidden.get(tp, {}),
        overlapping_bytes=running.overlapping_bytes,
        symmetric_bytes=running.symmetric_bytes,
        transient_bytes=running.transient_bytes,
        still_bytes=running.still_bytes,
        deferred_bytes=running.deferred_bytes,
        split_transient_bytes=running.split_transient_bytes,
        recomputing_bytes=running.recomputing_bytes,
        activation_bytes=combine((share, _kept(trained[measured], part))),
        frozen_activation_bytes=combine((share, _kept(frozen[measured], part))),
        input_bytes=input_size,
        batch_bytes=batch_size,
        fit_error_pct=held_out_error_pct(works, [forward_ms, backward_ms]),
        frozen_fit_error_pct=held_out_error_pct(input_works, [input_ms]),
    )


def _later_share(flops: LayerFlops, work: Work) -> float:
    """Return the share of the weight gradients' FLOPs that may be deferred (split backward)."""
    all_of_weights = flops.backward(work) - flops.backward_input(work)
    return flops.weights(work) / all_of_weights if all_of_weights else 0.0


def _kept(series: Series, part: str) -> Polynomial:
    return fit(series.memory_works, series.kept_bytes[part])


def _time(works: Sequence[Work], times_ms: Floats, messages: Polynomial) -> Polynomial:
    """Return fitted compute plus its messages; a pass that does not exist sends none."""
    compute = fit(works, times_ms)
    return compute if compute == NOTHING else combine((1.0, compute), (1.0, messages))


def _module_time(
    kinds: list[str],
    costs: Mapping[str, LayerCost],
    series: Series,
    mean: Work,
    idle: float,
    *,
    tp: int,
) -> ModuleTime:
    """Return mean times over the sequences, each run alone.

    A sequence without work for the module takes no time, not the polynomial's base.
    """

    def mean_ms(times: list[Polynomial]) -> float:
        return sum(time(mean) - idle * time.base for time in times)

    shards = [costs[kind].tp[str(tp)] for kind in kinds]
    whole = [
        count * values for kind, count in Counter(kinds).items() for values in series.times[kind]
    ]
    return ModuleTime(
        forward_ms=mean_ms([shard.forward_ms for shard in shards]),
        backward_ms=mean_ms([shard.backward_ms for shard in shards]),
        fit_error_pct=held_out_error_pct(series.works, whole),
    )
