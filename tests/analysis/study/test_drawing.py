"""What the report shows of an operation-level trace."""

import json
import re
from pathlib import Path

import pytest

from disttrain_cli.analysis.analyze import analyze_open
from disttrain_cli.analysis.report import write_report
from disttrain_cli.analysis.report.timeline import MOST_LANES
from disttrain_cli.analysis.study.drawing import study_pictures
from tests.analysis.report.pages import ARGUMENTS, BROWSER, Tab
from tests.analysis.study import megatron


def write(folder: Path, job: megatron.Job) -> Path:
    return megatron.write(folder / "t.parquet", megatron.rows(job))


def test_the_timeline_shows_every_rank_and_the_cells_who_is_slow(tmp_path):
    job = megatron.Job(slow_stage={2: 1.8}, load={(1, 0): 3.0})
    drawn = study_pictures([write(tmp_path, job)])
    assert [item["why"] for item in drawn.timelines] == ["typical", "slowest", "fastest"]
    assert [row["step"] for row in drawn.steps] == list(range(job.steps))
    for item in drawn.timelines:
        assert [text for _, text in item["lanes"]] == [
            f"stage {rank // 2} · replica {rank % 2} · rank {rank}" for rank in range(6)
        ]
        bars = item["bars"]
        assert {kind for _, kind in item["names"]} == {
            "forward",
            "backward",
            "receive",
            "send",
            "reduce",
            "step",
        }
        sends = [
            length
            for length, name in zip(bars["length"], bars["name"], strict=True)
            if item["names"][name][1] == "send"
        ]
        # however long their receivers wait
        assert sends == pytest.approx([1e6 * megatron.TRANSFER_S] * len(sends))
        assert max(map(sum, zip(bars["start"], bars["length"], strict=True))) == pytest.approx(
            item["length_us"]
        )
        assert set(bars["slot"]) == {-1, *range(job.slots)}
    slow = {(cell["stage"], cell["replica"]): cell for cell in drawn.cells}
    assert len(slow) == 6 and slow[2, 0]["ratio"] == pytest.approx(1.8 / ((1 + 1 + 1.8) / 3))
    assert slow[0, 1]["mean_ms"] == pytest.approx(
        1e3 * (megatron.FORWARD_S + megatron.BACKWARD_S) * (1 + 2 / 3 / 4)
    )


def test_interleaved_parts_are_named_and_many_ranks_thinned(tmp_path):
    drawn = study_pictures([write(tmp_path, megatron.Job(chunks=2, slots=6, steps=2))])
    assert len(drawn.timelines) == 2
    assert set(drawn.timelines[0]["modules"]) == {"part 0", "part 1", None}
    job = megatron.Job(dp=70, pp=2, slots=2, steps=1, slow_rank={93: 1.5})
    (item,) = study_pictures([write(tmp_path, job)], rank=93).timelines
    assert 64 < len(item["lanes"]) <= MOST_LANES + 1 and "ranks are not drawn" in item["note"]
    assert any(text.endswith("rank 93") for _, text in item["lanes"])


def test_what_cannot_be_replayed_is_drawn(tmp_path):
    rows = [row for row in megatron.rows(megatron.Job()) if row["optype"] != "forward-recv"]
    assert (
        len(study_pictures([megatron.write(tmp_path / "t.parquet", rows)]).timelines[0]["lanes"])
        == 6
    )


@pytest.fixture
def page(tmp_path, monkeypatch):
    """The page as the command writes it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    analysis, pictures = analyze_open([write(tmp_path, megatron.Job(slow_stage={2: 1.8}))])
    return write_report(analysis, pictures(), [], tmp_path / "page.html")


def test_the_page_holds_timeline_and_heatmap(page):
    text = page.read_text()
    absent = re.search(r'<section class="absent">.*?</section>', text, re.S).group()
    assert "Timeline" not in absent and "Stage × replica" not in absent and "Loss" not in absent
    heat = re.search(r'<section id="heat">.*?</section>', text, re.S).group()
    assert heat.count("<svg") == 1 and heat.count('class="hot"') == 2 and "both maps" not in heat
    shown = json.loads(re.search(r'id="data">(.*?)</script>', text, re.S).group(1))["timelines"]
    assert (
        shown[0]["lanes"][-1] == ["the job", "stage 2 · replica 1 · rank 5"] and "Step time" in text
    )


@pytest.mark.slow
@pytest.mark.skipif(
    BROWSER is None, reason="no Chromium on this machine: the page was not opened in a browser"
)
def test_the_page_is_alive_in_a_browser(page):
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with playwright.sync_playwright() as play:
        browser = play.chromium.launch(executable_path=BROWSER, args=ARGUMENTS)
        opened = Tab(browser, page)
        tab = opened.tab
        assert (
            tab.locator(".lane").count() == 6
            and "Stage 2" in tab.locator("#verdict h1").inner_text()
        )
        drawn = opened.picture()
        tab.locator("#zoom-in").click()
        assert opened.picture() != drawn
        tab.locator("#timeline").focus()
        tab.keyboard.press("n")
        assert "rank 0" in tab.locator("#said").inner_text()
        cool = tab.locator(".heat .over").first.evaluate("rect => getComputedStyle(rect).fill")
        assert "url" in cool  # stripes over what is faster, not a full colour
        assert opened.problems == []
        browser.close()
