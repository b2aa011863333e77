"""The report page in a headless browser: alive, zooming, usable by keyboard, printable, and talking
to nobody."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.analysis import synthetic
from tests.analysis.report.pages import ARGUMENTS, ATTACK, BROWSER, Tab, make

pytestmark = pytest.mark.skipif(
    BROWSER is None, reason="no Chromium on this machine: the page was not opened in a browser"
)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with playwright.sync_playwright() as play:
        started = play.chromium.launch(executable_path=BROWSER, args=ARGUMENTS)
        yield started
        started.close()


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(
        tmp_path_factory.mktemp("report"), synthetic.Synthetic(slow_rank={3: 1.6}, run=ATTACK)
    )


def test_the_verdict_is_seen_first_and_the_timeline_zooms(browser, page):
    opened = Tab(browser, page)
    tab = opened.tab
    heading = tab.locator("#verdict h1")
    assert "Rank 3" in heading.inner_text() and heading.bounding_box()["y"] < 300
    assert tab.locator(".lane").count() == 6
    assert tab.locator("#images img").evaluate("image => image.naturalWidth") == 4
    (start, end), drawn = opened.view(), opened.picture()
    tab.locator("#zoom-in").click()
    inner = opened.view()
    assert (
        inner[1] - inner[0] == pytest.approx(0.6 * (end - start), rel=1e-3)
        and opened.picture() != drawn
    )
    tab.locator("#zoom-all").click()
    assert opened.view() == (start, end) and opened.picture() == drawn
    tab.locator("[data-step]").nth(1).click()
    assert tab.locator("[data-step]").nth(1).get_attribute("aria-pressed") == "true"
    assert opened.problems == []


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_timeline_by_mouse(browser, page, scheme):
    opened = Tab(browser, page, scheme)
    tab = opened.tab
    canvas = tab.locator("#timeline")
    canvas.scroll_into_view_if_needed()
    box, (start, end) = canvas.bounding_box(), opened.view()
    middle, y = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
    tab.mouse.move(middle, y)
    tab.keyboard.down("Control")
    tab.mouse.wheel(0, -400)
    tab.keyboard.up("Control")
    tab.wait_for_function(f"document.getElementById('timeline').dataset.to < {end}")
    left, right = opened.view()
    assert left == pytest.approx(
        start + (right - left) * 0.5 / (right - left) * (end - start) - (right - left) / 2, rel=0.05
    )  # around the pointer
    tab.mouse.down()
    tab.mouse.move(middle - 100, y, steps=4)
    tab.mouse.up()
    assert opened.view()[0] > left
    tab.locator("#zoom-all").click()
    tab.keyboard.down("Shift")
    tab.mouse.move(box["x"] + 0.25 * box["width"], y)
    tab.mouse.down()
    tab.mouse.move(box["x"] + 0.5 * box["width"], y, steps=4)
    tab.mouse.up()
    tab.keyboard.up("Shift")
    assert opened.view() == pytest.approx((0.25 * end, 0.5 * end), rel=0.02)
    tab.locator("#zoom-all").click()
    tab.mouse.move(box["x"] + 0.3 * box["width"], box["y"] + 24 + 2.5 * 24)
    assert not tab.locator("#tip").is_hidden() and "rank 2" in tab.locator("#tip").inner_text()
    assert opened.problems == []


@pytest.mark.slow
def test_the_page_by_keyboard(browser, page):
    opened = Tab(browser, page)
    tab = opened.tab
    tab.keyboard.press("Tab")
    assert tab.evaluate("document.activeElement.className") == "skip"
    seen = []
    for _ in range(40):
        tab.keyboard.press("Tab")
        seen.append(tab.evaluate("document.activeElement.id || document.activeElement.tagName"))
    # in the order of the page
    assert seen.index("zoom-in") < seen.index("timeline") < seen.index("SUMMARY")
    tab.locator("#timeline").focus()
    whole = opened.view()
    tab.keyboard.press("+")
    tab.keyboard.press("ArrowRight")
    assert opened.view()[0] > 0 and opened.view()[1] - opened.view()[0] < whole[1]
    tab.keyboard.press("0")
    assert opened.view() == whole
    tab.keyboard.press("ArrowDown")
    tab.keyboard.press("n")
    said = tab.locator("#said").inner_text()
    assert "rank 1" in said and tab.locator("#tip").is_visible()
    tab.keyboard.press("n")
    assert tab.locator("#said").inner_text() != said
    tab.keyboard.press("Escape")
    assert tab.locator("#tip").is_hidden()
    assert tab.evaluate(
        "[...document.querySelectorAll('svg')].every(s => s.ariaLabel || s.ariaHidden)"
    )
    assert tab.evaluate("[...document.querySelectorAll('th')].every(h => h.scope)")
    assert opened.problems == []


@pytest.mark.slow
def test_the_page_prints_whatever_its_colours(browser, page, tmp_path):
    opened = Tab(browser, page, "dark")
    tab = opened.tab
    dark = tab.evaluate("getComputedStyle(document.body).backgroundColor")
    tab.emulate_media(media="print", color_scheme="dark")
    assert (
        tab.evaluate("getComputedStyle(document.body).backgroundColor")
        == "rgb(255, 255, 255)"
        != dark
    )
    tab.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert tab.evaluate("[...document.querySelectorAll('details')].every(fold => fold.open)")
    tab.evaluate("dispatchEvent(new Event('afterprint'))")
    assert not tab.evaluate("[...document.querySelectorAll('details')].some(fold => fold.open)")
    assert len(tab.pdf()) > 20_000
    assert opened.problems == []


@pytest.mark.slow
@pytest.mark.parametrize("width", [390, 1240])
def test_no_width_needs_scrolling_sideways(browser, page, width):
    opened = Tab(browser, page)
    opened.tab.set_viewport_size({"width": width, "height": 800})
    assert (
        opened.tab.evaluate(
            "document.documentElement.scrollWidth - document.documentElement.clientWidth"
        )
        <= 0
    )


@pytest.mark.slow
def test_64_ranks_are_drawn_without_a_pause(browser, tmp_path):
    opened = Tab(browser, make(tmp_path, synthetic.Synthetic(steps=3, slots=16, dp=31)))
    assert opened.tab.locator(".lane").count() == 64
    count = opened.tab.evaluate(
        "JSON.parse(document.getElementById('data').textContent).timelines[0].bars.lane.length"
    )
    assert count > 5000
    drawn = opened.picture()
    for _ in range(5):
        opened.tab.locator("#zoom-in").click()
    assert opened.picture() != drawn and opened.problems == []
