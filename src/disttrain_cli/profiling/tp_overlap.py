"""Time that a layer saves where its TP group's messages are overlapped with GEMMs.

The same passes with and without overlap are compared, as a device runs them by the hardware
catalogue's curves. The loss of chunked GEMMs (weights read and kernels launched once per chunk) is
in the kernels that are counted. Not counted: the slowdown of concurrent kernels by messages in
flight (SMs that copy, memory bandwidth). A group that sends through symmetric memory
(`models.symmetric`) has the ring's price: the same chunks, moved by copy engines instead of NCCL's
kernels.
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
from disttrain_cli.spec.layer_costs import HidingPass, Polynomial
from disttrain_cli.spec.profile import LinkTimes
from disttrain_cli.spec.runfile import Run
from disttrain_cli.spec.work import Work

#: Events of a pass → ms.
Duration = Callable[[Sequence[Event]], float]
#: By pass, the events at each probe.
Passes = dict[HidingPass, list[list[Event]]]


def overlap_savings(
    run: Run,
    module: str,
    tps: Sequence[int],
    device: Device,
    precision: Precision,
    links: LinkTimes,
) -> dict[int, dict[str, Hidden]]:
    """Return the time that overlap saves in each pass of a rank, by TP size and kind of layer.

    TP size 1 and kinds that cannot overlap are left out.

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
    """Return the works of all probes, and the events of each pass with overlap and without.

    Events are by TP size above 1 and kind of layer that can overlap.
    """
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
    """Return a function that times a pass on one of the `tp` devices of a group."""
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
    """Return the time of a pass on a device with one queue of kernels and one of messages.

    Each queue is serial; the two run concurrently, and kernels wait for messages where the pass
    waits.
    """
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
    """Return the time of one message of a TP group."""
    if message.operation == "pass":
        return 1e3 * p2p_s(links, message.bytes)
    return 1e3 * COLLECTIVES[message.operation](links, message.bytes, tp)


def times_ms(
    run: Run, probes: Probes, index: int, overlap: bool, duration: Duration, *, tp: int
) -> dict[HidingPass, list[float]]:
    """Return times at each probe, by pass."""
    found = passes(run, probes, index, overlap, tp=tp)
    return {name: list(map(duration, each)) for name, each in found.items()}


def passes(run: Run, probes: Probes, index: int, overlap: bool, *, tp: int) -> Passes:
    """Record the events of a layer; none where `overlap` is requested and it cannot overlap."""
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
    """Build the first rank's TP shard of a layer on the meta device, in its group."""
    layer = build_layers(run, index, index + 1, "meta", probes.dtype, tp=tp)[0]
    join(layer, Noted(size=tp, overlap=overlap))
    return layer


def _freeze(layer: PipelineLayer, frozen: bool) -> None:
    layer.ask_for_gradients(not frozen)


def _through(works: Sequence[Work], values: np.typing.NDArray[np.float64]) -> Polynomial:
    """Return the polynomial with these values at these works, as many as it has terms.

    Values are below zero where overlap saves nothing.
    """
    rows = features(works)
    scale = np.maximum(np.abs(rows).max(axis=0), 1.0)
    found, *_ = np.linalg.lstsq(rows / scale, values, rcond=None)
    base, per_item, per_token, per_length_sq = (found / scale).tolist()
    return Polynomial(
        base=base, per_item=per_item, per_token=per_token, per_length_sq=per_length_sq
    )
