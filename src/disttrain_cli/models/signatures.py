"""Memoisation of operators on the meta device: each signature runs once.

Many meta kernels are shape functions in Python, which cost more than everything else in recording a
layer, and a layer is recorded many times: trained, frozen, recomputed, with its messages overlapped
or not. An operator whose function and arguments have occurred before (tensors compared by sizes,
strides, dtypes and shared storages, everything else by value) is not run again if its results were
new tensors, and its counts are reused.
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
#: Host tensors that are compared by value: starts of segments, orders of rows; and their largest
#: size.
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
    """New tensor in an operator's results, the only one in its storage."""

    size: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype


class _Argument(NamedTuple):
    """Argument that an operator returns unchanged."""

    number: int


class _Known(NamedTuple):
    """Memoised results of a signature, None if they are views; and each kind of mode's counts."""

    results: Any
    facts: dict[type, Any]


_known: dict[tuple[Any, ...], _Known] = {}
_times = 1  # multiplicity of the operators that run now

StepT = TypeVar("StepT")


def steps_of(loop: Sequence[StepT], like: Tensor) -> Iterator[StepT]:
    """Yield the steps of a loop; on the meta device only the first, the second and the last.

    All steps but the last must have operators of equal signatures. The second step, during which
    the first one's tensors are still alive, counts for all up to the last.
    """
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
    """Dispatch mode that runs each operator signature once while it is active.

    Subclasses see every operator, and count each signature once.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # never compiled, and the guard against that takes seconds to import

    def count(
        self, func: Any, args: Any, kwargs: dict[str, Any], result: Any, new: list[Tensor]
    ) -> Any:
        """Return facts about an operator that depend on its signature alone."""

    def note(self, facts: Any, times: int, results: list[Tensor], new: list[Tensor]) -> None:
        """Record an operator on the meta device, with its multiplicity.

        Args:
            facts: result of `count`; None for a view.
            times: number of executions that it represents.
            results: all result tensors.
            new: those that are no views of its arguments; empty for a copy from the host.
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
    """Return the key that determines an operator's results; None if it cannot be compared.

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
    """Add an argument to a signature; return False if it cannot be compared.

    Not a recursive closure: such a reference cycle would keep tensors alive.
    """
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
    """Return a template from which `_made` builds an equal result; None if it cannot."""
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
