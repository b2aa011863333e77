"""Charts as SVG text: thinned, escaped, with figures that can be read."""

import itertools
import re

import pytest

from disttrain_cli.analysis.report.charts import (
    line_chart,
    log_ticks,
    round_ticks,
    stacked_rows,
    thin,
    waterfall,
)
from disttrain_cli.analysis.report.heat import MOST_REPLICAS, heat_maps
from disttrain_cli.analysis.report.words import card, figure, prose, seconds


def test_charts_thin_and_survive_odd_input():
    points = [(float(step), 1.0) for step in range(5000)]
    assert len(thin(points)) <= 401 and thin(points)[-1] == points[-1]
    assert line_chart("nothing", [("none", [])]) == ""
    assert "<circle" in line_chart("one <step>", [("a", [(1.0, 2.0)])])
    assert "<step>" not in line_chart("one <step>", [("a", [(1.0, 2.0)])])
    assert "expected" in line_chart("with a plan", [("a", [(1.0, 2.0)])], expected=3.0)


def test_axes_have_round_ticks():
    assert round_ticks(0.0, 5.66) == [0, 2, 4, 6]
    assert round_ticks(0.0, 0.0021) == [0, 0.0005, 0.001, 0.0015, 0.002, 0.0025]
    assert round_ticks(0, 359) == [0, 100, 200, 300, 400]
    assert round_ticks(3.0, 3.0) == [3, 3.2, 3.4, 3.6, 3.8, 4]
    assert log_ticks(0.3, 5.6) == [0.2, 0.5, 1, 2, 5, 10]
    assert log_ticks(0.0008, 5.6) == [0.0001, 0.001, 0.01, 0.1, 1, 10]
    falling = [(float(step), 10.0 ** (1 - step)) for step in range(4)]
    ends = [
        [float(y) for _, y in re.findall(r"([\d.]+),([\d.]+)", line)]
        for line in re.findall(
            r'points="([^"]+)"',
            line_chart("x", [("a", falling)], log=True) + line_chart("x", [("a", falling)]),
        )
    ]
    log, plain = ([second - first for first, second in itertools.pairwise(ys)] for ys in ends)
    assert log == pytest.approx([log[0]] * 3, abs=0.2) and plain[0] > 5 * plain[1]


def test_a_waterfall_begins_each_bar_where_the_last_ended():
    parts = [
        ("total", "ideal", 1.0),
        ("lost", "a", 0.5),
        ("gain", "b", -0.25),
        ("total", "whole", 1.25),
    ]
    drawn = waterfall(parts, "x")
    bars = [
        (kind, float(x), float(width))
        for kind, x, width in re.findall(
            r'<rect class="(\w+)" x="([\d.]+)" y="0" width="([\d.]+)"', drawn
        )
    ]
    (_, zero, ideal), (_, at, lost), (_, back, gain), (_, start, whole) = bars
    assert at == pytest.approx(zero + ideal, abs=0.2) and start == zero
    assert lost == pytest.approx(ideal / 2, abs=0.2) and gain == pytest.approx(ideal / 4, abs=0.2)
    assert back == pytest.approx(at + lost - gain, abs=0.2) and whole == pytest.approx(
        1.25 * ideal, abs=0.3
    )


def test_bars_stretch_with_the_page_and_names_are_text():
    """On a phone every bar is seen whole, so that lengths compare."""
    drawn = stacked_rows(
        [("rank <0>", [("compute", 3.0), ("idle", 1.0)]), ("rank 1", [("compute", 2.0)])], "x"
    )
    assert "<span>rank &lt;0&gt;</span>" in drawn and 'width="660"' not in drawn
    spans = [
        (float(x), float(width))
        for x, width in re.findall(r' x="([\d.]+)" y="0" width="([\d.]+)"', drawn)
    ]
    assert spans == [(0, 750), (750, 250), (0, 500)] and drawn.count('viewBox="0 0 1000 10"') == 2


def test_bars_of_nothing_have_no_length():
    assert 'width="0.00"' in stacked_rows([("a", [("compute", 0.0)])], "x")


def test_heatmaps_show_the_replicas_furthest_from_the_mean():
    cells = [
        {
            "unit": "llm",
            "stage": 0,
            "depth": 1,
            "replica": replica,
            "mean_ms": 10.0,
            "ratio": 2.0 if replica == 700 else 1.0,
            "normalised": None,
        }
        for replica in range(900)
    ]
    drawn = heat_maps(cells)
    assert (
        drawn.count("<title>") == MOST_REPLICAS
        and "replica 700: 10 ms, 200.0 % of the mean" in drawn
    )
    # without a profile there is no second map
    assert drawn.count("<svg") == 1 and heat_maps([]) == ""


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (1234.5, "1,234"),
        (999.7, "1,000"),
        (0.01234, "0.0123"),
        (None, "–"),
        (12.0, "12"),
    ],
)
def test_figures(value, text):
    assert figure(value) == text


def test_a_card_folds_the_rows_after_the_first():
    columns = [("Name", lambda row: row), ("Length", lambda row: str(len(row)))]
    shown, folded = card("Words", "", ["a", "bb", "ccc"], columns, shown=1).split("<details>")
    assert '<th scope="row">a</th><td>1</td>' in shown and shown.count("<tr>") == 2
    assert "2 more" in folded and folded.count("<tr>") == 3
    assert "<details>" not in card("Words", "", ["a"], columns, shown=1)
    assert card("Words", "", [], columns) == ""


def test_durations_and_prose():
    assert [seconds(value) for value in (0.9999, 999.6e-6, 999.4e-6)] == ["1 s", "1 ms", "999 µs"]
    assert [seconds(value) for value in (1.5, 0.0015, 1.5e-6, 0.0)] == [
        "1.5 s",
        "1.5 ms",
        "1.5 µs",
        "0",
    ]
    assert prose("5 s of <b>") == "5\u00a0s of &lt;b&gt;"
