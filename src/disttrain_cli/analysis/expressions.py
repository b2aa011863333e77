"""Conditions of `--fail-if 'slowdown > 1.2 or verdict.cause == data'`, without evaluating any code.

Comparisons read figures and texts of the analysis. `and` binds tighter than `or`, parentheses
group, `not` negates.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping
from typing import Any

from disttrain_cli.analysis.result.summary import Analysis
from disttrain_cli.calls import argument, call
from disttrain_cli.errors import ConditionHoldsError, UsageError

_ORDER: dict[str, Callable[[float, float], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    ">": operator.gt,
    "<": operator.lt,
}
_EQUAL: dict[str, Callable[[Any, Any], bool]] = {"==": operator.eq, "!=": operator.ne}
_TOKEN = re.compile(
    r"""\s*(?:
    (?P<number>[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?(?![\w.])\s*%?)
  | (?P<operator>>=|<=|==|!=|>|<)
  | (?P<mark>[()])
  | (?P<text>'[^']*'|"[^"]*")
  | (?P<word>[A-Za-z_][\w+.-]*)
)""",
    re.VERBOSE,
)
_JOINING = ("and", "or", "not")
#: Maximum nesting of parentheses and `not`.
_DEEPEST = 50

Value = float | str | None
Token = tuple[str, str]  # kind, text


def holds(analysis: Analysis, expression: str) -> tuple[bool, str]:
    """Return True if the condition holds, and the sentence that reports it.

    A comparison is `NAME OPERATOR VALUE`. NAME is a path in the analysis' JSON (`job.mfu`,
    `verdict.cause`, `stragglers.lost_s.data`, `units.llm.busy_fraction`) or its last part if it is
    unambiguous in job and stragglers (`slowdown`, `mfu`). VALUE is a number, of which `%` is a
    hundredth, or a text, with quotes or without. Texts compare by == and != only; null is unequal
    to every text.

    Raises:
        UsageError: the condition cannot be parsed, or names no figure that was measured.
    """
    condition = _Condition(expression, values(analysis))
    result = condition.read()
    return (
        result,
        (
            f"{' and '.join(condition.seen)}, and {expression.strip()}"
            f" {'holds' if result else 'does not hold'}"
        ),
    )


def check(expression: str) -> None:
    """Raise UsageError if the condition cannot be parsed."""
    _Form(expression, {}).read()


def fail_if(analysis: Analysis, expression: str) -> None:
    """Raise ConditionHoldsError (exit code 5) if the expression holds; UsageError as `holds`."""
    result, sentence = holds(analysis, expression)
    if result:
        raise ConditionHoldsError(
            f"Condition holds: {sentence}", analysis.verdict.headline, analysis.verdict.advice
        )


class _Condition:
    """Recursive-descent evaluator of a condition.

    It evaluates both sides of `and` and `or`, so that every error is reported.
    """

    def __init__(self, expression: str, known: Mapping[str, Value]) -> None:
        self._expression, self._known = expression, known
        self._tokens = self._split()
        self._place, self._depth = 0, 0
        self.seen: dict[str, None] = {}  # "NAME is VALUE" of every comparison, once

    def read(self) -> bool:
        result = self._any()
        if self._place < len(self._tokens):
            raise self._unread()
        return result

    def _split(self) -> list[Token]:
        tokens, offset = list[Token](), 0
        text = self._expression.rstrip()
        while offset < len(text):
            match = _TOKEN.match(text, offset)
            if match is None:
                raise self._unread()
            tokens.append((str(match.lastgroup), match[str(match.lastgroup)]))
            offset = match.end()
        return tokens

    def _next(self, *texts: str) -> bool:
        """Consume the next token if it is one of these, unquoted."""
        if self._place < len(self._tokens):
            kind, text = self._tokens[self._place]
            if kind in ("word", "mark") and text in texts:
                self._place += 1
                return True
        return False

    def _any(self) -> bool:
        result = self._all()
        while self._next("or"):
            result = self._all() or result
        return result

    def _all(self) -> bool:
        result = self._one()
        while self._next("and"):
            result = self._one() and result
        return result

    def _one(self) -> bool:
        self._depth += 1
        if self._depth > _DEEPEST:
            raise self._unread()
        if self._next("not"):
            result = not self._one()
        elif self._next("("):
            result = self._any()
            if not self._next(")"):
                raise self._unread()
        else:
            result = self._comparison()
        self._depth -= 1
        return result

    def _comparison(self) -> bool:
        three = self._tokens[self._place : self._place + 3]
        kinds = [kind for kind, _ in three]
        if (
            kinds[:2] != ["word", "operator"]
            or len(three) < 3
            or kinds[2] not in ("number", "text", "word")
            or three[0][1] in _JOINING
            or (kinds[2] == "word" and three[2][1] in _JOINING)
        ):
            raise self._unread()
        self._place += 3
        return self._compared(three[0][1], three[1][1], three[2])

    def _compared(self, name: str, sign: str, right: Token) -> bool:
        value = self._value(name)
        self.seen[
            (
                f"{name} is {value:.6g}"
                if isinstance(value, float)
                else f"{name} is {value or 'not known'}"
            )
        ] = None
        kind, text = right
        if kind == "number" and value is None and name.startswith("verdict.place."):
            return sign == "!="  # the verdict has no such location
        if kind == "number" and value is None:
            raise UsageError(
                f"{argument('condition')} cannot compare {name!r}",
                "it is null: these traces do not contain it",
                f"Figures are in the JSON of {call('analyze')}: `--json`, or `Analysis.to_json()`",
            )
        if kind == "number" and isinstance(value, float):
            limit = float(text.rstrip(" %")) / (100 if text.endswith("%") else 1)
            return (_ORDER | _EQUAL)[sign](value, limit)
        if sign not in _EQUAL or isinstance(value, float) or kind == "number":
            was, asked = ("a number" if isinstance(value, float) else "a text"), f"{sign} {text}"
            raise UsageError(
                f"{argument('condition')} cannot compare {name!r}",
                f"it is {was}: {value}; asked: {asked}",
                "Numbers compare with numbers, texts are == or != a text",
            )
        return _EQUAL[sign](value, text[1:-1] if kind == "text" else text)

    def _value(self, name: str) -> Value:
        if name in self._known:
            return self._known[name]
        near = [known for known in self._known if name.split(".")[-1] in known][:8] or list(
            self._known
        )[:8]
        raise UsageError(
            f"{argument('condition')} has no figure named {name!r}",
            "known names include: " + ", ".join(near),
            f"Figures are in the JSON of {call('analyze')}: `--json`, or `Analysis.to_json()`",
        )

    def _unread(self) -> UsageError:
        return UsageError(
            f"{argument('condition')} cannot read {self._expression!r}",
            "a comparison is NAME OPERATOR VALUE with one of "
            + " ".join(_ORDER | _EQUAL)
            + ", joined by and, or, not, ( )",
            "For example: slowdown > 1.2 or verdict.cause == data",
        )


class _Form(_Condition):
    """Condition that is only parsed, without an analysis."""

    def _compared(self, name: str, sign: str, right: Token) -> bool:
        return False


def values(analysis: Analysis) -> dict[str, Value]:
    """Return every figure, text and null of the analysis by its dotted path.

    Figures of job and stragglers are also there by their last part.
    """
    plain = analysis.to_json()
    result: dict[str, Value] = {}

    def walk(value: Any, path: str) -> None:
        if isinstance(value, dict):
            for key, item in value.items():
                walk(item, f"{path}.{key}" if path else key)
        elif isinstance(value, list):
            for index, item in enumerate(value):
                key = (
                    item.get("name", index) if isinstance(item, dict) and path == "units" else index
                )
                walk(item, f"{path}.{key}")
        elif not isinstance(value, bool):
            result[path] = float(value) if isinstance(value, int) else value

    walk(plain, "")
    for section in ("stragglers", "job"):
        for key in plain[section]:
            if f"{section}.{key}" in result:
                result.setdefault(key, result[f"{section}.{key}"])
    return result
