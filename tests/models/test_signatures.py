"""Operators on the meta device: run once for each signature, with the results that they would have;
loops whose steps are alike."""

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

from disttrain_cli.models.signatures import SignatureMode, steps_of

STARTS = torch.tensor([0, 1, 3], dtype=torch.int64)


class Counted(SignatureMode):
    """How many signatures were counted, and operators seen."""

    def __init__(self) -> None:
        super().__init__()
        self.counted, self.seen = 0, 0

    def count(self, *operator: Any) -> str:
        self.counted += 1
        return "counted"

    def note(self, facts: Any, times: int, results: list[Tensor], new: list[Tensor]) -> None:
        self.seen += times * (facts is not None)


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def described(value: Any) -> Any:
    """Everything about tensors but their numbers."""
    if not isinstance(value, Tensor):
        return [described(one) for one in value] if isinstance(value, (tuple, list)) else value
    return value.shape, value.stride(), value.dtype, value.untyped_storage().nbytes()


@pytest.mark.parametrize(
    ("operator", "arguments", "again"),
    [
        (torch.add, (meta(3, 4), meta(4)), True),
        (torch.mul, (meta(3, 4), 2.0), True),
        (torch.mm, (meta(3, 4).t(), meta(3, 5)), True),
        (torch.var_mean, (meta(3, 4), 1), True),
        (torch.Tensor.add_, (meta(3, 4), 1), True),
        (torch.topk, (meta(3, 4), 2), True),
        (torch.repeat_interleave, (meta(3, dtype=torch.int64), 2), True),
        (torch.Tensor.to, (STARTS, "meta"), True),  # the host's numbers are part of a signature
        (torch.Tensor.resize_, (meta(3, 4), (2, 2)), False),  # changes what it is given
        (torch.mul, (meta(3, dtype=torch.complex64), 2.0), False),  # not compared
    ],
)
def test_results_are_those_of_the_operator_itself(
    operator: Any, arguments: Any, again: bool
) -> None:
    def fresh() -> list[Any]:
        return [
            value.detach().clone() if isinstance(value, Tensor) and value.is_contiguous() else value
            for value in arguments
        ]

    expected = operator(*fresh())
    with Counted() as mode:
        for _ in range(3):
            given = fresh()
            made = operator(*given)
            assert described(made) == described(expected)
            assert (made is given[0]) == operator.__name__.endswith("_")
    assert mode.counted <= mode.seen
    with Counted() as other:
        operator(*given)
    assert not again or other.counted < mode.counted or mode.counted == 0


def test_arguments_that_share_memory_or_differ_in_value_are_other_signatures() -> None:
    x, y = meta(8), meta(8)
    cases = [(x, x), (x, y), (x[:4], x[4:]), (x[:4], y[:4]), (x.bool(), x), (x.double(), x)]
    with Counted() as mode:
        for one, other in cases:
            one.add(other) if one.dtype != torch.bool else one.logical_and(other)
    assert mode.counted >= len(cases)
    with Counted() as host:
        for starts in ([0, 1], [0, 2], [0, 1]):
            torch.tensor(starts).to("meta")
    assert host.seen == 3 and host.counted <= 2


def test_nothing_stays_alive_and_views_are_real() -> None:
    x = meta(4, 4)
    with SignatureMode():
        made = [x.mul(2.0) for _ in range(3)]
        addresses = {one.untyped_storage()._cdata for one in made}
        assert len(addresses) == 3
        assert x.t().untyped_storage()._cdata == x.untyped_storage()._cdata
        gone = [weakref.ref(one.untyped_storage()) for one in made]
        del made
    assert all(one() is None for one in gone)


@pytest.mark.parametrize("count", [1, 3, 4, 100])
def test_steps_that_are_alike_are_run_once_and_count_as_often(count: int) -> None:
    steps, like = list(range(count)), meta(1)
    with Counted() as mode:
        ran = []
        for step in steps_of(steps, like):
            ran.append(step)
            like.exp().log()
    assert mode.seen == 2 * count and len(ran) == min(count, 3)
    assert list(steps_of(steps, torch.empty(1))) == steps
