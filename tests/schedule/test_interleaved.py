"""Interleaved 1F1B: its passes, its messages, and the proof that no device waits forever."""

from collections.abc import Sequence

import pytest

from disttrain_cli.runtime.messages.proof import faults
from disttrain_cli.runtime.messages.records import RECEIVE, SEND, Operation, Record
from disttrain_cli.schedule import one_f_one_b
from disttrain_cli.schedule.interleaved import passes
from disttrain_cli.schedule.program import AT_END, Instruction, programs
from disttrain_cli.spec.trace import BACKWARD, COMPUTE, FORWARD

SHAPES = [(2, 1, 5), (2, 2, 2), (2, 2, 8), (3, 2, 6), (4, 3, 8), (4, 4, 16), (8, 2, 8)]


@pytest.mark.parametrize(("devices", "chunks", "slots"), SHAPES)
def test_every_pass_once_and_no_backward_before_its_forward(
    devices: int, chunks: int, slots: int
) -> None:
    for device in range(devices):
        order = passes(devices, chunks, slots, device)
        own = range(device, devices * chunks, devices)
        every = {
            (what, chunk, slot)
            for what in (FORWARD, BACKWARD)
            for chunk in own
            for slot in range(slots)
        }
        assert set(order) == every and len(order) == len(every)
        for chunk in own:
            for slot in range(slots):
                assert order.index((FORWARD, chunk, slot)) < order.index((BACKWARD, chunk, slot))


@pytest.mark.parametrize(("devices", "slots"), [(2, 5), (3, 6), (4, 2)])
def test_one_stage_per_device_is_1f1b(devices: int, slots: int) -> None:
    for device, order in enumerate(programs(devices, 1, slots)):
        own = [(one.operation, one.slot) for one in order if one.operation in COMPUTE]
        assert own == [
            (COMPUTE[operation], slot)
            for operation, slot in one_f_one_b.passes(slots, devices - device)
        ]


@pytest.mark.parametrize(("devices", "chunks", "slots"), SHAPES)
def test_tensors_are_there_before_a_pass_and_sent_after_it(
    devices: int, chunks: int, slots: int
) -> None:
    for device, order in enumerate(programs(devices, chunks, slots)):
        own = [one for one in order if one.operation in COMPUTE]
        stages = [(one.operation, one.chunk * devices + device, one.slot) for one in own]
        assert stages == [
            (COMPUTE[operation], stage, slot)
            for operation, stage, slot in passes(devices, chunks, slots, device)
        ]
        assert [one.operation for one in order[-len(AT_END) :]] == list(AT_END)
        at = {one: number for number, one in enumerate(order)}
        assert len(at) == len(order)
        for one in own:
            stage = one.chunk * devices + device
            forward = one.operation == "forward"
            receives, sends = stage > 0, stage + 1 < devices * chunks
            what = "activation" if forward else "gradient"
            if not forward:
                receives, sends = sends, receives
            received = at.get(one._replace(operation=f"receive_{what}"))
            sent = at.get(one._replace(operation=f"send_{what}"))
            assert (received is not None, sent is not None) == (receives, sends)
            assert received is None or own_before(order, received) == own_before(order, at[one])
            posted = at.get(one._replace(operation=f"post_{what}"))
            assert (posted is None) == (received is None)
            assert posted is None or received is None or posted < received
            assert sent is None or at[one] < sent
            assert not forward or at[one._replace(operation="load", chunk=0)] < at[one]


def own_before(order: Sequence[Instruction], number: int) -> int:
    """Passes before an instruction."""
    return sum(one.operation in COMPUTE for one in order[:number])


def records(devices: int, orders: list[list[Instruction]]) -> list[Record]:
    """Messages of the devices, one communicator for each direction between two of them."""
    found = [Record(device) for device in range(devices)]
    for device, order in enumerate(orders):
        for number, one in enumerate(order):
            kind, _, what = one.operation.partition("_")
            if not what or kind == "receive":  # posted before
                continue
            stage, onward = one.chunk * devices + device, 1 if what == "activation" else -1
            sender = stage if kind == "send" else stage - onward
            taker = sender + onward
            ends = sender % devices, taker % devices
            name = "{} to {}".format(*ends)
            found[device].members[name] = tuple(sorted(ends))
            found[device].operations.append(
                Operation(
                    {"send": SEND, "post": RECEIVE}[kind],
                    name,
                    (sender, one.slot),
                    what,
                    ends[kind == "send"],
                    number,
                )
            )
    return found


@pytest.mark.parametrize(("devices", "chunks", "slots"), SHAPES)
def test_no_device_waits_forever_and_messages_pair(devices: int, chunks: int, slots: int) -> None:
    orders = [list(order) for order in programs(devices, chunks, slots)]
    assert faults(records(devices, orders)) == []
    sends = [n for n, one in enumerate(orders[0]) if one.operation == "send_activation"]
    first, second = (orders[0][number] for number in sends[:2])
    orders[0][sends[0]], orders[0][sends[1]] = second, first
    assert faults(records(devices, orders))


def test_an_activation_sent_before_its_gradient_is_received_waits_forever() -> None:
    """Where both devices have sent first: the proof is no formality."""
    orders = [list(order) for order in programs(2, 2, 4)]
    for order in orders:
        order.sort(key=lambda one: one.operation.startswith("post"))
    assert any("wait for each other" in sentence for sentence in faults(records(2, orders)))
