"""A jinja2 sandbox in which no rendering is endless, whatever the template.

Every item of a loop, call, concatenation and operator is charged to a budget of work, long results
by their length; what would build a huge value in one operation is refused before it is built. The
budget counts operations and not seconds, so that every rank and worker decides alike.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

#: Items of loops, or as much, in one rendering: about ten seconds; 1,000 turns are a thousandth.
MOST_WORK = 10_000_000
CALL = 16  # a call or filter takes as long as so many items
ELEMENTS = 16  # characters or elements of a result that count as one
MOST_BITS = 65_536  # of a power or product
MOST_WIDTH = 10_000  # of a field, an indentation, a batch
#: Methods and filters that take such widths as arguments.
WIDE = frozenset(("ljust", "rjust", "center", "zfill", "expandtabs", "indent", "batch")) | {
    "slice",
    "tojson",
    "round",
}
LONG = (str, list, tuple, bytes)  # values that an operation can make longer
FORMAT_WIDTH = re.compile(r"%[^a-zA-Z%]*\d{5,}|\{[^}]*\d{5,}")  # such a width in a format
WIDTH_BY_ARGUMENT = re.compile(r"\*|:[^{}]*\{")
ITEMS, CONCAT = "charged items", "charged concatenation"  # filters that no template can name


class TooMuchWorkError(TemplateError):
    """A rendering does not end, or not within `MOST_WORK`."""

    def __init__(self) -> None:
        super().__init__("it takes too much work: a loop or recursion without end, or huge values")


class LimitedEnvironment(ImmutableSandboxedEnvironment):
    """The sandbox; `begin` starts the budget of a rendering."""

    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self, **options: Any) -> None:
        self._left = 0
        super().__init__(**options)
        self.finalize = self._weighed
        self.concat = self._concat  # type: ignore[method-assign]
        del self.globals["lipsum"]
        self.filters |= {name: self.charged(name, one) for name, one in self.filters.items()}
        self.filters |= {ITEMS: self._items, CONCAT: self._concat}

    def begin(self) -> None:
        """Start the budget."""
        self._left = MOST_WORK

    def charge(self, result: Any = None, elements: int = 0, work: int = 1) -> Any:
        """Charge work that has a result, or makes so many elements; returns the result.

        Raises:
            TooMuchWorkError: nothing is left.
        """
        if isinstance(result, LONG):
            elements += len(result)
        self._left -= work + elements // ELEMENTS
        if self._left < 0:
            raise TooMuchWorkError
        return result

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "*":
            if isinstance(left, LONG) or isinstance(right, LONG):
                length, times = (left, right) if isinstance(left, LONG) else (right, left)
                self.charge(elements=len(length) * max(0, times))
            elif _bits(left) + _bits(right) > MOST_BITS:
                raise TooMuchWorkError
        elif operator == "**" and _bits(left) * right > MOST_BITS:
            raise TooMuchWorkError
        elif operator == "%" and isinstance(left, str):
            _check_format(left, right if isinstance(right, tuple) else (right,))
        return self.charge(self.binop_table[operator](left, right))

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        text = getattr(getattr(__obj, "__wrapped__", __obj), "__self__", None)  # format is wrapped
        if isinstance(text, str):
            name = __obj.__name__
            if name == "join" and args:
                args = (__self._joined(args[0], text), *args[1:])
            __self._check(name, text, *args, **kwargs)
        __self.charge(work=CALL)
        return __self.charge(super().call(__context, __obj, *args, **kwargs))

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree: nodes.Template = _Charging().visit(super()._parse(source, name, filename))
        return tree

    def charged(self, name: str, apply: Callable[..., Any]) -> Callable[..., Any]:
        """The filter, charged."""
        passed = int(hasattr(apply, "jinja_pass_arg"))  # a context or environment comes first

        @functools.wraps(apply)
        def charged(*args: Any, **kwargs: Any) -> Any:
            before, (value, *rest) = args[:passed], args[passed:]
            if name == "join":
                value = self._joined(value, rest[0] if rest else kwargs.get("d", ""))
            self._check(name, self._weighed(value), *rest, **kwargs)
            return self.charge(apply(*before, value, *rest, **kwargs), work=CALL)

        return charged

    def _check(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        """Charge or refuse arguments of a filter or method by which it makes a huge text."""
        if name in WIDE:
            _check_widths((*args, *kwargs.values()))
        elif name in ("format", "format_map"):
            _check_format(str(value), (*args, *kwargs.values()))
        elif name == "replace" and isinstance(value, str) and len(args) > 1:
            self.charge(elements=value.count(str(args[0])) * len(str(args[1])))

    def _weighed(self, value: Any) -> Any:
        """The value, charged with all that it holds: lists of lists may be short and endless."""
        inside = [value] if isinstance(value, list | tuple | dict) else []
        while inside:
            one = inside.pop()
            self.charge(one)
            held = one.values() if isinstance(one, dict) else one
            inside += [each for each in held if isinstance(each, list | tuple | dict)]
        return value

    def _items(self, items: Iterable[Any]) -> Iterator[Any]:
        for item in items:
            self.charge()
            yield item

    def _joined(self, items: Iterable[Any], separator: Any) -> Iterator[Any]:
        """Items of a join, each charged with its text and the separator."""
        for item in items:
            length = len(item) if isinstance(self._weighed(item), str) else 0
            self.charge(elements=length + len(str(separator)))
            yield item

    def _concat(self, pieces: Iterable[Any]) -> str:
        return "".join(map(str, self._joined(pieces, "")))


class _Charging(NodeTransformer):
    """Puts loops and concatenations through the filters that charge them."""

    def visit_For(self, node: nodes.For) -> nodes.For:
        self.generic_visit(node)
        node.iter = _filtered(node.iter, ITEMS, node)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Filter:
        self.generic_visit(node)
        return _filtered(nodes.List(node.nodes, lineno=node.lineno), CONCAT, node)


def _filtered(value: nodes.Node, name: str, place: nodes.Node) -> nodes.Filter:
    made = nodes.Filter(value, name, [], [], None, None, lineno=place.lineno)
    assert place.environment is not None
    made.set_environment(place.environment)
    return made


def _bits(number: Any) -> int:
    return number.bit_length() if isinstance(number, int) else 0


def _check_widths(arguments: Iterable[Any]) -> None:
    """Raise TooMuchWorkError where an argument is a huge width."""
    if any(isinstance(one, int) and abs(one) > MOST_WIDTH for one in arguments):
        raise TooMuchWorkError


def _check_format(form: str, arguments: Iterable[Any]) -> None:
    """Raise TooMuchWorkError where a format has a huge width, or takes one from its arguments."""
    if FORMAT_WIDTH.search(form):
        raise TooMuchWorkError
    if WIDTH_BY_ARGUMENT.search(form):
        _check_widths(arguments)
