"""Observation of a slot's instructions in a dry run."""

from collections import Counter
from types import SimpleNamespace
from typing import Any

from disttrain_cli.runtime.dryrun.stages import StageSeen
from disttrain_cli.runtime.dryrun.worker import GIB, OF_SLOT, watched


def test_a_slot_keeps_what_loading_and_forward_of_the_last_step_leave_alive() -> None:
    observer: Any = SimpleNamespace(counts=Counter[str](), alive_bytes=0)
    waits: Any = SimpleNamespace(counts=Counter[tuple[str, str]]())
    seen = StageSeen(stages=[0], rank=0, slots_in_flight=1, slots=2)

    def allocate(gib: int) -> Any:
        def instruction(slot: int) -> None:
            observer.alive_bytes += gib * GIB

        return instruction

    grown = dict.fromkeys(OF_SLOT, 0) | {"_load": 1, "_forward": 2, "_backward": -3}
    methods = {name: allocate(gib) for name, gib in grown.items()}
    engine: Any = SimpleNamespace(_state={}, **methods)
    for slots in (1, 2):  # a short step before the observed one, as in `_take_steps`
        before = dict(vars(engine))
        with watched(engine, observer, waits, seen, last=slots - 1):
            for slot in range(slots):
                for name in OF_SLOT:
                    getattr(engine, name)(slot)
        vars(engine).update(before)
    assert seen.kept_gib == 3.0
