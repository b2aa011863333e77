"""Running layers one by one must be the same computation as running them together."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from disttrain_cli.models.layer import LOSS_PREFIX, Batch, PipelineLayer
from disttrain_cli.profiling.compute import Stopwatch, run_module
from disttrain_cli.profiling.trial import first_of_kinds, mean_layer
from disttrain_cli.profiling.worker import shares


class Toy(PipelineLayer):
    """Sums its inputs' images under a linear map; the last one adds a loss."""

    def __init__(self, number: int, reads: tuple[str, ...], write: str, last: bool = False) -> None:
        super().__init__()
        self.name, self.module, self.kind, self.reads = f"toy.{number}", "toy", f"kind.{number}", reads
        self.write, self.last, self.linear = write, last, nn.Linear(4, 4)

    def is_empty(self, state: dict[str, Tensor], batch: Batch) -> bool:
        return False

    def compute(self, state: dict[str, Tensor], batch: Batch) -> dict[str, Tensor]:
        value = torch.tanh(self.linear(sum(state[name] for name in self.reads)))
        return {f"{LOSS_PREFIX}toy": value.square().sum()} if self.last else {self.write: value}


def toys() -> list[PipelineLayer]:
    """With a skip that is read twice and a tensor that is replaced."""
    torch.manual_seed(0)
    return [Toy(0, ("x",), "skip"), Toy(1, ("skip",), "x"), Toy(2, ("x", "skip"), "x"),
            Toy(3, ("x", "skip"), "", last=True)]


def test_gradients_of_every_layer_equal_those_of_one_backward() -> None:
    entry, batch = {"x": torch.randn(5, 4)}, Batch(image_grids=[])
    together, apart = toys(), toys()
    state = dict(entry)
    for layer in together:
        state |= layer(state, batch)
    state[f"{LOSS_PREFIX}toy"].backward()
    run_module(apart, entry, batch, Stopwatch(torch.device("cpu")))
    for left, right in zip(together, apart, strict=True):
        for expected, found in zip(left.parameters(), right.parameters(), strict=True):
            torch.testing.assert_close(found.grad, expected.grad)


def test_every_layer_has_a_forward_and_a_backward_time() -> None:
    times = run_module(toys(), {"x": torch.randn(5, 4)}, Batch(image_grids=[]), Stopwatch(torch.device("cpu")))
    assert len(times) == 4 and all(forward > 0.0 and backward > 0.0 for forward, backward in times)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_times_come_from_the_device() -> None:
    device = torch.device("cuda")
    layers = [layer.to(device) for layer in toys()]
    times = run_module(layers, {"x": torch.randn(5, 4, device=device)}, Batch(image_grids=[]), Stopwatch(device))
    assert all(forward > 0.0 and backward > 0.0 for forward, backward in times)


@pytest.mark.parametrize("processes", [1, 2, 3, 4, 6, 7])
def test_the_processes_share_all_draws_of_all_modules(processes: int) -> None:
    modules, draws = ["encoder", "llm", "generator"], 20
    taken = [(share.module, draw) for rank in range(processes) for share in shares(modules, rank, processes)
             for draw in range(draws)[share.first :: share.step]]
    assert sorted(taken) == sorted((module, draw) for module in modules for draw in range(draws))


def test_layers_that_were_not_built_count_as_the_later_ones() -> None:
    assert mean_layer([(5.0, 10.0), (1.0, 2.0)], 4) == (2.0, 4.0)
    assert mean_layer([(5.0, 10.0)], 1) == (5.0, 10.0)


def test_the_first_layers_of_every_kind_come_as_ranges() -> None:
    from disttrain_cli.models.graph import LayerInfo

    table = [LayerInfo(f"m.{i}", module, kind, (), (), (), None, 0) for i, (module, kind) in enumerate(
        [("m", "embed"), ("m", "block"), ("m", "block"), ("m", "block"), ("m", "head"), ("n", "block")])]
    assert first_of_kinds(table, "m", 2) == [(0, 3), (4, 5)]
    assert first_of_kinds(table, "n", 2) == [(5, 6)]
