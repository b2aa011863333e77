"""The analysis against numbers that are known without it."""

import math

import pytest
from msgspec.structs import asdict, replace

from disttrain_cli.analysis.analyze import analyze
from disttrain_cli.analysis.compare import compare
from disttrain_cli.analysis.job.database import open_database
from disttrain_cli.analysis.job.graph import build_graph
from tests.analysis import synthetic
from tests.cases import first_fast

COMPUTE = ("forward", "backward")


@pytest.fixture(scope="module")
def analysis(clean):
    return analyze([clean[0]])


def measured_rows(clean):
    """Rows of the steps that count: all but the first two."""
    return [row for row in clean[2].rows if row["step"] >= 2]


def seconds(rows):
    return sum(row["end_ns"] - row["start_ns"] for row in rows) / 1e9


def test_job_figures(analysis, clean):
    _, spec, truth = clean
    windows = [(end - start) / 1e9 for start, end in truth.windows[2:]]
    busy = seconds(row for row in measured_rows(clean) if row["operation"] in COMPUTE)
    assert (
        analysis.job.steps,
        analysis.job.steps_measured,
        analysis.job.warmup_steps_excluded,
    ) == (8, 6, 2)
    assert analysis.job.ranks == 6
    assert analysis.job.iteration_s == pytest.approx(sum(windows) / 6)
    assert analysis.job.bubble_fraction == pytest.approx(1 - busy / (6 * sum(windows)))
    flops = truth.flops * 6 / 8
    assert analysis.job.mfu == pytest.approx(flops / (sum(windows) * 6 * spec.peak_tflops * 1e12))
    assert sum(analysis.job.time_shares.values()) == pytest.approx(1.0, abs=1e-6)


def test_units(analysis, clean):
    _, spec, truth = clean
    window = sum(end - start for start, end in truth.windows[2:]) / 1e9
    assert [unit.name for unit in analysis.units] == ["encoder", "llm", "generator"]
    for unit in analysis.units:
        rows = [
            row
            for row in measured_rows(clean)
            if row["unit"] == unit.name and row["operation"] in COMPUTE
        ]
        flops = sum(
            synthetic.FLOPS[unit.name] * row["tokens"] * (1 if row["operation"] == "forward" else 2)
            for row in rows
        )
        assert unit.busy_fraction == pytest.approx(seconds(rows) / (unit.gpus * window))
        assert unit.mfu == pytest.approx(flops / (window * spec.peak_tflops * 1e12 * unit.gpus))


def test_a_cpu_has_one_peak(tmp_path, analysis):
    synthetic.write(tmp_path, synthetic.Synthetic(device="cpu", peak_tflops=1.2))
    shared = analyze([tmp_path])
    assert shared.job.mfu == pytest.approx(analysis.job.mfu)  # 1.2 once = 6 × 0.2
    assert [unit.mfu for unit in shared.units] == pytest.approx(
        [unit.mfu for unit in analysis.units]
    )
    assert any("share the 2 cores" in warning for warning in shared.warnings)
    assert not any("share" in warning for warning in analysis.warnings)


def test_ranks_add_up(analysis, clean):
    for rank in analysis.ranks:
        rows = [row for row in measured_rows(clean) if row["rank"] == rank.rank]
        assert rank.compute_us == pytest.approx(
            1e6 * seconds(row for row in rows if row["operation"] in COMPUTE)
        )
        assert rank.span_us == pytest.approx(
            (max(row["end_ns"] for row in rows) - min(row["start_ns"] for row in rows)) / 1e3
        )
        assert rank.idle_us + rank.compute_us + rank.non_compute_us == pytest.approx(rank.span_us)
        assert rank.overlap_pct == 0.0


def test_transfers_are_exposed_but_waiting_is_not(analysis, clean):
    """A tensor takes 0.3 ms after it was sent, a send 0.1 ms, a "
    "reduction 0.5 ms after the last member."""
    _, _spec, truth = clean
    rows = measured_rows(clean)
    sends = sum(row["operation"].startswith("send") for row in rows)
    receives = sum(row["operation"].startswith("receive") for row in rows)
    reductions = sum(row["operation"] == "reduce" and row["bytes"] > 0 for row in rows)
    window = sum(end - start for start, end in truth.windows[2:]) / 1e6
    longest = (0.1 * sends + 0.3 * receives + 0.5 * reductions) / (6 * window)
    assert analysis.job.exposed_communication_fraction == pytest.approx(longest, rel=0.02)


def test_same_work_is_predicted_exactly(analysis):
    errors = [
        row.error_pct
        for row in analysis.predicted_vs_measured
        if row.basis == "same work" and row.unit
    ]
    assert len(errors) == 9
    assert errors == pytest.approx([0.0] * 9, abs=1e-3)
    planned = {
        (row.unit, row.what): row for row in analysis.predicted_vs_measured if row.basis == "plan"
    }
    # two stages of 20 ms
    assert planned["llm", "forward_ms"].measured == pytest.approx(40.0, rel=1e-4)
    assert planned["llm", "stage_ms"].measured == pytest.approx(60.0, rel=1e-4)
    assert planned["llm", "stage_ms"].error_pct == pytest.approx(100.0, rel=1e-3)


def test_a_replay_of_everything_gives_the_record_back(clean):
    graph = build_graph(open_database([clean[0]]))
    assert graph is not None
    assert graph.replay(graph.recorded) == pytest.approx(graph.window, abs=1e-6)
    assert graph.window == pytest.approx(
        [(end - start) / 1e9 for start, end in clean[2].windows[2:]]
    )


def test_no_straggler_in_a_clean_run(analysis):
    assert analysis.verdict.cause == "none"
    assert analysis.verdict.confidence > 0.95
    assert analysis.stragglers.slowdown == pytest.approx(1.0, abs=0.02)


FAULTS = {
    "unit": ({"unit_factor": {"generator": 2.0}}, {"unit": "generator"}),
    "intra_microbatch": ({"skew": 0.5}, {"unit": "llm"}),
    "inter_microbatch": ({"slot_skew": 0.6}, {}),
    "stage": ({"slow_stage": {1: 2.0}}, {"unit": "llm", "stage": 1}),
    "worker": (
        {"slow_rank": {3: 1.6}},
        {"unit": "llm", "stage": 1, "replica": 0, "rank": 3, "host": "host-a"},
    ),
    "data": ({"load_ms": 30.0}, {}),
    "host": ({"gap_ms": 15.0}, {"host": "host-a"}),
}


@pytest.mark.parametrize("cause", first_fast(FAULTS))
def test_injected_faults_are_named(tmp_path, cause):
    fault, place = FAULTS[cause]
    truth = synthetic.write(tmp_path, synthetic.Synthetic(**fault))
    found = analyze([tmp_path])
    assert found.verdict.cause == cause
    assert {
        key: value for key, value in asdict(found.verdict.place).items() if key in place
    } == place
    assert found.verdict.confidence > 0.9
    assert found.verdict.advice and found.verdict.next_command.startswith("disttrain ")
    lost = found.stragglers.lost_s
    measured = sum(end - start for start, end in truth.windows[2:]) / 6e9
    assert sum(lost.values()) == pytest.approx(measured - found.stragglers.ideal_s, abs=1e-6)
    assert abs(lost["unexplained"]) < 0.05 * measured


def test_memory_of_the_fullest_rank_of_a_stage_stands_beside_the_plan(tmp_path):
    synthetic.write(tmp_path, synthetic.Synthetic(steps=3, pp=2, dp=2))
    found = {(row.unit, row.stage): row for row in analyze([tmp_path]).memory}
    held_mib = {place: 1024 * row.measured_gib for place, row in found.items()}
    assert held_mib == {("encoder", 0): 3, ("llm", 0): 5, ("llm", 1): 7, ("generator", 0): 8}


@pytest.mark.slow
def test_slowest_tells_heavy_data_from_slow_hardware(tmp_path):
    synthetic.write(tmp_path, synthetic.Synthetic(slow_rank={2: 1.5, 4: 1.5}))
    slow = {row.kind: row for row in analyze([tmp_path]).slowest}
    assert (slow["replica"].unit, slow["replica"].number) == ("llm", 1)
    assert slow["replica"].ratio == pytest.approx(1.2, rel=1e-3)  # 90 ms against a mean of 75
    assert slow["replica"].normalised_ratio == pytest.approx(1.2, rel=1e-3)
    heavy = tmp_path / "heavy"
    synthetic.write(heavy, synthetic.Synthetic(slot_skew=0.5))
    slot = {row.kind: row for row in analyze([heavy]).slowest}["slot"]
    assert slot.number in (2, 5)
    assert slot.ratio == pytest.approx(1.5, rel=1e-2)
    assert slot.normalised_ratio == pytest.approx(1.0, rel=1e-2)


def test_published_what_if_names_the_slow_stage(tmp_path):
    synthetic.write(tmp_path, synthetic.Synthetic(slow_stage={1: 2.0}))
    study = analyze([tmp_path]).what_if
    assert max(study.by_stage, key=study.by_stage.get) == "2"  # encoder 0, llm 1 and 2, generator 3
    assert (
        study.by_stage["2"]
        > 1.2
        > max(value for key, value in study.by_stage.items() if key != "2")
    )
    assert study.slowdown > 1.1


def test_compare(tmp_path, analysis):
    synthetic.write(tmp_path, synthetic.Synthetic(load_ms=30.0))
    rows = {row.what: row for row in compare(analysis, analyze([tmp_path]))}
    assert rows["job.iteration_s"].change_pct > 20
    assert rows["job.mfu"].change_pct < -10
    assert rows["units.llm.gpus"].change_pct == 0
    assert rows["stragglers.lost_s.data"].after > 100 * rows["stragglers.lost_s.data"].before


def test_compare_shows_neither_zeros_that_were_not_measured_nor_percentages_of_nothing(analysis):
    lost = analysis.stragglers.lost_s | {"unit": 0.1, "host": 1.0, "data": 0.2, "worker": 0.0015}
    little = {"unit": 0.0, "host": -0.5, "data": 0.1, "worker": 1e-14}
    after = replace(analysis, stragglers=replace(analysis.stragglers, lost_s=lost))
    told = replace(analysis.stragglers, lost_s=lost | little, not_recorded=["unit"])
    rows = {row.what: row for row in compare(replace(analysis, stragglers=told), after)}
    unit, host, data, worker = (
        rows[f"stragglers.lost_s.{cause}"] for cause in ("unit", "host", "data", "worker")
    )
    assert (unit.before, unit.after) == (None, 0.1)
    assert (host.before, host.change_pct) == (-0.5, None)  # of another sign
    assert data.change_pct == pytest.approx(100) and worker.change_pct is None


def test_json_has_the_promised_keys(analysis):
    plain = analysis.to_json()
    assert {"units", "warnings"} <= set(plain)
    assert {
        "ranks",
        "steps",
        "iteration_s",
        "mfu",
        "bubble_fraction",
        "exposed_communication_fraction",
    } <= set(plain["job"])
    assert list(plain["stragglers"]["lost_s"]) == [
        "unit",
        "intra_microbatch",
        "inter_microbatch",
        "stage",
        "worker",
        "communication",
        "data",
        "host",
        "unexplained",
    ]
    assert set(plain["verdict"]) >= {"cause", "place", "confidence", "evidence", "advice"}
    assert set(plain["verdict"]["place"]) == {"unit", "stage", "replica", "cp_rank", "rank", "host"}
    assert set(plain["ranks"][0]) >= {
        "rank",
        "span_us",
        "idle_us",
        "compute_us",
        "non_compute_us",
        "overlap_pct",
        "collective_wait_us",
    }
    assert set(plain["what_if"]) == {
        "slowdown",
        "by_stage",
        "by_replica",
        "by_operation",
        "worst_workers_share",
        "last_stage_share",
    }
    assert not math.isnan(plain["job"]["iteration_s"])


@pytest.mark.slow
def test_crowded_cores_halve_the_confidence_in_ranks(tmp_path):
    found = {}
    for cores in (2, 64):
        spec = synthetic.Synthetic(slow_rank={3: 1.6}, device="cpu", peak_tflops=1.2, cores=cores)
        synthetic.write(tmp_path / str(cores), spec)
        found[cores] = analyze([tmp_path / str(cores)]).verdict
        assert found[cores].cause == "worker" and found[cores].place.rank == 3
    assert 0.4 < found[2].confidence <= 0.5 < 0.9 < found[64].confidence
    assert found[2].next_command == "disttrain plan --gpus 5" != found[64].next_command


def test_levelling_never_counts_as_a_gain(tmp_path):
    """With two slots filling the pipeline dominates, and light units must not be charged for being
    short."""
    synthetic.write(tmp_path, synthetic.Synthetic(slots=2, unit_factor={"encoder": 0.2}))
    found = analyze([tmp_path])
    assert found.stragglers.lost_s["unit"] >= 0
    assert found.stragglers.slowdown >= 1 - 1e-6
