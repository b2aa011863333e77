"""The report page: self-contained, safe with any string, and alive in a browser."""

from __future__ import annotations

import json
import re
import shutil
import struct
import zlib
from pathlib import Path

import pytest
import synthetic

from disttrain_cli.analysis.analyze import analyze_database
from disttrain_cli.analysis.charts import line_chart, thin
from disttrain_cli.analysis.database import open_database
from disttrain_cli.analysis.report import write_report
from disttrain_cli.analysis.timeline import representative_steps, write_chrome_trace

BROWSER = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)
ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


def png(path: Path) -> Path:
    """A 4 × 4 grey PNG."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    path.write_bytes(
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", struct.pack(">IIBBBBB", 4, 4, 8, 0, 0, 0, 0))
        + chunk(b"IDAT", zlib.compress(bytes([0, 90, 120, 150, 180] * 4)))
        + chunk(b"IEND", b"")
    )
    return path


def make(folder: Path, spec: synthetic.Synthetic) -> Path:
    synthetic.write(folder / "traces", spec)
    database = open_database([folder / "traces"])
    images = [png(folder / "step-8 <b>&.png"), folder / "missing.png"]
    return write_report(analyze_database(database), database, images, folder / "report.html")


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    return make(
        tmp_path_factory.mktemp("report"),
        synthetic.Synthetic(slow_rank={3: 1.6}, run="</script><img src=x onerror=alert(1)>"),
    )


def test_page_is_self_contained_and_escaped(page):
    text = page.read_text()
    assert "Rank 3 (llm, stage 1, replica 0) is slow" in text
    assert not re.search(r"(?:src|href)=\"(?!data:|#)", text)
    assert "http://" not in text and "https://" not in text and "@@" not in text and 'style="' not in text
    assert "<img src=x" not in text and "step-8 <b>" not in text
    assert text.count("data:image/png;base64,") == 1
    assert text.index('id="verdict"') < text.index('id="timeline"') < text.index('id="predicted"')
    assert text.index('id="predicted"') < text.index('id="operations"') and "transfer_gradient" in text
    data = json.loads(re.search(r'id="data">(.*?)</script>', text, re.S).group(1))
    assert [len(item["lanes"]) for item in data["timelines"]] == [6] * len(data["timelines"])


def test_pages_stay_small_with_64_ranks(tmp_path):
    path = make(tmp_path, synthetic.Synthetic(steps=2, slots=4, dp=31))
    assert path.stat().st_size < 1_500_000


@pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine: the page was not opened in a browser")
def test_page_works_in_a_browser(page, tmp_path):
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    problems: list[str] = []
    with playwright.sync_playwright() as play:
        browser = play.chromium.launch(executable_path=BROWSER, args=ARGUMENTS)
        for scheme in ("light", "dark"):
            tab = browser.new_context(color_scheme=scheme, viewport={"width": 1240, "height": 900}).new_page()
            tab.on(
                "console",
                lambda message: problems.append(message.text) if message.type in ("error", "warning") else None,
            )
            tab.on("pageerror", lambda error: problems.append(str(error)))
            tab.on(
                "request",
                lambda request: (
                    problems.append(request.url) if not request.url.startswith(("file:", "data:")) else None
                ),
            )
            tab.goto(page.as_uri())
            playwright.expect(tab.locator("#verdict h1")).to_be_in_viewport()
            assert "Rank 3" in tab.locator("#verdict h1").inner_text()
            assert tab.locator(".lane").count() == 6
            assert tab.locator("#images img").evaluate("image => image.naturalWidth") == 4

            def view(tab=tab) -> float:
                canvas = tab.locator("#timeline")
                return float(canvas.get_attribute("data-to")) - float(canvas.get_attribute("data-from"))

            def picture(tab=tab) -> str:
                return tab.locator("#timeline").evaluate("canvas => canvas.toDataURL()")

            whole, drawn = view(), picture()
            tab.locator("#zoom-in").click()
            assert view() == pytest.approx(0.6 * whole, rel=1e-3)
            assert picture() != drawn
            tab.locator("#timeline").focus()
            start = tab.locator("#timeline").get_attribute("data-from")
            tab.keyboard.press("ArrowRight")
            assert float(tab.locator("#timeline").get_attribute("data-from")) > float(start)
            tab.keyboard.press("0")
            assert view() == pytest.approx(whole) and picture() == drawn
            if tab.locator("[data-step]").count() > 1:
                tab.locator("[data-step]").nth(1).click()
                assert tab.locator("[data-step]").nth(1).get_attribute("aria-pressed") == "true"
            overflow = tab.evaluate(
                "document.documentElement.scrollWidth - document.documentElement.clientWidth"
            )
            assert overflow <= 0
        assert len(tab.pdf()) > 10_000
        browser.close()
    assert problems == []


def test_chrome_trace(tmp_path, clean):
    database = open_database([clean[0]])
    steps = [step for step, _ in representative_steps(database)]
    out = write_chrome_trace(database, steps[:1], tmp_path / "trace.json")
    events = json.loads(out.read_text())["traceEvents"]
    assert [event["args"]["name"] for event in events if event["ph"] == "M"] == ["encoder", "llm", "generator"]
    rows = [row for row in clean[2].rows if row["step"] == steps[0]]
    drawn = [event for event in events if event["ph"] == "X"]
    assert len(drawn) == len(rows)
    assert sum(event["dur"] for event in drawn) == pytest.approx(
        sum(r["end_ns"] - r["start_ns"] for r in rows) / 1e3
    )


def test_charts_thin_and_survive_odd_input():
    points = [(float(step), 1.0) for step in range(5000)]
    assert len(thin(points)) <= 401 and thin(points)[-1] == points[-1]
    assert line_chart("nothing", [("none", [])]) == ""
    assert "<circle" in line_chart("one <step>", [("a", [(1.0, 2.0)])]) and "<step>" not in line_chart(
        "one <step>", [("a", [(1.0, 2.0)])]
    )
