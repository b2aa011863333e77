"""Running layers one by one must be the same computation as running them together."""

import pytest
import torch
from torch import Tensor, nn

from disttrain_cli.models.layer import LOSS_PREFIX, Batch, PipelineLayer
from disttrain_cli.profiling.compute import Stopwatch, time_module
from disttrain_cli.profiling.trial import allocated_bytes, first_of_kinds, mean_layer


class Toy(PipelineLayer):
    """Sums its inputs' images under a linear map; the last one adds a loss."""

    def __init__(self, number: int, reads: tuple[str, ...], write: str, last: bool = False) -> None:
        super().__init__()
        self.name, self.module, self.kind, self.reads = (
            f"toy.{number}",
            "toy",
            f"kind.{number}",
            reads,
        )
        self.write, self.last, self.linear = write, last, nn.Linear(4, 4)

    def is_empty(self, state: dict[str, Tensor], batch: Batch) -> bool:
        return False

    def compute(self, state: dict[str, Tensor], batch: Batch) -> dict[str, Tensor]:
        value = torch.tanh(self.linear(sum(state[name] for name in self.reads)))
        return {f"{LOSS_PREFIX}toy": value.square().sum()} if self.last else {self.write: value}


def toys() -> list[PipelineLayer]:
    """With a skip that is read twice and a tensor that is replaced."""
    torch.manual_seed(0)
    return [
        Toy(0, ("x",), "skip"),
        Toy(1, ("skip",), "x"),
        Toy(2, ("x", "skip"), "x"),
        Toy(3, ("x", "skip"), "", last=True),
    ]


def test_gradients_of_every_layer_equal_those_of_one_backward() -> None:
    entry, batch = {"x": torch.randn(5, 4)}, Batch()
    together, apart = toys(), toys()
    state = dict(entry)
    for layer in together:
        state |= layer(state, batch)
    state[f"{LOSS_PREFIX}toy"].backward()
    time_module(apart, entry, batch, Stopwatch(torch.device("cpu")))
    for left, right in zip(together, apart, strict=True):
        for expected, found in zip(left.parameters(), right.parameters(), strict=True):
            torch.testing.assert_close(found.grad, expected.grad)


def test_every_layer_has_a_forward_and_a_backward_time() -> None:
    times = time_module(toys(), {"x": torch.randn(5, 4)}, Batch(), Stopwatch(torch.device("cpu")))
    assert len(times) == 4 and all(forward > 0.0 and backward > 0.0 for forward, backward in times)


def test_frozen_layers_pass_gradients_on_and_keep_none() -> None:
    layers = toys()
    for layer in layers:
        layer.requires_grad_(False)
    times = time_module(layers, {"x": torch.randn(5, 4)}, Batch(), Stopwatch(torch.device("cpu")))
    assert all(backward > 0.0 for _, backward in times)
    assert all(parameter.grad is None for layer in layers for parameter in layer.parameters())


def test_a_layer_of_which_nothing_asks_for_a_gradient_has_no_backward() -> None:
    class Source(Toy):
        def compute(self, state: dict[str, Tensor], batch: Batch) -> dict[str, Tensor]:
            return {"x": self.linear(torch.ones(5, 4))}

    layers = [Source(0, (), "x").requires_grad_(False), *toys()]
    times = time_module(layers, {}, Batch(), Stopwatch(torch.device("cpu")))
    assert times[0][0] > 0.0 and times[0][1] == 0.0
    assert all(backward > 0.0 for _, backward in times[1:])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_allocator_holds_what_a_layer_keeps_and_its_output() -> None:
    device = torch.device("cuda")
    layer = Toy(0, ("x",), "y").to(device)
    kept = allocated_bytes(
        layer, {"x": torch.randn(512, 4, device=device, requires_grad=True)}, Batch()
    )
    # the sum, which the linear keeps, and the output, which tanh keeps
    assert kept == 2 * 512 * 4 * 4


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_times_come_from_the_device() -> None:
    device = torch.device("cuda")
    layers = [layer.to(device) for layer in toys()]
    times = time_module(layers, {"x": torch.randn(5, 4, device=device)}, Batch(), Stopwatch(device))
    assert all(forward > 0.0 and backward > 0.0 for forward, backward in times)


def test_layers_that_were_not_built_count_as_the_later_ones() -> None:
    assert mean_layer([(5.0, 10.0), (1.0, 2.0)], 4) == (2.0, 4.0)
    assert mean_layer([(5.0, 10.0)], 1) == (5.0, 10.0)


def test_the_first_layers_of_every_kind_come_as_ranges() -> None:
    from disttrain_cli.models.graph import LayerInfo

    table = [
        LayerInfo(f"m.{i}", module, kind, (), (), (), None, 0, frozenset())
        for i, (module, kind) in enumerate(
            [
                ("m", "embed"),
                ("m", "block"),
                ("m", "block"),
                ("m", "block"),
                ("m", "head"),
                ("n", "block"),
            ]
        )
    ]
    assert first_of_kinds(table, "m", 2) == [(0, 3), (4, 5)]
    assert first_of_kinds(table, "n", 2) == [(5, 6)]
