"""Kernels and messages of a layer in order: the messages of a footprint, the FLOPs of its
operators, and what is behind what."""

from typing import Any

import pytest
import torch

from disttrain_cli.costs.hardware import KernelWork
from disttrain_cli.models.footprint import Begun, Noted, Waited, footprint
from disttrain_cli.models.graph import build_layers, describe, layer_table
from disttrain_cli.models.probe import probe_batch, state_at
from disttrain_cli.models.tensor_parallel import join
from disttrain_cli.models.timeline import Event, Timeline, timeline
from disttrain_cli.models.weight_parts import split

TP = 2
SIZES: dict[str, Any] = {"documents": [[20, 20], [41]], "length": 64}


def _block(make_run: Any, overlap: bool, later: bool = False) -> Any:
    """A decoder's block of a TP group, and what it is given."""
    run = make_run(llm={"config": {"vocab_size": 264}})
    table, inputs = layer_table(run), describe(run)
    place = next(i for i, t in enumerate(table) if (t.module, t.kind) == ("llm", "block"))
    layer = build_layers(run, place, place + 1, "meta", torch.bfloat16, tp=TP)[0]
    join(layer, Noted(size=TP, overlap=overlap))
    if later:
        split(layer)
    batch = probe_batch(inputs, device="meta", **SIZES)
    return layer, state_at(table, place, inputs, batch, "meta", torch.bfloat16, tp=TP), batch


def _messages(events: list[Event]) -> list[Any]:
    return [event.message for event in events if isinstance(event, Begun)]


def _flops(found: Timeline) -> float:
    return sum(
        event.product_flops + event.attention_flops
        for events in found
        for event in events
        if isinstance(event, KernelWork)
    )


def _behind(events: list[Event]) -> list[tuple[str, float]]:
    """Of each message, its operation and the FLOPs of products between its begin and the wait for
    it."""
    found, begun = {}, dict[int, Begun]()
    for event in events:
        if isinstance(event, Begun):
            begun[event.number], found[event.number] = event, 0.0
        elif isinstance(event, Waited):
            begun.pop(event.number)
        else:
            for number in begun:
                found[number] += event.product_flops
    assert not begun, "a message is never waited for"
    names = {e.number: e.message.operation for e in events if isinstance(e, Begun)}
    return [(names[number], flops) for number, flops in found.items()]


@pytest.mark.parametrize("recompute", [False, True])
def test_messages_travel_behind_products_where_they_overlap(make_run, recompute):  # type: ignore[no-untyped-def]
    found = {}
    for overlap in (False, True):
        layer, state, batch = _block(make_run, overlap)
        found[overlap] = timeline(layer, state, batch, recompute)
        noted = footprint(layer, state, batch, recompute)
        assert _messages(found[overlap].forward) == noted.forward
        assert _messages(found[overlap].backward) == noted.backward
        assert found[overlap].weights == []
        assert all(weight.grad is None for weight in layer.parameters())
    plain, made = found[False], found[True]
    assert _flops(plain) == _flops(made)
    for events in (plain.forward, plain.backward):
        assert all(flops == 0.0 for _, flops in _behind(events))
    for events in (made.forward, made.backward):
        assert all(flops > 0.0 for _, flops in _behind(events))
    assert {name for name, _ in _behind(made.forward)} == {"pass"}


def test_weights_parts_send_nothing(make_run):  # type: ignore[no-untyped-def]
    whole = timeline(*_block(make_run, True))
    later = timeline(*_block(make_run, True, later=True), deferring=True)
    assert _messages(later.backward) == _messages(whole.backward)
    assert later.weights and not _messages(later.weights)
    assert _flops(later) == _flops(whole)
    # gathering again has attention's backward to hide behind, but no weights' gradients
    assert all(flops > 0.0 for name, flops in _behind(later.backward) if name == "pass")
