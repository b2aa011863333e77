"""`--fail-if`: comparisons of measured numbers, and nothing more."""

import pytest

from disttrain_cli.analysis.analyze import analyze
from disttrain_cli.analysis.expressions import fail_if, holds, values
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
        ("verdict.cause == none", True),
        ("verdict.cause != 'none'", False),
        ('verdict.cause == "data" or slowdown > 1.2', False),
        ("verdict.cause == none and slowdown < 1.2", True),
        ("slowdown > 1.2 or job.ranks == 6 and ranks == 7", False),  # and before or
        ("(slowdown > 1.2 or job.ranks == 6) and not ranks == 7", True),
        ("not (slowdown > 1.2 or ranks == 7)", True),
        ("units.llm.name == llm", True),
        ("verdict.place.unit == llm", False),  # null
        ("verdict.place.unit != llm", True),
        ("verdict.place.rank > 2", False),  # null: nowhere
        ("verdict.place.rank != 2", True),
        ("not verdict.place.rank == 2", True),
        ("format == disttrain and(mfu>1%)", True),
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
        "slowdown > mfu",  # a text to it, which is not a number
        "1 < slowdown",
        "slowdown => 1",
        "units.llm.name > 1",
        "units.llm.name < 'm'",
        "slowdown == fast",
        "verdict.cause == 3",
        "slowdown > 1 and",
        "and slowdown > 1",
        "(slowdown > 1",
        "slowdown > 1)",
        "slowdown > 1 slowdown > 2",
        "verdict.cause == or or slowdown > 1",
        "slowdown > 1 or nothing > 2",  # though the first decides
        "slowdown > 1_000",
        "verdict.cause == 'none",
        "slowdown > 1 & ranks > 1",
        "not",
        "(" * 3000 + "slowdown > 1" + ")" * 3000,
        "not " * 3000 + "slowdown > 1",
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
    assert values(analysis)["units.llm.gpus"] == 4.0
    with pytest.raises(
        ConditionHoldsError, match=r"cause is none and slowdown is 1\.0\d+, and verdict"
    ):
        fail_if(analysis, "verdict.cause == none or slowdown > 2")
