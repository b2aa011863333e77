"""One figure, one meaning: what the page says in two places is the same, and nothing is 0 that was
not measured."""

import json
import re
from html import unescape

import pytest

from disttrain_cli import __version__
from disttrain_cli.analysis.analyze import analyze, analyze_open, ask
from disttrain_cli.analysis.report import write_report
from tests.analysis import synthetic
from tests.analysis.kineto import traces
from tests.analysis.report.test_page import timelines
from tests.analysis.study import megatron

LONG = (
    "void at::native::vectorized_elementwise_kernel<4, "
    + "at::native::some_functor_with_underscores, " * 12
    + ">"
)


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def page_of(paths, folder):
    found, pictures = analyze_open(paths)
    return found, write_report(found, pictures(), [], folder / "page.html").read_text()


def part(text, name):
    return unescape(re.search(rf'<section id="{name}">.*?</section>', text, re.S).group())


@pytest.mark.slow
def test_own_traces_have_one_step_time_and_one_rate(tmp_path):
    """Steps as the trainer reports them last longer than their rows; all figures are of the
    reported ones."""
    spec = synthetic.Synthetic(slot_skew=0.4, skew=0.2)
    folder = tmp_path / "my run" / "traces"
    truth = synthetic.write(folder, spec)
    reported = [
        {
            "run": spec.run,
            "step": step,
            "loss": 1.0,
            "loss_text": 1.0,
            "loss_image": 1.0,
            "grad_norm": 1.0,
            "learning_rate": 1.0,
            "iteration_s": 1.05 * (end - start) / 1e9,
            "sequences_per_s": 7.0 + step,
            "mfu": 0.3,
            "data_wait_s": 0.0,
            "tokens": 1,
            "images": 1,
            "targets": 1,
            "model_flops": 1.0,
            "end_ns": end,
        }
        for step, (start, end) in enumerate(truth.windows)
    ]
    synthetic.table(folder / "steps" / "segment-00000.parquet", reported, synthetic.STEP_COLUMNS)
    found, text = page_of([folder], tmp_path)
    measured = [row["iteration_s"] for row in reported[2:]]
    mean_s = sum(measured) / len(measured)
    lost = found.stragglers
    assert found.job.iteration_s == pytest.approx(mean_s)
    assert lost.ideal_s + sum(lost.lost_s.values()) == pytest.approx(mean_s)
    assert lost.ideal_s * lost.slowdown == pytest.approx(mean_s)
    assert [one.step_s for one in lost.by_step] == pytest.approx(measured)
    plan = {row.what: row.measured for row in found.predicted_vs_measured if row.unit is None}
    batch = spec.dp * spec.slots
    assert found.job.sequences_per_s == plan["sequences_per_s"] == pytest.approx(batch / mean_s)
    assert plan["iteration_s"] == found.job.iteration_s
    (windows,) = ask(
        [folder],
        "SELECT avg(window_s), max(abs(window_s - compute_s - data_wait_s - warmup_s - "
        "other_unit_s - other_stage_s - transfer_s - drain_s - update_s - gap_s)) FROM idle",
    ).rows
    assert windows[0] == pytest.approx(mean_s) and windows[1] < 1e-6
    assert (
        "my run" in text and __version__ in text and re.search(r"recorded 2001-09-09 .* UTC", text)
    )
    assert '<section id="losses-by-step">' in text and "uneven data over slots" in part(
        text, "losses-by-step"
    )


def test_slowest_of_their_kind_are_cells_of_the_heatmap(tmp_path):
    folder = tmp_path / "run" / "traces"
    synthetic.write(folder, synthetic.Synthetic(slow_stage={1: 1.5}))
    found, text = page_of([folder], tmp_path)
    rows = {row.kind: row for row in found.slowest}
    cells = [float(ms) for ms in re.findall(r"<td>([\d.]+) ms</td>", part(text, "heat"))]
    assert min(cells) <= rows["stage"].mean_ms <= max(cells) and min(cells) <= rows[
        "slot"
    ].mean_ms <= max(cells)
    assert f">{rows['stage'].mean_ms:.3g} ms</text>" in part(text, "heat")


def test_slowest_of_operations_are_cells_too(tmp_path):
    found, text = page_of(
        [megatron.write(tmp_path / "t.parquet", megatron.rows(megatron.Job(slow_stage={2: 1.8})))],
        tmp_path,
    )
    stage = next(row for row in found.slowest if row.kind == "stage")
    assert stage.mean_ms == pytest.approx(1.8e3 * (megatron.FORWARD_S + megatron.BACKWARD_S))
    assert f">{stage.mean_ms:.3g} ms</text>" in part(text, "heat")
    losses = part(text, "losses")
    assert found.stragglers.not_recorded == ["unit", "data"]
    assert "Not in these traces: GPUs shared unevenly" in losses
    assert ">waiting for data<" not in losses


def test_exposed_communication_is_the_same_for_the_job_and_its_ranks(tmp_path):
    found, text = page_of(traces.job(tmp_path, [[400, 400, 400], [400, 550, 450]]), tmp_path)
    assert (
        sum(rank.exposed_communication_us for rank in found.ranks)
        / (1e6 * len(found.ranks) * found.job.steps_measured * found.job.iteration_s)
        == pytest.approx(found.job.exposed_communication_fraction)
        == pytest.approx(found.job.time_shares["transfer"])
    )
    share = f"{100 * found.job.exposed_communication_fraction:.1f} %"
    assert f"<b>{share}</b><span>exposed communication</span>" in text
    assert f"Exposed communication <b>{share}</b>" in part(text, "shares")
    assert "Exposed waiting" in part(text, "ranks")


def test_a_step_lasts_until_its_kernels_have_ended(tmp_path):
    """The host is done with its steps long before the device is: what a step computes is never more
    than the step."""
    (path,) = traces.job(tmp_path, [[40, 40, 40]], compute=[30])
    found = traces.events([900, 900, 900], compute=30)
    for step in range(3):
        launch, kernel = traces.kernel(
            traces.GEMM, traces.BASE_US + 1000 + 3000 * step, 2900, 50 + step
        )
        found += [launch | {"ts": traces.BASE_US + 1000 * step + 500}, kernel]
    document = traces.document(found)
    found = analyze([traces.write(path, document)])
    assert found.stragglers.ideal_s > 2e-3 and found.job.iteration_s > found.stragglers.ideal_s
    # until the last kernel ends, from the first one of step 1, which begins while step 0 computes
    assert found.job.iteration_s == pytest.approx((7000 + 2900 - 1010) / 2 / 1e6)


def test_what_kineto_cannot_tell_is_no_zero(tmp_path):
    """A single rank without a collective, a loader, memory or shapes."""
    found, text = page_of(
        [
            traces.write(
                tmp_path / "rank0.json",
                traces.document(traces.kernel(traces.GEMM, traces.BASE_US, 100, 1)),
            )
        ],
        tmp_path,
    )
    (rank,) = found.ranks
    assert (
        rank.overlap_pct,
        rank.collective_wait_us,
        rank.last_to_arrive,
        rank.memory_peak_gib,
    ) == (None,) * 4
    assert found.stragglers.not_recorded == [
        "unit",
        "intra_microbatch",
        "inter_microbatch",
        "stage",
        "data",
    ]
    losses = part(text, "losses")
    for name in ("uneven data over slots", "uneven stages", "waiting for data"):
        assert f">{name}<" not in losses and name in losses  # said to be unknown, not drawn
    assert "Waiting for data" not in part(text, "shares")
    assert not re.search("Unit · stage|Last to arrive", part(text, "ranks"))
    assert (
        "FLOPs by operator: no shapes were recorded" in text
        and "Hosts: these traces do not name them" in text
    )


def test_names_are_whole_and_keep_their_underscores(tmp_path):
    found = [*traces.events([400]), *traces.kernel(LONG, traces.BASE_US + 500, 30, 77)]
    _, text = page_of([traces.write(tmp_path / "rank0.json", traces.document(found))], tmp_path)
    assert f'title="{LONG}"' in unescape(part(text, "kernels"))
    drawn = timelines(text)[0]
    assert [LONG, "compute"] in drawn["names"] and 'replaceAll("_"' not in text
    assert [name for _, name in drawn["lanes"]] == ["host", "compute", "communication, copies"]
    lanes = {
        drawn["names"][name][1]
        for lane, name in zip(drawn["bars"]["lane"], drawn["bars"]["name"], strict=True)
        if lane == 0
    }
    assert lanes == {"host"} and min(drawn["bars"]["start"]) == 0


def test_hosts_are_shown_with_their_clocks(tmp_path):
    spec = synthetic.Synthetic()
    folder = tmp_path / "run" / "traces"
    truth = synthetic.write(folder, spec)
    for rank in (3, 4):
        rows = [row | {"host": "host-<b>"} for row in truth.rows if row["rank"] == rank]
        for file in (folder / f"rank-{rank:05d}").iterdir():
            file.unlink()
        synthetic.table(
            folder / f"rank-{rank:05d}" / "segment-00000.parquet", rows, synthetic.TRACE_COLUMNS
        )
    found, text = page_of([folder], tmp_path)
    assert len(found.clocks) == 2 and "host-<b>" not in text.replace("&lt;b&gt;", "")
    hosts = part(text, "hosts")
    assert (
        hosts.count("<tr>") == 3 and "encoder 1, llm 2, generator 1" in hosts and ">llm 2<" in hosts
    )
    assert "the reference" in hosts and "µs" in hosts
    for row, own in zip(hosts.split("<tr>")[2:], ({0, 1, 2, 5}, {3, 4}), strict=True):
        busy = sum(rank.compute_us for rank in found.ranks if rank.rank in own) / 1e6 / len(own)
        assert (
            f"<td>{100 * busy / found.job.iteration_s / found.job.steps_measured:.1f} %</td>" in row
        )


@pytest.mark.slow
def test_a_rehearsal_shows_no_losses(tmp_path):
    folder = tmp_path / "run" / "traces"
    synthetic.write(folder, synthetic.Synthetic())
    job = json.loads((folder / "job.json").read_text())
    _, text = page_of([folder], tmp_path)
    assert "Losses<div" in part_of_curves(text) and "Gradient norm" in part_of_curves(text)
    job["rehearsed"] = {
        "processes": 6,
        "time_scale": 1.0,
        "messages": "scaled",
        "noise": 0.0,
        "faults": [],
    }
    (folder / "job.json").write_text(json.dumps(job))
    _, text = page_of([folder], tmp_path)
    curves = part_of_curves(text)
    assert "Losses" not in curves and "Gradient norm" not in curves and "Step time" in curves
    assert "<li>Losses: emulated devices compute none.</li>" in text


def part_of_curves(text):
    return text[text.index('id="curves"') : text.index('id="ranks"')]
