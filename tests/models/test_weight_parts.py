"""Backwards in two parts against whole ones, bit for bit."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from disttrain_cli.models.division import WithoutBias
from disttrain_cli.models.weight_parts import add_weight_gradients, deferred, split


def _linear(kind: type[nn.Linear] = nn.Linear, bias: bool = True) -> nn.Module:
    return nn.Sequential(kind(6, 5, bias), nn.LayerNorm(5), nn.GELU(), nn.Linear(5, 3))


def _convolution() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, stride=2, padding=1),
        nn.GroupNorm(2, 4),
        nn.Conv2d(4, 4, 3, padding=1, groups=2, bias=False),
    )


CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear": (_linear, (2, 7, 6)),
    "no bias": (lambda: _linear(bias=False), (7, 6)),
    "without bias": (lambda: _linear(WithoutBias), (2, 3, 6)),
    "convolution": (_convolution, (3, 2, 8, 8)),
    "one dimension": (lambda: nn.Sequential(nn.Conv1d(2, 4, 3, dilation=2)), (3, 2, 8)),
    "as large as before": (
        lambda: nn.Sequential(nn.Conv2d(2, 4, 3, padding="same")),
        (3, 2, 8, 8),
    ),
    "mirrored edges": (
        lambda: nn.Sequential(nn.Conv2d(2, 4, 3, padding=1, padding_mode="reflect")),
        (3, 2, 8, 8),
    ),
}


def _gradients(layer: nn.Module, slots: list[Tensor], later: bool) -> dict[str, Any]:
    """Of two slots: both backwards first, then both weights' parts."""
    parts: list[list[Any]] = [[] for _ in slots]
    inputs = [slot.clone().requires_grad_() for slot in slots]
    for number, given in enumerate(inputs):
        loss = layer(given).square().sum()
        if later:
            with deferred(parts[number]):
                loss.backward()
        else:
            loss.backward()
    early = [name for name, weight in layer.named_parameters() if weight.grad is not None]
    for part in parts:
        add_weight_gradients(part)
        assert not part
    found = {name: weight.grad for name, weight in layer.named_parameters()}
    return found | {"inputs": [given.grad for given in inputs], "early": early}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_two_parts_are_one_backward(name: str, dtype: torch.dtype) -> None:
    make, shape = CASES[name]
    torch.manual_seed(3)
    whole = make().to(dtype)
    parted = copy.deepcopy(whole)
    split(parted)
    slots = [torch.randn(shape, dtype=dtype) for _ in range(2)]
    expected, found = _gradients(whole, slots, False), _gradients(parted, slots, True)
    for key, gradient in expected.items():
        if key == "inputs":
            assert all(torch.equal(a, b) for a, b in zip(gradient, found[key], strict=True))
        elif key != "early":
            assert (gradient is None) == (found[key] is None), key
            assert gradient is None or torch.equal(gradient, found[key]), key
    kinds = (nn.Linear, nn.Conv1d, nn.Conv2d)
    if name not in ("mirrored edges", "as large as before"):
        later = {f"{path}.weight" for path, m in whole.named_modules() if isinstance(m, kinds)}
        assert set(expected["early"]) - set(found["early"]) == later


def test_hooks_on_weights_run_once_per_slot_and_only_later() -> None:
    layer, seen = nn.Sequential(nn.Linear(3, 2, bias=False)), list[str]()
    split(layer)
    weight = layer[0].weight
    weight.register_hook(lambda gradient: seen.append("gradient") or gradient * 2)

    def take(given: Tensor) -> None:
        seen.append("taken")
        given.grad = None

    weight.register_post_accumulate_grad_hook(take)
    parts: list[Any] = []
    with deferred(parts):
        layer(torch.ones(4, 3)).sum().backward()
    assert not seen and len(parts) == 1
    add_weight_gradients(parts)
    assert seen == ["gradient", "taken"] and weight.grad is None


def test_frozen_weights_have_no_part_and_stay_as_they_are() -> None:
    layer = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2)).requires_grad_(False)
    layer[1].requires_grad_(True)
    split(layer)
    assert type(layer[0]) is nn.Linear and type(layer[1]) is not nn.Linear
    parts: list[Any] = []
    with deferred(parts):
        layer(torch.ones(4, 3)).sum().backward()
    assert len(parts) == 1


def test_outside_of_deferred_the_backward_is_whole() -> None:
    layer = nn.Sequential(nn.Linear(3, 2))
    split(layer)
    layer(torch.ones(4, 3)).sum().backward()
    assert torch.equal(layer[0].weight.grad, torch.full((2, 3), 4.0))
