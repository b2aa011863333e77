"""How much less a layer takes where its TP group's messages travel behind products: the same passes
with and without overlap, as a device runs them by the hardware catalogue's curves.

What products in chunks lose (weights read and kernels launched once per chunk) is in the kernels
that are counted. Not counted: what messages under way take from kernels beside them (cores that
copy, bandwidth of the memory). A group that sends through symmetric memory (`models.symmetric`) has
the ring's price: the same chunks, which copy engines move in the place of NCCL's kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from disttrain_cli.costs.hardware import Device, KernelWork, Precision, kernels_ms
from disttrain_cli.costs.links import COLLECTIVES, p2p_s
from disttrain_cli.models.footprint import Begun, Message, Noted
from disttrain_cli.models.graph import build_layers, of_model
from disttrain_cli.models.layer import PipelineLayer
from disttrain_cli.models.tensor_parallel import join
from disttrain_cli.models.timeline import Event, timeline
from disttrain_cli.models.weight_parts import split
from disttrain_cli.profiling.assemble import Hidden
from disttrain_cli.profiling.fitting import features
from disttrain_cli.profiling.footprints import Probes, probes_of
from disttrain_cli.spec.profile import HidingPass, LinkTimes, Polynomial
from disttrain_cli.spec.runfile import Run
from disttrain_cli.spec.work import Work

#: Events of a pass → ms.
Duration = Callable[[Sequence[Event]], float]
#: By pass, what happens at each probe.
Passes = dict[HidingPass, list[list[Event]]]


def hidden(
    run: Run,
    module: str,
    tps: Sequence[int],
    device: Device,
    precision: Precision,
    links: LinkTimes,
) -> dict[int, dict[str, Hidden]]:
    """By TP size above 1 and kind of layer, what each pass of a rank takes less; kinds that cannot
    overlap are left out.

    Args:
        links: of a TP group.

    Raises:
        SpecError: the model's configuration is wrong.
    """
    works, by_tp = _events(run, module, tps)
    found: dict[int, dict[str, Hidden]] = {}
    for tp, kinds in by_tp.items():
        duration, found[tp] = on_device(device, precision, links, tp=tp), {}
        for kind, both in kinds.items():
            overlapped, plain = (
                {name: np.array(list(map(duration, each))) for name, each in passes.items()}
                for passes in both
            )
            found[tp][kind] = {
                name: _through(works, plain[name] - overlapped[name]) for name in overlapped
            }
    return found


@of_model
def _events(
    run: Run, module: str, tps: Sequence[int]
) -> tuple[list[Work], dict[int, dict[str, tuple[Passes, Passes]]]]:
    """The works of all probes, and by TP size above 1 and kind of layer that can overlap, what
    happens in each pass at each of them, with overlap and without."""
    probes = probes_of(run, module, tps)
    found: dict[int, dict[str, tuple[Passes, Passes]]] = {}
    for tp in (tp for tp in tps if tp > 1):
        found[tp] = {}
        for index in probes.layers:
            if overlapped := passes(run, probes, index, True, tp=tp):
                plain = passes(run, probes, index, False, tp=tp)
                found[tp][probes.table[index].kind] = overlapped, plain
    return probes.works, found


def on_device(device: Device, precision: Precision, links: LinkTimes, *, tp: int) -> Duration:
    """Time of a pass on a device of the catalogue, one of `tp` in a group."""
    return lambda events: duration_ms(
        events,
        lambda work: kernels_ms(device, precision, work),
        lambda message: message_ms(message, links, tp=tp),
    )


def duration_ms(
    events: Sequence[Event],
    kernels: Callable[[KernelWork], float],
    messages: Callable[[Message], float],
) -> float:
    """Time of a pass on a device that runs kernels one after the other and messages one after the
    other beside them, and waits for messages where the pass does."""
    now = travelled = 0.0
    arrived: dict[int, float] = {}
    for event in events:
        if isinstance(event, KernelWork):
            now += kernels(event)
        elif isinstance(event, Begun):
            travelled = max(now, travelled) + messages(event.message)
            arrived[event.number] = travelled
        else:
            now = max(now, arrived[event.number])
    return now


def message_ms(message: Message, links: LinkTimes, *, tp: int) -> float:
    """Time of one message of a TP group."""
    if message.operation == "pass":
        return 1e3 * p2p_s(links, message.bytes)
    return 1e3 * COLLECTIVES[message.operation](links, message.bytes, tp)


def times_ms(
    run: Run, probes: Probes, index: int, overlap: bool, duration: Duration, *, tp: int
) -> dict[HidingPass, list[float]]:
    """By pass, times at each probe."""
    found = passes(run, probes, index, overlap, tp=tp)
    return {name: list(map(duration, each)) for name, each in found.items()}


def passes(run: Run, probes: Probes, index: int, overlap: bool, *, tp: int) -> Passes:
    """Events of a layer; none where it does not overlap though it is asked to."""
    layer = joined_shard(run, probes, index, overlap, tp=tp)
    events: Passes = {}
    if layer.group is None or layer.group.overlap != overlap:
        return events

    def take(forward: HidingPass | None, backward: HidingPass, **how: bool) -> None:
        for batch in probes.batches:
            line = timeline(layer, probes.state(layer, index, batch, tp=tp), batch, **how)
            if forward is not None:
                events.setdefault(forward, []).append(line.forward)
            events.setdefault(backward, []).append(line.backward)

    _freeze(layer, True)
    take(None, "backward_input")
    _freeze(layer, False)
    take("forward", "backward")
    take(None, "recomputing", recompute=True)
    split(layer)
    take(None, "split", deferring=True)
    return events


def joined_shard(run: Run, probes: Probes, index: int, overlap: bool, *, tp: int) -> PipelineLayer:
    """The first rank's part of a layer on the meta device, in its group."""
    layer = build_layers(run, index, index + 1, "meta", probes.dtype, tp=tp)[0]
    join(layer, Noted(size=tp, overlap=overlap))
    return layer


def _freeze(layer: PipelineLayer, frozen: bool) -> None:
    layer.ask_for_gradients(not frozen)


def _through(works: Sequence[Work], values: np.typing.NDArray[np.float64]) -> Polynomial:
    """The polynomial with these values at these works, as many as it has terms; below zero where
    nothing is gained."""
    rows = features(works)
    scale = np.maximum(np.abs(rows).max(axis=0), 1.0)
    found, *_ = np.linalg.lstsq(rows / scale, values, rcond=None)
    base, per_item, per_token, per_length_sq = (found / scale).tolist()
    return Polynomial(
        base=base, per_item=per_item, per_token=per_token, per_length_sq=per_length_sq
    )
