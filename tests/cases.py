"""Cases of a table: a few in every run, the others in `make test-all`."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest
from _pytest.mark import ParameterSet


def mostly_slow(names: Collection[str], *fast: str) -> list[ParameterSet]:
    """Return pytest parameters for `names`; all but `fast` are marked slow."""
    assert set(fast) <= set(names)
    return [pytest.param(name, marks=() if name in fast else pytest.mark.slow) for name in names]


def first_fast(cases: Iterable[Any], fast: int = 1) -> list[ParameterSet]:
    """Return pytest parameters for `cases` (values or tuples); all after `fast` are slow."""
    return [
        pytest.param(
            *(case if isinstance(case, tuple) else (case,)),
            marks=() if place < fast else pytest.mark.slow,
        )
        for place, case in enumerate(cases)
    ]
