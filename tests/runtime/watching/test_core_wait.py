"""Waits for cores and cores of other processes, by what the kernel writes."""

import os
import resource
from pathlib import Path
from types import SimpleNamespace

import pytest

from disttrain_cli.runtime.watching import core_wait
from disttrain_cli.runtime.watching.core_wait import UNKNOWN, CoreWait, OtherProcesses


def test_a_step_has_what_was_waited_in_it(tmp_path: Path) -> None:
    file = tmp_path / "schedstat"
    file.write_text("70000000000 5000000000 12\n")
    waits = CoreWait(file)
    file.write_text("71000000000 5250000000 14\n")
    assert waits.of_step() == 0.25
    waits.begin_step()
    assert waits.of_step() == 0.0
    file.unlink()
    assert waits.of_step() == UNKNOWN and CoreWait(file).of_step() == UNKNOWN


def test_others_hold_what_this_process_and_its_children_do_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, tick = tmp_path / "stat", os.sysconf("SC_CLK_TCK")
    now, used = [100.0], [0.0]
    monkeypatch.setattr(core_wait, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(
        resource, "getrusage", lambda who: SimpleNamespace(ru_utime=used[0], ru_stime=0.0)
    )
    times = [100, 0, 10, 1000, 5, 0, 1, 0, 0, 0]
    file.write_text(f"cpu  {' '.join(map(str, times))}\ncpu0 …\n")
    others = OtherProcesses(file)
    times[0] += 15 * tick  # busy for 15 s of cores in 10 s, 6 of them here
    file.write_text(f"cpu  {' '.join(map(str, times))}\n")
    now[0], used[0] = 110.0, 3.0
    assert others.cores() == pytest.approx(0.9)
    assert OtherProcesses(tmp_path / "none").cores() is None
