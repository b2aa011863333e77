"""Cache of functions of a profile that searches evaluate repeatedly."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import lru_cache, wraps
from typing import Any, TypeVar, cast

from disttrain_cli.spec.profile import Profile

Function = TypeVar("Function", bound=Callable[..., Any])
#: Size of a function's cache.
MOST = 2048


class _Same:
    """Profile compared by identity, as comparing by value would be slower than the function."""

    def __init__(self, profile: Profile) -> None:
        self.profile = profile

    def __hash__(self) -> int:
        return id(self.profile)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.profile is self.profile


def memoised(function: Function) -> Function:
    """Cache a pure function of a profile and further arguments, including sequences.

    Results must not be mutated.
    """

    @lru_cache(maxsize=MOST)
    def known(same: _Same, arguments: tuple[Any, ...], named: tuple[tuple[str, Any], ...]) -> Any:
        return function(same.profile, *arguments, **dict(named))

    @wraps(function)
    def answer(profile: Profile, *arguments: Any, **named: Any) -> Any:
        return known(
            _Same(profile),
            tuple(map(_hashable, arguments)),
            tuple((name, _hashable(value)) for name, value in named.items()),
        )

    return cast(Function, answer)


def _hashable(value: Any) -> Hashable:
    return tuple(value) if isinstance(value, list) else cast(Hashable, value)
