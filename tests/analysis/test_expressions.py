"""`--fail-if`: comparisons of measured numbers, and nothing more."""

from __future__ import annotations

import pytest

from disttrain_cli.analysis.analyze import analyze
from disttrain_cli.analysis.expressions import fail_if, holds, numbers
from disttrain_cli.errors import ConditionHoldsError, UsageError


@pytest.fixture(scope="module")
def analysis(clean):
    return analyze([clean[0]])


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("slowdown > 1.2", False),
        ("slowdown < 1.2", True),
        ("stragglers.slowdown>=1", True),
        ("job.ranks == 6", True),
        ("ranks != 6", False),
        ("units.llm.busy_fraction > 10 %", True),
        ("bubble_fraction <= .01", False),
        ("stragglers.lost_s.data < 1e-1", True),
        ("mfu > 1.5e1%", True),
    ],
)
def test_comparisons(analysis, expression, expected):
    assert holds(analysis, expression)[0] is expected


@pytest.mark.parametrize(
    "expression",
    [
        "",
        "slowdown",
        "slowdown > ",
        "nothing > 1",
        "slowdown > 1 or 1",
        "__import__('os') > 1",
        "slowdown > mfu",
        "1 < slowdown",
        "slowdown => 1",
        "units.llm.name > 1",
    ],
)
def test_anything_else_is_a_usage_error(analysis, expression):
    with pytest.raises(UsageError):
        holds(analysis, expression)


def test_fail_if(analysis):
    fail_if(analysis, "slowdown > 1.2")
    with pytest.raises(ConditionHoldsError, match=r"slowdown is 1\.0") as error:
        fail_if(analysis, "slowdown < 1.2")
    assert error.value.exit_code == 5
    assert numbers(analysis)["units.llm.gpus"] == 4.0
