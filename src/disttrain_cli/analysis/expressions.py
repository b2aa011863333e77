"""`--fail-if 'slowdown > 1.2'`: one comparison of a number of the analysis with a given one; nothing is evaluated."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from typing import Any

from disttrain_cli.analysis.result import Analysis
from disttrain_cli.errors import ConditionHoldsError, UsageError

_OPERATORS: dict[str, Callable[[float, float], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    "==": operator.eq,
    "!=": operator.ne,
    ">": operator.gt,
    "<": operator.lt,
}
_FORM = re.compile(
    r"\s*([A-Za-z_][\w+.-]*)\s*(>=|<=|==|!=|>|<)\s*([-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)\s*(%?)\s*"
)


def holds(analysis: Analysis, expression: str) -> tuple[bool, str]:
    """Whether `NAME OPERATOR NUMBER` holds, and the sentence that says so.

    NAME is a path of the analysis' JSON (`job.mfu`, `stragglers.lost_s.data`, `units.llm.busy_fraction`) or its
    last part where that is unambiguous among job and stragglers (`slowdown`, `mfu`). `%` divides by 100.

    Raises:
        UsageError: it is no such comparison, or names no number that was measured.
    """
    match = _FORM.fullmatch(expression)
    if match is None:
        raise UsageError(
            f"--fail-if cannot read {expression!r}",
            "it takes NAME OPERATOR NUMBER with one of " + " ".join(_OPERATORS),
            "For example: --fail-if 'slowdown > 1.2'",
        )
    name, comparison, number, percent = match.groups()
    values = numbers(analysis)
    if name not in values:
        near = [known for known in values if name.split(".")[-1] in known][:8] or list(values)[:8]
        raise UsageError(
            f"--fail-if knows no number named {name!r}", "there are, among others: " + ", ".join(near)
        )
    value, limit = values[name], float(number) / (100 if percent else 1)
    result = _OPERATORS[comparison](value, limit)
    return result, f"{name} is {value:.6g}, and {expression.strip()} {'holds' if result else 'does not hold'}"


def fail_if(analysis: Analysis, expression: str) -> None:
    """Raise ConditionHoldsError (exit code 5) where the expression holds; UsageError as `holds`."""
    result, sentence = holds(analysis, expression)
    if result:
        raise ConditionHoldsError(
            f"Condition holds: {sentence}", analysis.verdict.headline, analysis.verdict.advice
        )


def numbers(analysis: Analysis) -> dict[str, float]:
    """Every number of the analysis by its dotted path, those of job and stragglers also by their own name."""
    plain = analysis.to_json()
    found: dict[str, float] = {}

    def walk(value: Any, path: str) -> None:
        if isinstance(value, bool):
            return
        if isinstance(value, (int, float)):
            found[path] = float(value)
        elif isinstance(value, dict):
            for key, item in value.items():
                walk(item, f"{path}.{key}" if path else key)
        elif isinstance(value, list):
            for index, item in enumerate(value):
                key = item.get("name", index) if isinstance(item, dict) and path == "units" else index
                walk(item, f"{path}.{key}")

    walk(plain, "")
    for section in ("stragglers", "job"):
        for key, value in plain[section].items():
            if isinstance(value, (int, float)) and not isinstance(value, bool):
                found.setdefault(key, float(value))
    return found
