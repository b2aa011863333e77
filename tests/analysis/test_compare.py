"""Two runs side by side by operation and by kernel: own, Kineto, operations, and mixed."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

from disttrain_cli.analysis.compare import TimeChange, Times, compare_times
from disttrain_cli.analysis.sampled import DATA, IDLE, WHOLE, Samples, samples_of
from disttrain_cli.analysis.significance import LEVEL, difference
from tests.analysis import synthetic
from tests.analysis.kineto import traces
from tests.commands.test_train import call

REAL = Path(__file__).parents[3] / "shared" / "data" / "traces"


def compared(before: Path, after: Path) -> Times:
    return compare_times(samples_of([before]), samples_of([after]))


def rows(times: Times) -> dict[tuple[str, str], TimeChange]:
    return {(row.measure, row.name): row for row in times.rows}


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A run, the same with other data, and one whose LLM is slower."""
    folder = tmp_path_factory.mktemp("own")
    specs = {
        "before": synthetic.Synthetic(steps=12, seed=1, slot_skew=0.2),
        "again": synthetic.Synthetic(steps=12, seed=2, slot_skew=0.2),
        "slow": synthetic.Synthetic(steps=12, seed=3, slot_skew=0.2, unit_factor={"llm": 1.5}),
    }
    for name, spec in specs.items():
        synthetic.write(folder / name / "traces", spec)
    return {name: folder / name for name in specs}


def kineto(folder: Path, compute: list[int], steps: int = 12) -> Path:
    """Four ranks, whose steps have a GEMM of µs that differ a little, and an all-reduce."""
    arrivals = [[620 + (7 * step + rank) % 5 for step in range(steps)] for rank in range(4)]
    traces.job(folder, arrivals, compute=compute)
    return folder


@pytest.mark.slow
def test_own_runs_are_compared_by_operation(own: dict[str, Path]) -> None:
    found = rows(compared(own["before"], own["slow"]))
    slower = found["operation", "llm forward"]
    assert slower.significant and slower.low_s is not None and slower.low_s > 0
    assert slower.before_s is not None and slower.after_s is not None
    assert slower.after_s / slower.before_s == pytest.approx(1.5, rel=0.15)
    assert found["kind", "compute"].significant and found["step", "step"].significant
    assert not found["operation", "encoder forward"].significant


def test_the_step_is_the_primary_comparison_and_the_rest_is_corrected() -> None:
    """A step 20 % shorter whose interval excludes zero, beside 48 rows of noise."""
    draw = np.random.default_rng(4)
    noise = [("operation", f"part {number}") for number in range(48)]

    def run(step_s: float) -> Samples:
        series = {key: draw.normal(0.1, 0.01, 10) for key in noise}
        return Samples("disttrain", {WHOLE: step_s + np.linspace(-0.26, 0.26, 10)} | series)

    before, after = run(1.0), run(0.8)
    found = rows(compare_times(before, after))
    alone = {key: difference(before.series[key], after.series[key]) for key in [WHOLE, *noise]}
    step = found[WHOLE]
    assert step.p == alone[WHOLE].p and LEVEL / 49 < step.p < LEVEL
    assert step.significant and step.high_s is not None and step.high_s < 0
    assert min(one.p for key, one in alone.items() if key != WHOLE) < LEVEL
    assert not any(row.significant for key, row in found.items() if key != WHOLE)


@pytest.mark.slow
def test_kinds_add_up_to_the_step(own: dict[str, Path], tmp_path: Path) -> None:
    loads = {"ph": "X", "cat": "user_annotation", "pid": 100, "tid": 100, "dur": 90}
    for rank in range(2):
        found = traces.events([620] * 4)
        found += [
            loads | {"name": "enumerate(DataLoader)#_SingleProcess", "ts": traces.BASE_US + at}
            for at in (1500, 2150)  # during the first kernel of 300 µs, and of an idle device
        ]
        traces.write(tmp_path / f"rank{rank}.json", traces.document(found, rank, 2))
    for path in (own["before"], tmp_path):
        series = samples_of([path]).series
        kinds = sum(values for key, values in series.items() if key[0] == "kind")
        assert kinds == pytest.approx(series[WHOLE], rel=1e-6)
        assert (series[IDLE] >= 0).all() and DATA in series


def test_equal_runs_do_not_differ(own: dict[str, Path]) -> None:
    times = compared(own["before"], own["again"])
    assert not any(row.significant for row in times.rows)
    assert times.steps[0] == times.steps[1] > 3 and times.formats == ["disttrain"] * 2


@pytest.mark.slow
def test_kineto_jobs_are_compared_by_kernel(tmp_path: Path) -> None:
    before, after = kineto(tmp_path / "a", [300] * 4), kineto(tmp_path / "b", [330] * 4)
    found = rows(compared(before, after))
    gemm = found["kernel", traces.GEMM]
    assert gemm.significant and gemm.difference_s == pytest.approx(30e-6)
    assert not found["step", "step"].significant  # the all-reduce waits the less
    assert not found["operation", "all_reduce"].significant


@pytest.mark.slow
def test_a_kernel_of_one_run_took_nothing_in_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = kineto(tmp_path / "a", [300] * 4)
    monkeypatch.setattr(traces, "GEMM", "sm90_xmma_gemm")
    after = kineto(tmp_path / "b", [300] * 4)
    found = rows(compared(before, after))
    assert found["kernel", "sm90_xmma_gemm"].before_s == 0
    assert found["kernel", "ampere_sgemm_128x64_tn"].after_s == 0
    assert found["kernel", "sm90_xmma_gemm"].significant


@pytest.mark.slow
def test_mixed_runs_share_the_step_and_kinds(own: dict[str, Path], tmp_path: Path) -> None:
    times = compared(own["before"], kineto(tmp_path, [300] * 4))
    both = {key for key, row in rows(times).items() if row.difference_s is not None}
    assert {("step", "step"), ("kind", "compute"), ("kind", "communication")} <= both
    assert all(measure in ("step", "kind") for measure, _ in both)
    assert any(row.before_s is None for row in times.rows)


@pytest.mark.slow
def test_one_step_tells_no_noise(tmp_path: Path) -> None:
    before, after = kineto(tmp_path / "a", [300] * 4, 2), kineto(tmp_path / "b", [330] * 4, 2)
    assert all(row.significant is None for row in compared(before, after).rows)


@pytest.mark.slow
def test_the_command_shows_what_is_beyond_noise(
    own: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["analyze", own["slow"], "--compare", own["before"]]
    code, out, _ = call(arguments, capsys)
    assert code == 0 and "ms per step and rank" in out and "llm forward" in out
    assert "more rows differ within the noise" in out and "Holm's correction" in out
    assert re.search(r"^kind +data ", out, re.M) and re.search(r"^kind +idle ", out, re.M)
    code, out, _ = call([*arguments, "--json", "--quiet"], capsys)
    times = json.loads(out)["compare"]["times"]
    assert {*times} == {"test", "formats", "steps", "rows"}
    assert {*times["rows"][0]} == {
        "measure",
        "name",
        "before_s",
        "after_s",
        "difference_s",
        "low_s",
        "high_s",
        "p",
        "significant",
    }
    assert times["rows"][0]["name"] == "step"


@pytest.mark.skipif(not REAL.is_dir(), reason="needs the shared traces")
def test_real_traces_are_compared() -> None:
    """One step of a DLRM on eight GPUs, and 32 of an LLM, of which nothing has the same name."""
    dlrm, study = REAL / "dlrm-8rank", REAL / "straggler-ST"
    times = compared(dlrm, study)
    both = {key for key, row in rows(times).items() if row.difference_s is not None}
    assert times.steps == [1, 32] and {measure for measure, _ in both} == {"step", "kind"}
    step = rows(times)["step", "step"]
    assert step.after_s == pytest.approx(2.214, abs=1e-3)  # as published
    same = compared(study, study)
    assert same.rows and not any(row.significant for row in same.rows)
