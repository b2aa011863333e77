"""Timing the layers of one module, forward and backward, as a stage of the pipeline would run them.

The layers run in order, each on detached inputs, so that the backward of each can be timed alone;
gradients are handed from layer to layer in reverse and summed where a tensor is read twice (a
U-Net's skips).

On CUDA the clock is a pair of events. On a CPU it is the CPU time of this process: the ranks of a
run share its cores, and the system switches between them every few milliseconds, which is longer
than a small layer takes; wall time would show either no other process or a whole turn of one.
Caches and memory are shared while measuring, so what the others cost there is in the CPU time;
waiting for a turn is not, and `measure.py` puts it in by the number of processes per core.
`Slowdown` measures it over the whole time, to be shown beside that number.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from disttrain_cli.models.layer import LOSS_PREFIX, Batch, PipelineLayer

Result = TypeVar("Result")


class Stopwatch:
    """Times calls on a device; the times are read together, because a GPU runs behind the process
    that feeds it."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._marks: list[tuple[Any, Any]] = []

    def time(self, call: Callable[[], Result]) -> Result:
        """Call, and note when the device began and ended it."""
        begin = self._mark()
        result = call()
        self._marks.append((begin, self._mark()))
        return result

    def read_ms(self) -> list[float]:
        """Milliseconds of every call since the last reading."""
        marks, self._marks = self._marks, []
        if self._cuda:
            torch.cuda.synchronize()
            return [begin.elapsed_time(end) for begin, end in marks]
        return [(end - begin) * 1e-6 for begin, end in marks]

    def _mark(self) -> Any:
        if not self._cuda:
            return time.process_time_ns()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


class Slowdown:
    """Wall time over CPU time of this process since it was made: how long it waited for its
    turn."""

    def __init__(self) -> None:
        self._wall_ns, self._cpu_ns = time.perf_counter_ns(), time.process_time_ns()

    def read(self) -> float:
        return (time.perf_counter_ns() - self._wall_ns) / max(
            1, time.process_time_ns() - self._cpu_ns
        )


def run_module(
    layers: Sequence[PipelineLayer], entry: dict[str, Tensor], batch: Batch, stopwatch: Stopwatch
) -> list[tuple[float, float]]:
    """One forward and backward of `layers`; (forward, backward) in ms of each.

    `entry` holds the state that reaches the first layer. Parameter gradients accumulate, as in
    training. A layer of which nothing asks for a gradient has no backward.
    """
    state = dict(entry)
    inputs: list[dict[str, Tensor]] = []
    outputs: list[dict[str, Tensor]] = []
    for layer in layers:
        inputs_of = {name: _leaf(state[name]) for name in layer.reads}
        made = stopwatch.time(lambda layer=layer, inputs_of=inputs_of: layer(inputs_of, batch))  # type: ignore[misc]
        inputs.append(inputs_of)
        outputs.append(made)
        state.update(made)
    gradients: dict[str, Tensor] = {}
    differentiated: list[bool] = []
    for inputs_of, made in zip(reversed(inputs), reversed(outputs), strict=True):
        roots = [(name, tensor) for name, tensor in made.items() if tensor.requires_grad]
        seeds = [
            None if name.startswith(LOSS_PREFIX) else _gradient(gradients.pop(name, None), tensor)
            for name, tensor in roots
        ]
        differentiated.append(bool(roots))
        if roots:
            tensors = [tensor for _, tensor in roots]
            stopwatch.time(partial(torch.autograd.backward, tensors, seeds))
        for name, tensor in inputs_of.items():
            if tensor.grad is not None:
                gradients[name] = (
                    tensor.grad if name not in gradients else gradients[name] + tensor.grad
                )
    times = iter(stopwatch.read_ms())
    forward = [next(times) for _ in layers]
    backward = [next(times) if any_root else 0.0 for any_root in differentiated]
    return list(zip(forward, reversed(backward), strict=True))


def _leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_(tensor.is_floating_point())


def _gradient(known: Tensor | None, tensor: Tensor) -> Tensor:
    """What comes back from later layers; outside the module's end, numbers of a gradient's usual
    size."""
    return torch.randn_like(tensor) * 1e-3 if known is None else known
