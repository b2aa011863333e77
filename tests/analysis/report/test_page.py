"""The report page as a file: self-contained, safe with any string, of any format, small."""

import json
import re

import pytest
from msgspec.structs import replace

from disttrain_cli.analysis.report import write_report
from disttrain_cli.analysis.report.pictures import Pictures
from disttrain_cli.analysis.report.timeline import MOST_BARS, MOST_LANES
from disttrain_cli.analysis.result.rows import (
    CollectiveRow,
    InsideRow,
    KernelRow,
    MemoryRow,
    Part,
    RankSummary,
)
from disttrain_cli.analysis.result.summary import Analysis, JobSummary
from disttrain_cli.analysis.result.verdicts import Place, Stragglers, Verdict, WhatIf
from tests.analysis import synthetic
from tests.analysis.report.pages import ATTACK, make


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    return make(
        tmp_path_factory.mktemp("report"), synthetic.Synthetic(slow_rank={3: 1.6}, run=ATTACK)
    )


def timelines(text: str) -> list[dict]:
    return json.loads(re.search(r'id="data">(.*?)</script>', text, re.S).group(1))["timelines"]


def test_page_is_self_contained_and_escaped(page):
    text = page.read_text()
    assert "Rank 3 (llm, stage 1, replica 0) is slow" in text
    assert not re.search(r"(?:src|href)=\"(?!data:|#)", text)
    assert (
        "http://" not in text
        and "https://" not in text
        and "@@" not in text
        and 'style="' not in text
    )
    assert "<img src=x" not in text and "<script>alert" not in text and "step-8 <b>" not in text
    assert text.count("data:image/png;base64,") == 1
    order = [
        "verdict",
        "timeline",
        "shares",
        "losses",
        "heat",
        "units",
        "predicted",
        "operations",
        "learning",
        "ranks",
    ]
    places = [text.index(f'id="{name}"') for name in order]
    assert places == sorted(places) and "transfer gradient" in text
    assert [len(item["lanes"]) for item in timelines(text)] == [6] * len(timelines(text))


def test_lost_seconds_and_heatmaps_hold_their_figures(page):
    text = page.read_text()
    losses = re.search(r'<section id="losses">.*?</section>', text, re.S).group()
    assert "ideal step" in losses and "slow ranks" in losses and "recorded step" in losses
    heat = re.search(r'<section id="heat">.*?</section>', text, re.S).group()
    assert heat.count("<svg") == 2 and heat.count('class="hot"') >= 2 and "As a table" in heat
    rank3 = next(
        row for row in re.findall(r"<tr>.*?</tr>", heat) if "llm · stage 1</th><td>0</td>" in row
    )
    slower = [float(value) for value in re.findall(r"([\d.]+) %", rank3)]
    assert slower[0] > 115 and slower[1] > 115  # slow in time, and slower than its work explains


@pytest.mark.slow
def test_pages_stay_small_with_64_ranks(tmp_path):
    path = make(tmp_path, synthetic.Synthetic(steps=2, slots=4, dp=31))
    assert path.stat().st_size < 1_000_000
    assert len(timelines(path.read_text())[0]["lanes"]) == 64


@pytest.mark.slow
def test_of_many_ranks_the_slowest_are_drawn(tmp_path):
    path = make(tmp_path, synthetic.Synthetic(steps=2, slots=2, dp=70, slow_rank={77: 1.5}))
    drawn = timelines(path.read_text())[0]
    assert 64 < len(drawn["lanes"]) <= MOST_LANES + 1 and len(drawn["bars"]["lane"]) <= MOST_BARS
    assert any(text.endswith("rank 77") for _, text in drawn["lanes"])
    assert "ranks are not drawn" in drawn["note"] and path.stat().st_size < 1_500_000


def bare(**known: object) -> Analysis:
    """An analysis of another program's trace, which tells next to nothing."""
    job = JobSummary(
        run=ATTACK,
        rehearsed=None,
        layout=None,
        ranks=2,
        steps=0,
        steps_measured=0,
        warmup_steps_excluded=0,
        iteration_s=None,
        iteration_p50_s=None,
        iteration_p95_s=None,
        sequences_per_s=None,
        mfu=None,
        bubble_fraction=None,
        exposed_communication_fraction=None,
        time_shares={},
    )
    verdict = Verdict(
        cause="unknown",
        headline="Not told.",
        place=Place(host=ATTACK),
        lost_s=0.0,
        confidence=0.0,
        evidence=[],
        advice=ATTACK,
        next_command=ATTACK,
    )
    return replace(
        Analysis(
            format="kineto",
            job=job,
            units=[],
            stragglers=Stragglers(slowdown=None, ideal_s=None, lost_s=None),
            verdict=verdict,
            ranks=[],
            what_if=None,
            predicted_vs_measured=[],
            operations=[],
            drift=[],
            slowest=[],
            warnings=[ATTACK],
        ),
        **known,
    )


def test_sections_without_data_are_left_out_with_one_line(tmp_path):
    text = write_report(bare(), Pictures(), [], tmp_path / "page.html").read_text()
    absent = re.search(r'<section class="absent">.*?</section>', text, re.S).group()
    for what in (
        "Timeline",
        "Stage × replica",
        "Units",
        "What if",
        "Predicted",
        "Memory",
        "Loss and MFU",
    ):
        assert absent.count(f"<li>{what}") == 1
    assert "<canvas" not in text and "<img src=x" not in text and "<script>alert" not in text


def test_what_other_formats_tell_is_shown_and_escaped(tmp_path):
    ranks = [
        RankSummary(
            rank=rank,
            host=ATTACK,
            unit=None,
            stage=None,
            replica=None,
            span_us=10.0,
            idle_us=2.0,
            compute_us=3.0,
            non_compute_us=5.0,
            overlap_pct=4.5,
            collective_wait_us=1.0,
            last_to_arrive=rank,
            memory_peak_gib=1.5,
        )
        for rank in range(2)
    ]
    analysis = bare(
        ranks=ranks,
        kernels=[
            KernelRow(name=ATTACK, kind="compute", count=3, total_us=9.0, longest_us=5.0, share=0.5)
        ],
        collectives=[
            CollectiveRow(
                name="all_reduce",
                group=ATTACK,
                step=None,
                index=0,
                ranks=2,
                last_rank=1,
                longest_wait_us=7.0,
                mean_wait_us=7.0,
                transfer_us=2.0,
            )
        ],
        what_if=WhatIf(
            slowdown=1.1787,
            by_stage={"3": 1.2323},
            by_replica={},
            by_operation={ATTACK: 1.1},
            worst_workers_share=0.0314,
            last_stage_share=None,
        ),
        inside=[
            InsideRow(
                unit=ATTACK,
                stage=0,
                module=ATTACK,
                operation="forward",
                ranks=1,
                count=2,
                profiled_ms=3.0,
                usual_ms=None,
                shares={"gemm": 0.75, "idle": 0.25},
                top=[Part(name=ATTACK, kind="gemm", count=4.0, share=0.75)],
            )
        ],
        memory=[
            MemoryRow(unit=ATTACK, stage=0, measured_gib=3.0, predicted_gib=None, limit_gib=4.0)
        ],
    )
    text = write_report(analysis, Pictures(), [], tmp_path / "page.html").read_text()
    assert "<img src=x" not in text and "<script>alert" not in text
    assert all(
        f'id="{name}"' in text
        for name in ("by-rank", "collectives", "kernels", "what-if", "inside", "memory")
    )
    assert "1.1787" in text and "75.0 %" in text and "7 µs" in text and "Last to arrive" in text
