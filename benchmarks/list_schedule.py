"""A step of an LLM replica and its share of the images, by list scheduling, event by event.

Devices 0 to S - 1 are the LLM's stages; images may be computed there, on further devices, or on
both. An idle device does what is ready and most urgent: gradients of weights that may wait no
longer, backwards, generating, encoding for the next slots, forwards, and to fill gaps encoding
ahead, encoders' backwards and gradients of weights; what fills gaps runs in pieces of some layers,
between which the rest goes first. Times are known, so that such a schedule could be made before the
step.
"""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

PIECES = 8  # in which what fills gaps is run

#: Kind, slot or batch, time, and pieces to run it in.
Operation = tuple[str, int, float, int]


class Batch(NamedTuple):
    """Images that a device encodes at once."""

    first: int  # slot of the first of them
    last: int
    forward_s: float
    backward_s: float


class Rules(NamedTuple):
    """What goes first where several may."""

    lead: int = 1  # slots that encoding is ahead of the LLM with priority
    soon: bool = False  # encoders' backwards go before the LLM's forwards


@dataclass(frozen=True)
class Group:
    """The devices of one replica and what they have to do; n slots, S stages, D devices."""

    forward_s: list[list[float]]  # [n][S]
    backward_s: list[list[float]]
    weight_s: list[list[float]]
    encoded: list[Batch]  # in the order of their slots
    generated: list[list[float]]  # by slot, times of its batches, both passes
    encoders: list[int]  # devices that may encode
    generators: list[int]
    flight: list[int]  # [S] slots that a stage may hold
    delay: list[int]  # [S] slots whose gradients of weights may wait
    hold: list[int]  # [D] batches that a device may keep from forward to backward
    anywhere: bool  # any encoder runs a batch's backward, as it recomputes
    hop_s: list[float]  # [S - 1] between stages
    enter_s: float  # between encoder and LLM
    leave_s: float  # between LLM and generator


def ends_s(group: Group, rules: Rules) -> list[float] | None:
    """[D] when each device is done; None where all wait for room."""
    return _Step(group, rules).run()


class _Step:
    """The group while its step goes on."""

    def __init__(self, group: Group, rules: Rules) -> None:
        self.group, self.rules = group, rules
        self.slots, self.stages, devices = (
            len(group.forward_s),
            len(group.flight),
            len(group.hold),
        )
        self.now, self.count = 0.0, 0
        self.events: list[tuple[float, int, str, int, int]] = []
        self.busy, self.ends = [False] * devices, [0.0] * devices
        self.times_s = {"F": group.forward_s, "B": group.backward_s, "W": group.weight_s}
        # [S] slots that have come to a stage, that it has begun, and ended
        self.come = {kind: [0] * self.stages for kind in "FB"}
        self.begun, self.done = ({kind: [0] * self.stages for kind in "FBW"} for _ in range(2))
        # batches of every slot that are missing, and its forward
        self.unencoded = [0] * self.slots
        for batch in group.encoded:
            for slot in range(batch.first, batch.last + 1):
                self.unencoded[slot] += 1
        self.ungenerated = [1 + len(batches) for batches in group.generated]
        self.next_batch = self.returned = 0
        self.held, self.holder = [0] * devices, [-1] * len(group.encoded)
        self.to_return: list[deque[int]] = [deque() for _ in range(devices)]
        self.to_generate: deque[tuple[int, float]] = deque()
        # what a device has begun and will go on with: kind, batch or slot, time and number of the
        # pieces left
        self.paused: list[tuple[str, int, float, int] | None] = [None] * devices

    def run(self) -> list[float] | None:
        self._advance()
        self._offer()
        while self.events:
            self.now = self.events[0][0]
            while self.events and self.events[0][0] == self.now:
                _, _, kind, index, device = heapq.heappop(self.events)
                (self._finish if kind.isupper() else self._arrive)(kind, index, device)
            self._advance()
            self._offer()
        whole = all(done == self.slots for done in self.done["W"])
        returned = self.returned == len(self.group.encoded) and not any(self.to_return)
        return self.ends if whole and returned else None

    def _at(self, after_s: float, kind: str, index: int, device: int) -> None:
        """Something that happens later; operations that end have kinds in capitals."""
        self.count += 1
        heapq.heappush(self.events, (self.now + after_s, self.count, kind, index, device))

    def _advance(self) -> None:
        """Slots whose images are there enter the LLM and turn back in it, in order."""
        for come, missing in (
            (self.come["F"], self.unencoded),
            (self.come["B"], self.ungenerated),
        ):
            stage = 0 if missing is self.unencoded else self.stages - 1
            while come[stage] < self.slots and not missing[come[stage]]:
                come[stage] += 1

    def _offer(self) -> None:
        """Idle devices begin what they may, late stages first: their gaps come first."""
        for device in reversed(range(len(self.busy))):
            if self.busy[device] or not (chosen := self._choose(device)):
                continue
            kind, index, time_s, pieces = chosen
            if pieces > 1:
                self.paused[device] = kind, index, time_s / pieces, pieces
                kind, index, time_s, _ = self._go_on(device)
            self.busy[device] = True
            self._at(time_s, kind, index, device)

    def _go_on(self, device: int) -> Operation:
        """The next piece of what a device has begun; PIECE where others follow."""
        paused = self.paused[device]
        assert paused is not None
        kind, index, piece_s, left = paused
        self.paused[device] = (kind, index, piece_s, left - 1) if left > 1 else None
        return ("PIECE" if left > 1 else kind), index, piece_s, 1

    def _choose(self, device: int) -> Operation | None:
        """What a device does next."""
        group, stage, paused = self.group, device < self.stages, self.paused[device]
        waiting = self.done["B"][device] - self.done["W"][device] if stage else 0
        if stage and waiting > group.delay[device]:
            return self._go_on(device) if paused else self._pass("W", device)
        if stage and self._has("B", device):
            return self._pass("B", device)
        if self.to_generate and device in group.generators:
            return ("G", *self.to_generate.popleft(), 1)
        if paused and paused[0] == "EF" and self._urgent(paused[1]):
            return self._go_on(device)
        if self._may_encode(device) and self._urgent(self.next_batch):
            return self._encode(device, 1)
        back = self.to_return[0 if group.anywhere else device]
        may_back = bool(back) and device in group.encoders
        if may_back and self.rules.soon and not paused:
            return self._back(back, 1)
        if stage and self._may_forward(device):
            return self._pass("F", device)
        if paused:
            return self._go_on(device)
        if self._may_encode(device):
            return self._encode(device, PIECES)
        if may_back:
            return self._back(back, PIECES)
        return self._pass("W", device, PIECES) if waiting > 0 else None

    def _pass(self, kind: str, stage: int, pieces: int = 1) -> Operation:
        slot = self.begun[kind][stage]
        self.begun[kind][stage] += 1
        return kind, slot, self.times_s[kind][slot][stage], pieces

    def _may_forward(self, stage: int) -> bool:
        held = self.begun["F"][stage] - self.done["B"][stage]
        return self._has("F", stage) and held < self.group.flight[stage]

    def _has(self, kind: str, stage: int) -> bool:
        return self.come[kind][stage] > self.begun[kind][stage]

    def _urgent(self, batch: int) -> bool:
        return self.group.encoded[batch].first <= self.begun["F"][0] + self.rules.lead

    def _may_encode(self, device: int) -> bool:
        return (
            self.next_batch < len(self.group.encoded)
            and device in self.group.encoders
            and self.held[device] < self.group.hold[device]
        )

    def _encode(self, device: int, pieces: int) -> Operation:
        batch = self.next_batch
        self.next_batch += 1
        self.held[device] += 1
        self.holder[batch] = device
        return "EF", batch, self.group.encoded[batch].forward_s, pieces

    def _back(self, back: deque[int], pieces: int) -> Operation:
        batch = back.popleft()
        return "EB", batch, self.group.encoded[batch].backward_s, pieces

    def _finish(self, kind: str, index: int, device: int) -> None:
        """A device has ended something, and its result is on the way."""
        group = self.group
        self.busy[device], self.ends[device] = False, self.now
        if kind in self.done:
            self.done[kind][device] += 1
        if kind == "F" and device + 1 < self.stages:
            self._at(group.hop_s[device], "forward", index, device + 1)
        elif kind == "F":
            self._at(group.leave_s, "generate", index, device)
        elif kind == "B" and device:
            self._at(group.hop_s[device - 1], "backward", index, device - 1)
        elif kind == "B":
            self._at(group.enter_s, "return", index, device)
        elif kind == "EF":
            self._at(group.enter_s, "encoded", index, device)
        elif kind == "G":
            self._at(group.leave_s, "generated", index, device)
        elif kind == "EB":
            self.held[self.holder[index]] -= 1

    def _arrive(self, kind: str, index: int, device: int) -> None:
        """Something has come to where it is needed."""
        group = self.group
        if kind == "forward":
            self.come["F"][device] += 1
        elif kind == "backward":
            self.come["B"][device] += 1
        elif kind == "generate":
            self.ungenerated[index] -= 1
            self.to_generate.extend((index, time_s) for time_s in group.generated[index])
        elif kind == "generated":
            self.ungenerated[index] -= 1
        elif kind == "encoded":
            batch = group.encoded[index]
            for slot in range(batch.first, batch.last + 1):
                self.unencoded[slot] -= 1
        else:
            while self.returned < len(group.encoded) and group.encoded[self.returned].last <= index:
                at = 0 if group.anywhere else self.holder[self.returned]
                self.to_return[at].append(self.returned)
                self.returned += 1
