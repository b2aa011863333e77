"""Figures of `disttrain analyze` in words: no exponents where people read, no percentages of
nothing."""

import pytest

from disttrain_cli.analysis.kineto.unknown import of_step
from disttrain_cli.commands.analyze_tables import change, figure


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (None, "–"),
        (3, "3"),
        ("x", "x"),
        (0.5, "0.5"),
        (12900.0, "12900"),
        (-123456.7, "-123457"),
        (1234.5678, "1235"),
        (1e300, "1e+300"),
        (1.25e-7, "1.25e-07"),
    ],
)
def test_a_figure_has_the_digits_that_matter(value, shown):
    assert figure(value) == shown


@pytest.mark.parametrize(
    ("pct", "shown"),
    [
        (None, "–"),
        (-3.14159, "-3.1 %"),
        (999.0, "+999.0 %"),
        (2900.0, "30 ×"),
        (1484863671474.0, "14848636716 ×"),
    ],
)
def test_a_change_is_a_percentage_or_a_factor(pct, shown):
    assert change(pct) == shown


def test_a_time_of_a_step_has_the_unit_that_fits():
    assert of_step(12.9, 80.0, True) == "12.9 s of the 80 s of a step (16 %)"
    assert (
        of_step(0.000152, 0.0102, False)
        == "152 µs of the 10.2 ms from the first kernel to the last (1 %)"
    )
