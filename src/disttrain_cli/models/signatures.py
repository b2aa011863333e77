"""Operators on the meta device, run once for each signature.

Much of what runs on the meta device are shape functions in Python, which cost more than all else of
a recorded layer, and a layer is recorded many times: trained, frozen, recomputed, with its messages
overlapped or not. An operator whose function and arguments have been seen (tensors by their sizes,
strides, types and shared storages, everything else by value) is not run again where it made tensors
of its own, and nothing is counted twice.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils._python_dispatch import TorchDispatchMode

_TENSORS = (Tensor, Parameter)
_LISTS = (tuple, list, torch.Size)
#: Tensors of the host that are told apart by their values: starts of segments, orders of rows.
_WHOLE, _MOST = (torch.int32, torch.int64), 1 << 14
_VALUES = (
    int,
    float,
    bool,
    str,
    type(None),
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
)


class _Empty(NamedTuple):
    """A tensor that an operator makes, alone in its storage."""

    size: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype


class _Argument(NamedTuple):
    """A tensor that an operator returns as it was given."""

    number: int


class _Known(NamedTuple):
    """Results of a signature, None where they are views; and what each kind of mode counts of
    it."""

    results: Any
    facts: dict[type, Any]


_known: dict[tuple[Any, ...], _Known] = {}
_times = 1  # how often what runs counts

StepT = TypeVar("StepT")


def steps_of(loop: Sequence[StepT], like: Tensor) -> Iterator[StepT]:
    """Steps of a loop whose operators have the same signatures in all but the last: on the meta
    device the second one, which still holds what the first made, counts for all up to there."""
    global _times
    if not like.is_meta or len(loop) < 4:
        yield from loop
        return
    yield loop[0]
    try:
        _times *= len(loop) - 2
        yield loop[1]
    finally:
        _times //= len(loop) - 2
    yield loop[-1]


class SignatureMode(TorchDispatchMode):
    """Runs each signature once of the operators that run while it is active. Kinds of it see all of
    them, and count each signature once."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # it is never compiled, and the guard against that takes seconds to import

    def count(
        self, func: Any, args: Any, kwargs: dict[str, Any], result: Any, new: list[Tensor]
    ) -> Any:
        """Return facts about an operator that depend on its signature alone."""

    def note(self, facts: Any, times: int, results: list[Tensor], new: list[Tensor]) -> None:
        """Take in an operator that ran on the meta device, and stands for as many.

        Args:
            facts: as `count` returned them, None of a view.
            new: those of its results that are no views of its arguments, none of an operator that
                copies from the host.
        """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.is_view:
            result = func(*args, **kwargs)
            self.note(None, _times, list(_tensors(result)), [])
            return result
        given: list[Tensor] = []
        key = _signature(func, args, kwargs, given)
        known = _known.get(key) if key is not None else None
        if known is None or known.results is None:
            result = func(*args, **kwargs)
        else:
            result = _made(known.results, given)
        results = list(_tensors(result))
        if not any(one.is_meta for one in (*given, *results)):
            return result
        from_host = given and not any(one.is_meta for one in given)
        before = {one.untyped_storage()._cdata for one in given}
        new = [
            one for one in results if not from_host and one.untyped_storage()._cdata not in before
        ]
        if key is not None and known is None and key == _signature(func, args, kwargs, []):
            known = _known[key] = _Known(_template(result, given, results, new), {})
        facts = {} if known is None else known.facts
        if type(self) not in facts:
            facts[type(self)] = self.count(func, args, kwargs, result, new)
        self.note(facts[type(self)], _times, results, new)
        return result


def _signature(
    func: Any, args: Any, kwargs: dict[str, Any], given: list[Tensor]
) -> tuple[Any, ...] | None:
    """Return what an operator's results depend on; None if that is more than can be compared.

    Args:
        given: is filled with the tensors among the arguments.
    """
    key: list[Any] = [func, torch.get_default_dtype()]
    storages: dict[int, int] = {}
    comparable = [_add(value, key, storages, given) for value in args]
    for name, value in kwargs.items():
        key.append(name)
        comparable.append(_add(value, key, storages, given))
    return tuple(key) if all(comparable) else None


def _add(value: Any, key: list[Any], storages: dict[int, int], given: list[Tensor]) -> bool:
    """Add an argument to a signature; False if it cannot be compared. Not a closure that calls
    itself: such a cycle would keep tensors alive."""
    kind = type(value)
    if kind in _TENSORS:
        given.append(value)
        storage = value.untyped_storage()
        key += (
            value.shape,
            value.stride(),
            value.dtype,
            storages.setdefault(storage._cdata, len(storages)),
            storage.nbytes(),
        )
        if value.dtype in _WHOLE and value.is_cpu and value.numel() <= _MOST:
            key.append(value.numpy().tobytes())
            return True
        return value.is_meta and not value.dtype.is_complex
    if kind in _LISTS:
        key.append((kind, len(value)))
        comparable = [_add(one, key, storages, given) for one in value]
        return all(comparable)
    key.append((kind, value))
    return kind in _VALUES


def _template(result: Any, given: list[Tensor], results: list[Tensor], new: list[Tensor]) -> Any:
    """Return what `_made` makes an equal result of; None where it cannot."""
    storages = {one.untyped_storage()._cdata for one in new}
    if len(storages) < len(new) or not all(one.is_meta for one in results):
        return None

    template = _described(result, given)
    for one, like in zip(_tensors(_made(template, given)), results, strict=True):
        view = one is not like and like.untyped_storage()._cdata not in storages
        if view or one.untyped_storage().nbytes() != like.untyped_storage().nbytes():
            return None
    return template


def _described(result: Any, given: list[Tensor]) -> Any:
    if type(result) in _LISTS:
        return type(result)(_described(value, given) for value in result)
    if not isinstance(result, Tensor):
        return result
    for index, one in enumerate(given):
        if one is result:
            return _Argument(index)
    return _Empty(result.shape, result.stride(), result.dtype)


def _made(template: Any, given: list[Tensor]) -> Any:
    kind = type(template)
    if kind is _Empty:
        return torch.empty_strided(
            template.size, template.stride, dtype=template.dtype, device="meta"
        )
    if kind is _Argument:
        return given[template.number]
    if kind in _LISTS:
        return kind(_made(one, given) for one in template)
    return template


def _tensors(result: Any) -> Iterator[Tensor]:
    if isinstance(result, Tensor):
        yield result
    elif isinstance(result, (tuple, list)):
        for one in result:
            yield from _tensors(one)
