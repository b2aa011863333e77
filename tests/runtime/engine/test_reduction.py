"""In which order groups of gradients are reduced, and when; and when layers wait for gathered
weights."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from disttrain_cli.runtime.engine import partitions, reduction
from disttrain_cli.runtime.engine.partitions import Gathering, Partition
from disttrain_cli.runtime.engine.reduction import Reduction

REPLICAS = cast(dist.ProcessGroup, object())


class World:
    """Collectives in the place of torch's: noted as they begin and are waited for; a sum over two
    replicas alike, and gathered ones when they are waited for."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.waited: list[str] = []

    def all_reduce(self, tensor: Tensor, group: Any, async_op: bool) -> Any:
        assert group is REPLICAS and async_op
        tensor *= 2.0
        return self._work(f"{len(tensor)}", lambda: None)

    def reduce_scatter(self, own: Tensor, whole: Tensor, group: Any, begin: bool) -> Any:
        assert group is REPLICAS and begin
        own.copy_(2.0 * own)
        return self._work(f"{len(whole)}", lambda: None)

    def all_gather(self, whole: Tensor, own: Tensor, group: Any, begin: bool) -> Any:
        assert group is REPLICAS and begin
        return self._work(f"{len(whole)}", lambda: whole.fill_(float(own[0])))

    def _work(self, name: str, does: Any) -> Any:
        self.begun.append(name)

        def wait() -> None:
            self.waited.append(name)
            does()

        return SimpleNamespace(wait=wait)


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    made = World()
    monkeypatch.setattr(reduction, "reduce_scatter", made.reduce_scatter)
    monkeypatch.setattr(reduction.dist, "all_reduce", made.all_reduce)
    monkeypatch.setattr(partitions, "all_gather", made.all_gather)
    return made


def groups_of(sizes: Sequence[Sequence[int]]) -> list[list[nn.Parameter]]:
    return [[nn.Parameter(torch.ones(size)) for size in group] for group in sizes]


def split(group: Sequence[nn.Parameter]) -> Partition:
    """A group as the second of two replicas keeps it."""
    numbers = sum(weight.numel() for weight in group)
    flat = torch.zeros(numbers + numbers % 2)
    own = flat[len(flat) // 2 :]
    return Partition(group, flat, own, torch.zeros(len(own)), None)


def backward(*weights: nn.Parameter) -> None:
    """In this order, each with a gradient of ones."""
    for weight in weights:
        torch.autograd.backward([weight], [torch.ones_like(weight)])


def test_a_group_begins_when_it_and_all_after_it_are_complete(world: World) -> None:
    (a, b), (c,), (d, e) = groups = groups_of([[1, 2], [10], [100, 200]])
    one = Reduction(groups, [], [REPLICAS] * len(groups), overlaps=True)
    for step in range(2):
        backward(a, b, c, d, e)  # of an earlier slot
        assert world.begun == ["300", "10", "3"] * step
        one.expect()
        backward(e, c)
        assert world.begun == ["300", "10", "3"] * step
        backward(d)
        assert world.begun == ["300", "10", "3"] * step + ["300", "10"]
        assert len(world.waited) == 3 * step
        backward(b)  # the first weight has no work in this slot
        one.finish()
        assert world.begun == world.waited == ["300", "10", "3"] * (step + 1)
        made = {1: 2.0, 2: 4.0, 10: 4.0, 100: 4.0, 200: 4.0}
        for weight in (weight for group in groups for weight in group):
            assert weight.grad is not None and set(weight.grad.tolist()) == {made[len(weight)]}
            weight.grad = None


def test_weights_of_which_no_gradient_is_put_aside_are_complete(world: World) -> None:
    (a,), (b,), (c,) = groups = groups_of([[1], [2], [3]])
    one = Reduction(groups, [], [REPLICAS] * len(groups), overlaps=True)
    one.expect([b, b])
    assert world.begun == ["3"]
    backward(b)
    assert world.begun == ["3"]
    backward(b)
    assert world.begun == ["3", "2", "1"]
    with pytest.raises(AssertionError, match="after its group"):
        backward(a)
    one.finish()
    assert c.grad is not None and c.grad.tolist() == [0.0] * 3  # no replica had work


def test_without_overlap_all_begin_at_the_end(world: World) -> None:
    groups = groups_of([[1], [2]])
    one = Reduction(groups, [], [REPLICAS] * len(groups))
    one.expect()
    backward(*groups[1], *groups[0])
    assert world.begun == []
    one.finish()
    assert world.begun == world.waited == ["2", "1"]


def test_a_replica_alone_sends_nothing_and_completes_its_gradients(world: World) -> None:
    groups = groups_of([[1], [2]])
    one = Reduction(groups, [], [None] * len(groups), overlaps=True)
    one.expect()
    backward(*groups[0])
    one.finish()
    assert world.begun == []
    assert [p.grad.tolist() for (p,) in groups if p.grad is not None] == [[1.0], [0.0, 0.0]]


def test_a_partition_gets_its_part_of_the_sum(world: World) -> None:
    (a, b), (c,) = groups = groups_of([[2, 3], [4]])
    parts = [split(group) for group in groups]
    one = Reduction(groups, parts, [REPLICAS] * len(groups), overlaps=True)
    one.expect()
    backward(b, c)
    one.finish()
    assert world.begun == ["4", "6"]
    sums = [part.master_P.grad for part in parts]
    assert [None if sum_P is None else sum_P.tolist() for sum_P in sums] == [
        [2.0, 2.0, 0.0],  # of b, filled up at the end
        [2.0, 2.0],
    ]
    assert a.grad is None and b.grad is None and c.grad is None  # kept once


@given(data=st.data())
def test_all_replicas_begin_in_one_order(data: st.DataObject) -> None:
    """Whatever has work in the last slot, and in whatever order its gradients are made."""
    sizes = data.draw(st.lists(st.integers(1, 3), min_size=1, max_size=6))
    expected = [str(100 + number) for number in range(len(sizes))]
    orders = []
    for _replica in range(2):
        world = World()
        groups = [
            [nn.Parameter(torch.ones(1)) for _ in range(size - 1)]
            + [nn.Parameter(torch.ones(100 + number - (size - 1)))]
            for number, size in enumerate(sizes)
        ]
        weights = [weight for group in groups for weight in group]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(reduction.dist, "all_reduce", world.all_reduce)
            one = Reduction(groups, [], [REPLICAS] * len(groups), overlaps=True)
            several = data.draw(st.booleans())
            made = data.draw(
                st.lists(st.sampled_from(range(len(weights))), unique=not several, max_size=9)
            )
            one.expect([weights[number] for number in made] if several else None)
            for number in made:
                left = sum(int(name) >= 100 for name in world.begun)
                place = next(
                    i
                    for i, group in enumerate(groups)
                    if any(weights[number] is weight for weight in group)
                )
                assert left < len(sizes) - place  # not begun before its gradients are there
                backward(weights[number])
            one.finish()
        orders.append(world.begun)
    assert orders == [expected[::-1]] * 2


class Layer(nn.Module):
    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self) -> float:
        return float(self.weight.detach()[0])


def gathering(world: World, ahead: bool) -> tuple[Gathering, list[Layer], list[Partition]]:
    groups = groups_of([[2], [4], [6]])
    parts = [split(group) for group in groups]
    for part in parts:
        part.weights[0].data = part.flat_N
    layers = [Layer(weight) for (weight,) in groups]
    return Gathering(parts, [REPLICAS] * len(parts), layers if ahead else ()), layers, parts


def step(one: Gathering, parts: Sequence[Partition], value: float) -> None:
    for index, part in enumerate(parts):
        part.own_P.fill_(value)
        one.begin(index)
    one.end()


def test_a_layer_waits_for_its_own_weights(world: World) -> None:
    one, layers, parts = gathering(world, ahead=True)
    step(one, parts, 1.0)
    assert world.begun == ["2", "4", "6"] and world.waited == []
    assert layers[1]() == 1.0 and world.waited == ["4"]
    assert layers[1]() == 1.0 and world.waited == ["4"]
    one.settle()
    assert world.waited == ["4", "2", "6"]
    assert [layer() for layer in layers] == [1.0] * 3


def test_weights_that_are_not_gathered_ahead_are_there_after_the_step(world: World) -> None:
    one, _, parts = gathering(world, ahead=False)
    step(one, parts, 1.0)
    assert world.waited == ["2", "4", "6"]
    assert [part.flat_N.unique().tolist() for part in parts] == [[1.0]] * 3
