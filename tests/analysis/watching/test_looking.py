"""Looks at traces that grow: a fault that begins is named soon, and told once."""

import fcntl
from itertools import pairwise
from types import SimpleNamespace

import pytest

from disttrain_cli.analysis.watching import looking
from disttrain_cli.analysis.watching.looking import Watcher, look_once, looks
from disttrain_cli.errors import DataError
from tests.analysis import synthetic
from tests.analysis.growing import Growing

BEFORE, AFTER = 6, 6


@pytest.fixture
def growing(tmp_path):
    """Six steps without a fault; then go on with `slow`, of as many steps."""
    synthetic.write(tmp_path / "calm", synthetic.Synthetic(steps=BEFORE))
    synthetic.write(
        tmp_path / "slow", synthetic.Synthetic(steps=BEFORE + AFTER, slow_rank={3: 1.6})
    )
    return Growing(tmp_path / "calm", tmp_path / "traces")


@pytest.mark.slow
def test_a_fault_that_begins_is_told_within_five_steps_and_once(tmp_path, growing):
    watcher, told = Watcher(tmp_path), []

    def look(step):
        seen = watcher.look()
        if seen is not None and seen.changed:
            told.append((step, seen.analysis.verdict.cause, seen.analysis.verdict.place.rank))

    for step in range(BEFORE):
        growing.write(step)
        look(step)
    growing.go_on(tmp_path / "slow")
    for step in range(BEFORE, BEFORE + AFTER):
        growing.write(step)
        look(step)
    (calm, slow) = told
    assert calm[1] == "none" and slow[1:] == ("worker", 3)
    assert BEFORE <= slow[0] < BEFORE + 5


@pytest.mark.slow
@pytest.mark.parametrize("heals", [False, True])
def test_what_stays_is_said_once_and_of_steps_after_those_that_found_it(tmp_path, growing, heals):
    """A rank that is slow, or one that is slow for three steps and then no more."""
    steps = 2 * looking.STEPS + looking.WARM_UP
    for name, slow in (("long", {3: 1.6}), ("well", {})):
        synthetic.write(tmp_path / name, synthetic.Synthetic(steps=steps, slow_rank=slow))
    watcher, seen = Watcher(tmp_path), []
    growing.go_on(tmp_path / "long")
    for step in range(steps):
        if heals and step == 3:
            growing.go_on(tmp_path / "well")
        growing.write(step)
        if (look := watcher.look()) is not None:
            seen.append(look)
    found = next(look for look in seen if look.found and look.stands)
    stayed = [look for look in seen if look.stays]
    assert len([look for look in seen if look.found and look.stands]) >= looking.STAYS
    if heals:
        assert not stayed
    else:
        (look,) = stayed
        assert look.first == found.last and look.row()["blamed_ranks"] == [3]


@pytest.mark.parametrize(
    ("first", "last", "stays"), [([0, 0, 0], [1, 2, 3], False), ([0, 9, 18], [5, 14, 23], True)]
)
def test_three_looks_far_apart_are_enough(first, last, stays):
    staying = looking.Staying("here")
    for pair in zip(first[:2], last[:2], strict=True):
        staying = staying.on(*pair)
        assert not staying.long_enough
    assert staying.on(first[2], last[2]).long_enough == stays


@pytest.mark.parametrize(
    ("gain", "stood", "clear"),
    [
        (0.051, None, False),
        (0.051, "none", False),
        (0.061, "none", True),
        (0.051, "unit", True),
        (0.049, "unit", False),
        (0.039, "unit", True),
        (0.049, "none", True),
        (0.049, "data", True),
    ],
)
def test_what_hardly_gains_does_not_come_and_go(gain, stood, clear):
    verdict = SimpleNamespace(
        cause="unit" if gain >= 0.05 else "none", lost_s=gain if gain >= 0.05 else 0.0
    )
    found = SimpleNamespace(
        verdict=verdict,
        job=SimpleNamespace(iteration_s=1.0),
        causes=[SimpleNamespace(cause="unit", gain_s=gain)],
    )
    assert looking._clear(found, stood) == clear


@pytest.mark.slow
def test_data_that_move_are_told_within_five_steps(tmp_path, growing):
    watcher, told = Watcher(tmp_path), []

    def moved(row):
        return row | {"images": 2 * row["images"]} if "loss" in row else row

    for step in range(BEFORE + 5):
        if step == BEFORE:
            synthetic.write(tmp_path / "on", synthetic.Synthetic(steps=BEFORE + 5))
            growing.go_on(tmp_path / "on")
        growing.write(step, moved if step >= BEFORE else lambda row: row)
        look = watcher.look()
        if look is not None and look.changed:
            told.append((step, [one.what for one in look.analysis.drift]))
    assert told[0][1] == [] and told[-1][1] == ["images read per sequence"]
    assert told[-1][0] >= BEFORE
    assert "images read per sequence" in look.row()["drift"][0]["sentence"]


def test_nothing_is_judged_before_a_whole_step(tmp_path, growing):
    with pytest.raises(DataError, match="no complete step"):
        look_once(tmp_path)
    growing.write(0)
    growing.write(1)
    look = look_once(tmp_path)
    row = look.row()
    assert (row["first_step"], row["last_step"], row["steps_measured"]) == (0, 1, 1)
    assert (row["cause"], row["lost_fraction"], look.found) == ("none", 0.0, False)


@pytest.mark.slow
def test_looks_end_with_the_run_and_see_its_last_step(tmp_path, growing, monkeypatch):
    clock = Clock(growing, tmp_path)
    monkeypatch.setattr(looking, "time", clock)
    seen = [(look.first, look.last) for look in looks(tmp_path, every_s=0.0)]
    assert seen[-1] == (0, BEFORE - 1) and len(seen) == BEFORE - 1
    assert clock.now_s < 60.0 * BEFORE + 3 * looking.QUIET_S + 60.0


@pytest.mark.slow
def test_looks_take_no_more_of_the_host_than_they_may(tmp_path, growing, monkeypatch):
    clock, taken_s, cores = Clock(growing, tmp_path), 2.0, 4
    real = Watcher.look

    def look(watcher):
        clock.used_s += taken_s
        return real(watcher)

    monkeypatch.setattr(Watcher, "look", look)
    monkeypatch.setattr(looking, "time", clock)
    monkeypatch.setattr(looking.os, "cpu_count", lambda: cores)
    times_s = [clock.now_s for _ in looks(tmp_path)]
    # early ones are paid for later, and the last one is at the end of the run
    paid = len(times_s) - looking.EARLY - 1
    assert len(times_s) > 1
    assert paid * taken_s / ((times_s[-1] - times_s[0]) * cores) <= looking.SHARE


@pytest.mark.slow
def test_a_step_that_takes_longer_is_looked_at_early_and_paid_for_later(
    tmp_path, growing, monkeypatch
):
    clock, taken_s, cores = Clock(growing, tmp_path, BEFORE + AFTER), 6.0, 4
    real, write = Watcher.look, growing.write

    def look(watcher):
        clock.used_s += taken_s
        return real(watcher)

    def slow_from_then_on(step):
        if step == BEFORE:
            growing.go_on(tmp_path / "slow")
        write(step)

    monkeypatch.setattr(Watcher, "look", look)
    monkeypatch.setattr(growing, "write", slow_from_then_on)
    monkeypatch.setattr(looking, "time", clock)
    monkeypatch.setattr(looking.os, "cpu_count", lambda: cores)
    pause_s = taken_s / (looking.SHARE * cores)
    seen = [(clock.now_s, look.last) for look in looks(tmp_path)]
    early = [last for (sooner_s, _), (now_s, last) in pairwise(seen) if now_s - sooner_s < pause_s]
    first, *_, changed = early  # to find the first verdict again, and where steps became longer
    assert first < BEFORE <= changed < BEFORE + looking.LATEST
    assert (len(seen) - looking.EARLY - 1) * pause_s <= seen[-1][0] - seen[0][0]


class Clock:
    """Time that passes by sleeping: a minute, in which the job, which holds its folder, does a
    step."""

    def __init__(self, growing, root, steps=BEFORE):
        self.now_s = self.used_s = 0.0
        self._lock = (root / ".training").open("w")
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        self._growing, self._steps = growing, iter(range(steps))

    def monotonic(self):
        return self.now_s

    def process_time(self):
        return self.used_s

    def sleep(self, seconds):
        self.now_s += 60.0
        step = next(self._steps, None)
        if step is None:
            self._lock.close()
        else:
            self._growing.write(step)
