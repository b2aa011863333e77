"""Verdicts: where a cause lies, and what is honest where the ranks share cores."""

from types import SimpleNamespace

import pytest
from msgspec.structs import asdict

from disttrain_cli.analysis.explanations import _late_host
from disttrain_cli.analysis.job.database import open_database
from disttrain_cli.analysis.job.device_clocks import slow_clocks
from disttrain_cli.analysis.job.graph import build_graph
from disttrain_cli.analysis.losses import split_losses
from disttrain_cli.analysis.result.verdicts import Evidence, Place
from tests.analysis import synthetic
from tests.cases import first_fast

PLACES = {
    "data": ({"load_ms": 40.0, "load_replica": 1}, {"unit": "llm", "replica": 1}),
    "host": (
        {"gap_ms": 15.0, "gap_rank": 2},
        {"unit": "llm", "stage": 0, "replica": 1, "rank": 2, "host": "host-a"},
    ),
    "communication": ({"transfer_ms": 25.0}, {"unit": "llm", "stage": 0}),
}


@pytest.mark.parametrize("cause", PLACES)
def test_the_place_is_as_narrow_as_the_evidence(tmp_path, cause):
    fault, place = PLACES[cause]
    synthetic.write(tmp_path, synthetic.Synthetic(**fault))
    verdict = synthetic.judged(tmp_path).verdict
    assert verdict.cause == cause
    assert {
        name: value for name, value in asdict(verdict.place).items() if value is not None
    } == place
    assert verdict.confidence > 0.9


def test_slow_links_are_told_by_the_profile_though_all_are_alike(tmp_path):
    """Transfers that never vary lose nothing against their median; the profile knows better."""
    synthetic.write(tmp_path, synthetic.Synthetic(transfer_ms=25.0))
    losses = split_losses(build_graph(open_database([tmp_path])))
    assert losses.lost["communication"].mean() > 0.1 * losses.measured.mean()
    (tmp_path / "job.json").unlink()
    losses = split_losses(build_graph(open_database([tmp_path])))
    assert losses.lost["communication"].mean() == pytest.approx(
        0.0, abs=0.01 * losses.measured.mean()
    )


@pytest.mark.slow
def test_a_rank_that_waits_for_a_core_is_no_slow_link(tmp_path):
    late = {"late_ms": 40.0}
    synthetic.write(tmp_path / "devices", synthetic.Synthetic(**late))
    synthetic.write(tmp_path / "cores", synthetic.Synthetic(**late, device="cpu", peak_tflops=1.2))
    on_devices, on_cores = (synthetic.judged(tmp_path / name) for name in ("devices", "cores"))
    assert on_devices.verdict.cause == "communication"
    assert on_cores.verdict.cause == "host"
    assert "wait for one of the cores" in on_cores.verdict.headline
    assert on_cores.verdict.confidence <= 0.5 < on_devices.verdict.confidence
    assert "share the cores" in on_cores.verdict.advice
    assert "share the cores" not in on_devices.verdict.headline
    (crowded,) = [
        row.value
        for row in on_cores.verdict.evidence
        if row.what.startswith("compute time of all ranks")
    ]
    assert crowded > 1  # six ranks on two cores
    both = [sum(found.stragglers.lost_s.values()) for found in (on_cores, on_devices)]
    assert both[0] == pytest.approx(both[1], rel=0.05)


@pytest.mark.parametrize(
    ("slower", "cores"), first_fast([(3.3, True), (3.3, False), (1.0, True)], 2)
)
def test_steps_longer_than_predicted_are_reported_also_on_shared_cores(tmp_path, slower, cores):
    """Shared cores are then the likely reason; elsewhere the profile or all devices are."""
    device = {"device": "cpu", "cores": 64, "peak_tflops": 1.2} if cores else {}
    factors = dict.fromkeys(synthetic.MODULES, slower)
    synthetic.write(tmp_path, synthetic.Synthetic(**device, unit_factor=factors))
    found = synthetic.judged(tmp_path).verdict
    assert found.cause == "none"
    predicted = next(row for row in found.evidence if row.what.startswith("step as the profile"))
    recorded = next(row for row in found.evidence if row.what == "recorded step")
    times = recorded.value / predicted.value
    said = f"Steps take {times:.2g} times as long as the profile predicts for this work"
    assert (said in found.headline) == (cores and slower > 1)
    assert ("likely reason" in found.headline) == (cores and slower > 1)
    assert found.headline.startswith("Steps take") == (cores and slower > 1)
    assert (found.confidence <= 0.5) == (cores and slower > 1)
    assert ("Every unit takes at least 3.3 times" in found.headline) == (not cores)
    if slower > 1:
        assert times > 2.5
        assert found.next_command.startswith("disttrain plan" if cores else "disttrain profile")


@pytest.mark.slow
@pytest.mark.parametrize("cores", first_fast([True, False]))
def test_waits_for_cores_are_the_reason_where_the_kernel_counted_them(tmp_path, cores):
    device = {"device": "cpu", "cores": 64, "peak_tflops": 1.2} if cores else {}
    factors = dict.fromkeys(synthetic.MODULES, 3.3)
    for name, waited_s in (("waits", 0.3), ("none", 0.0)):
        spec = synthetic.Synthetic(**device, unit_factor=factors, core_wait_s=waited_s)
        synthetic.write(tmp_path / name, spec)
    waits, none = (synthetic.judged(tmp_path / name).verdict for name in ("waits", "none"))
    assert "waited 0.3 s per step" in waits.headline and "for a core (" in waits.headline
    assert waits.headline.index("for a core") < waits.headline.index("No straggler")
    assert waits.confidence <= 0.5 and (none.confidence <= 0.5) == cores
    assert "profile is wrong" not in waits.headline
    assert ("profile is wrong" in none.headline) == (not cores)


@pytest.mark.slow
def test_a_host_too_busy_to_rehearse_is_no_slow_link(tmp_path):
    late = {"late_ms": 40.0, "emulated": True}
    synthetic.write(tmp_path / "busy", synthetic.Synthetic(**late))
    synthetic.write(tmp_path / "fault", synthetic.Synthetic(**late, slow_rank={3: 3.0}))
    synthetic.write(tmp_path / "in time", synthetic.Synthetic())
    busy, fault, in_time = (
        synthetic.judged(tmp_path / name) for name in ("busy", "fault", "in time")
    )
    assert (busy.verdict.cause, busy.verdict.place) == ("unknown", Place(host="host-a"))
    assert "too busy to run the rehearsal in time" in busy.verdict.headline
    assert "rehearse.time_scale" in busy.verdict.advice
    assert busy.verdict.lost_s == pytest.approx(busy.job.iteration_s - in_time.job.iteration_s)
    assert abs(busy.stragglers.lost_s["unexplained"]) < 1e-6
    assert (fault.verdict.cause, fault.verdict.place.rank) == ("worker", 3)
    assert "Also: Host host-a was too busy to run the rehearsal in time" in fault.verdict.headline


@pytest.mark.parametrize("steps", first_fast([40, 12]))
def test_a_step_length_of_a_sample_of_steps_says_so(tmp_path, steps):
    synthetic.write(tmp_path, synthetic.Synthetic(steps=steps, slow_rank={3: 1.6}))
    found = synthetic.judged(tmp_path)
    sampled = f"mean of the 32 replayed of {found.job.steps_measured} measured steps"
    assert (sampled in found.verdict.headline) == (steps == 40)


def test_a_slow_rank_makes_neither_its_stage_nor_its_unit_slow(tmp_path):
    synthetic.write(tmp_path, synthetic.Synthetic(slow_rank={3: 1.6}))
    found = synthetic.judged(tmp_path)
    lost = found.stragglers.lost_s
    assert (found.verdict.cause, found.verdict.place.rank) == ("worker", 3)
    assert abs(lost["stage"]) + abs(lost["unit"]) < 0.01 * lost["worker"]
    assert found.stragglers.slowdown == pytest.approx(
        1 + lost["worker"] / found.stragglers.ideal_s, rel=0.02
    )


def _hot(rank, step):
    return (1200, 0x44) if rank == 3 else (1700 + 15 * (step % 2), 0x4)


@pytest.mark.parametrize(
    ("clocks", "told"),
    first_fast(
        [
            (_hot, ": its GPU runs at 1,200 MHz, 1,7"),  # and the others of its stage do not
            # a power cap alone is normal at full load
            (lambda rank, step: (1700, 0x4), None),
            (lambda rank, step: (1650, 0x4) if rank == 3 else (1700, 0x4), None),
            # low, but its driver names no reason: the fault is elsewhere
            (lambda rank, step: (1200, 0x1) if rank == 3 else (1700, 0x4), None),
            (None, None),
        ],
        2,
    ),
)
def test_a_slow_rank_is_named_with_its_clock(tmp_path, clocks, told):
    synthetic.write(tmp_path, synthetic.Synthetic(slow_rank={3: 1.6}, clocks=clocks))
    verdict = synthetic.judged(tmp_path).verdict
    assert (verdict.cause, verdict.place.rank) == ("worker", 3)
    clock = [one for one in verdict.evidence if one.unit == "MHz"]
    if told is None:
        assert "MHz" not in verdict.headline and not clock
    else:
        assert told in verdict.headline and "(power cap, thermal limit)" in verdict.headline
        assert clock[0].value == 1200 and "cooling" in verdict.advice


@pytest.mark.parametrize(
    ("mhz", "profiled_mhz", "where"),
    [
        (lambda step: 1700 if step < 4 else 1300, None, "in its own fastest steps"),
        (lambda step: 1300, 1700.0, "when it was profiled"),
    ],
)
def test_a_device_alone_in_its_stage_is_compared_with_itself(tmp_path, mhz, profiled_mhz, where):
    spec = synthetic.Synthetic(
        clocks=lambda rank, step: (mhz(step) if rank == 0 else 1700, 0x20),
        profiled_mhz=profiled_mhz,
    )
    synthetic.write(tmp_path, spec)
    database = open_database([tmp_path])
    (rank, clock), *others = slow_clocks(database).items()
    assert (rank, clock.mhz, clock.usual_mhz, clock.where) == (0, 1300, 1700, where)
    assert clock.reasons == ("thermal limit",) and not others


@pytest.mark.slow
def test_where_all_are_slow_their_clocks_are_named(tmp_path):
    slow = dict.fromkeys(("encoder", "llm", "generator"), 1.2)
    for name, mhz in (("hot", 1300), ("else", 1700)):
        spec = synthetic.Synthetic(
            unit_factor=slow, clocks=lambda rank, step, mhz=mhz: (mhz, 0x40), profiled_mhz=1700.0
        )
        synthetic.write(tmp_path / name, spec)
    hot, other = (synthetic.judged(tmp_path / name).verdict.headline for name in ("hot", "else"))
    assert "the clocks of their GPUs are at 76 to 76 % of what is usual (thermal limit)" in hot
    assert "either the profile is wrong" in other


def test_shares_are_shown_in_percent():
    assert Evidence("steps", 0.75, "share of steps").shown == (75.0, "% of steps")
    assert Evidence("chance", 0.5, "share").shown == (50.0, "%")
    assert Evidence("a step", 0.5, "s").shown == (0.5, "s")


@pytest.mark.parametrize(
    ("gaps", "late"),
    [
        ({0: 0.3, 1: 0.31, 2: 0.3, 3: 0.29}, None),  # both hosts alike
        ({0: 0.9, 1: 0.8, 2: 0.1, 3: 0.1}, "a"),
        ({4: 0.5}, None),  # of a trace that tells no host
    ],
)
def test_a_host_is_named_where_it_stands_out(gaps, late):
    where = {rank: Place(rank=rank, host="aabb"[rank]) for rank in range(4)} | {4: Place(rank=4)}
    assert _late_host(SimpleNamespace(where=where, losses=SimpleNamespace(gap=gaps))) == late
