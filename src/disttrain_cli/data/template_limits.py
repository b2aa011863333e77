"""A jinja2 sandbox that limits the work of every rendering.

Every item of a loop, call, concatenation and operator is charged to a work budget, long operands
and results by their length, lists and dicts that a template builds by all their contents; an
operation that would build a huge value is refused beforehand. The budget counts operations and not
seconds, so that every rank and worker decides alike.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from string import Formatter
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

#: Items of loops, or equivalent work, in one rendering: about ten seconds; 1,000 turns take a
#: thousandth of it.
MOST_WORK = 10_000_000
CALL = 16  # a call or filter costs as much as this many items
ELEMENTS = 16  # characters or elements of a result that cost as much as one item
MOST_BITS = 1_024  # of a power or product
MOST_WIDTH = 10_000  # of a field, an indentation, a batch
#: Methods and filters with such widths as arguments.
WIDE = frozenset(("ljust", "rjust", "center", "zfill", "expandtabs", "indent", "batch")) | {
    "slice",
    "tojson",
    "round",
}
NESTS = (list, tuple, dict)
NOTHING: dict[str, Any] = {}
VIEWS = (type(NOTHING.keys()), type(NOTHING.values()), type(NOTHING.items()))
#: Values that cost their length.
LONG: tuple[type[Any], ...] = (str, bytes, range, *NESTS, *VIEWS)
QUADRATIC = ("striptags", "urlize")  # filters whose time is quadratic in a text's length
AT_ONCE = ("length", "count", "first", "last", "default", "d")  # take constant time
STRIPS = ("strip", "lstrip", "rstrip", "trim")  # cost: every character times the argument's length
PERCENT_WIDTH = re.compile(r"%[^a-zA-Z%]*(\d{5,}|\*)")  # a huge width, or one by argument
HUGE = re.compile(r"\d{5,}|\{")  # the same in the part of a field after its colon
# Names of filters that no template can write.
ITEMS, CONCAT = "charged items", "charged concatenation"
CONTENTS, LENGTH = "charged contents", "charged length"


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
        self.globals |= {"dict": self._dict, "namespace": _Namespace}
        for name in QUADRATIC:
            del self.filters[name]
        self.filters |= {name: self.charged(name, one) for name, one in self.filters.items()}
        self.filters |= {ITEMS: self._items, CONCAT: self._concat}
        self.filters |= {CONTENTS: self._weighed, LENGTH: self.charge}
        tests: dict[str, Any] = self.tests
        self.tests |= {
            name: self.charged(name, one)
            for name, one in tests.items()
            if one.__module__ == "_operator" or name in ("in", "lower", "upper")
        }

    def begin(self) -> None:
        """Reset the budget."""
        self._left = MOST_WORK

    def charge(self, result: Any = None, elements: int = 0, work: int = 1) -> Any:
        """Charge work that has a result, or makes `elements` elements; return the result.

        Raises:
            TooMuchWorkError: the budget is used up.
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
            _check_percent(left)
            self._formatted(left.count("%"), [right])
        return self.charge(self.binop_table[operator](left, right))

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        owner = getattr(getattr(__obj, "__wrapped__", __obj), "__self__", None)  # format is wrapped
        if isinstance(owner, LONG):
            name = __obj.__name__
            for one in (owner, *args):
                __self.charge(one)
            if name == "join" and args:
                args = (__self._joined(args[0], owner), *args[1:])
            if name in ("format", "format_map"):
                _check_braces(str(owner))
                __self._formatted(str(owner).count("{"), (*args, *kwargs.values()))
            else:
                __self._check(name, owner, *args, **kwargs)
        __self.charge(work=CALL)
        return __self.charge(super().call(__context, __obj, *args, **kwargs))

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree: nodes.Template = _Charging().visit(super()._parse(source, name, filename))
        return tree

    def charged(self, name: str, apply: Callable[..., Any]) -> Callable[..., Any]:
        """Return the filter or test with its work charged."""
        passed = int(hasattr(apply, "jinja_pass_arg"))  # a context or environment comes first

        @functools.wraps(apply)
        def charged(*args: Any, **kwargs: Any) -> Any:
            before, (value, *rest) = args[:passed], args[passed:]
            if name == "join":
                value = self._joined(value, rest[0] if rest else kwargs.get("d", ""))
            for one in rest:
                self.charge(one)
            if name == "format":
                _check_percent(str(value))
                self._formatted(str(value).count("%"), (*rest, *kwargs.values()))
            if name not in AT_ONCE:
                self._check(name, self._weighed(value), *rest, **kwargs)
            return self.charge(apply(*before, value, *rest, **kwargs), work=CALL)

        return charged

    def _check(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        """Charge or refuse the arguments by which a filter or method makes a huge text."""
        if name in WIDE:
            widths = (abs(one) for one in (*args, *kwargs.values()) if isinstance(one, int))
            if (width := max(widths, default=0)) > MOST_WIDTH:
                raise TooMuchWorkError
            self.charge(elements=width * len(value) if isinstance(value, LONG) else 0)
        elif name in STRIPS and isinstance(value, str):
            self.charge(
                elements=len(value) * sum(len(str(one)) for one in (*args, *kwargs.values()))
            )
        elif name == "replace":
            named = (kwargs[key] for key in ("old", "new") if key in kwargs)
            old, new, *_ = map(str, (*args, *named, "", ""))
            self.charge(elements=str(value).count(old) * len(new))

    def _weighed(self, value: Any) -> Any:
        """Charge a value with all its contents, as nested lists may be endless; return it."""
        inside = [value] if isinstance(value, LONG) else []
        while inside:
            one = inside.pop()
            self.charge(one)
            if isinstance(one, NESTS):
                keys = (key for key in one if isinstance(key, tuple))
                held = (*keys, *one.values()) if isinstance(one, dict) else one
                inside += [each for each in held if isinstance(each, LONG)]
        return value

    def _formatted(self, fields: int, values: Iterable[Any]) -> None:
        """Charge a format, each field of which may write all values."""
        before = self._left
        self._weighed([*values])
        self.charge(work=fields * (before - self._left))

    def _dict(self, *args: Any, **kwargs: Any) -> Any:
        return self._weighed(dict(*args, **kwargs))

    def _items(self, items: Iterable[Any]) -> Iterator[Any]:
        for item in items:
            self.charge()
            yield item

    def _joined(self, items: Iterable[Any], separator: Any) -> Iterator[Any]:
        """Yield the items of a join, each charged with its text and the separator."""
        for item in items:
            self._weighed(item)
            self.charge(elements=len(str(separator)))
            yield item

    def _concat(self, pieces: Iterable[Any]) -> str:
        return "".join(map(str, self._joined(pieces, "")))


class _Namespace(Namespace):
    """A namespace whose text leaves out its contents: namespaces may contain each other."""

    __repr__ = object.__repr__


class _Charging(NodeTransformer):
    """Wraps loops, concatenations, comparisons, slices and built lists in charging filters."""

    def visit_For(self, node: nodes.For) -> nodes.For:
        self.generic_visit(node)
        node.iter = _filtered(node.iter, ITEMS, node)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Filter:
        self.generic_visit(node)
        return _filtered(nodes.List(node.nodes, lineno=node.lineno), CONCAT, node)

    def visit_Compare(self, node: nodes.Compare) -> nodes.Compare:
        self.generic_visit(node)
        for operand in node.ops:  # takes time in proportion to the shorter operand
            if operand.op in ("in", "notin") or not _is_constant(node.expr):
                operand.expr = _charged(operand.expr)
        return node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Expr:
        self.generic_visit(node)
        return _filtered(node, LENGTH, node) if isinstance(node.arg, nodes.Slice) else node

    def visit_List(self, node: nodes.List | nodes.Dict) -> nodes.Expr:
        self.generic_visit(node)
        return _charged(node)

    visit_Dict = visit_List

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Expr:
        self.generic_visit(node)
        return _charged(node) if node.ctx == "load" else node


def _is_constant(node: nodes.Node) -> bool:
    """Return True for a literal of the template: it is as long as the template's text."""
    if isinstance(node, nodes.Const | nodes.TemplateData):
        return True
    return isinstance(node, nodes.List | nodes.Tuple | nodes.Dict | nodes.Pair) and all(
        map(_is_constant, node.iter_child_nodes())
    )


def _charged(node: nodes.Expr) -> nodes.Expr:
    return node if _is_constant(node) else _filtered(node, CONTENTS, node)


def _filtered(value: nodes.Node, name: str, place: nodes.Node) -> nodes.Filter:
    filtered = nodes.Filter(value, name, [], [], None, None, lineno=place.lineno)
    assert place.environment is not None
    filtered.set_environment(place.environment)
    return filtered


def _bits(number: Any) -> int:
    return number.bit_length() if isinstance(number, int) else 0


def _check_percent(form: str) -> None:
    """Raise TooMuchWorkError if a `%` format has a huge width, or one by argument."""
    if PERCENT_WIDTH.search(form):
        raise TooMuchWorkError


def _check_braces(form: str) -> None:
    """Raise TooMuchWorkError if a brace format has a huge width, or one by argument."""
    with suppress(ValueError):  # formatting raises the same error
        for _, _, width, _ in Formatter().parse(form):
            if width and HUGE.search(width):
                raise TooMuchWorkError
