"""Timing the layers of one module, forward and backward, as a pipeline stage would run them.

The layers run in order, each on detached inputs, so that the backward of each can be timed alone;
gradients are passed from layer to layer in reverse and summed where a tensor is read twice (a
U-Net's skips).

On CUDA the clock is a pair of events, read after any number of passes, so that the device has no
pause between them. On a CPU it is the CPU time of this process: the ranks of a
run share its cores, and the system switches between them every few milliseconds, which is longer
than a small layer takes; wall time would show either no other process or a full time slice of one.
Caches and memory are shared while measuring, so contention for them is in the CPU time; waiting for
a core is not, and `measure.py` accounts for it by the number of processes per core. `Slowdown`
measures it over the whole profile, to be shown next to that number.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from disttrain_cli.models.layer import LOSS_PREFIX, Batch, PipelineLayer
from disttrain_cli.runtime.watching.sensors import Reading, Sensor

Result = TypeVar("Result")


class Stopwatch:
    """Timer of calls on a device.

    All times are read at once, because a GPU runs asynchronously to its host process.

    Args:
        sensor: of a GPU; read before each wait for it, while it is busy.
    """

    def __init__(self, device: torch.device, sensor: Sensor | None = None) -> None:
        self._cuda, self._sensor = device.type == "cuda", sensor
        self._marks: list[tuple[Any, Any] | None] = []
        self.readings: list[Reading] = []
        self.settled = not self._cuda  # under load (`sustained.settle`)

    def time(self, call: Callable[[], Result]) -> Result:
        """Call, and record the device's start and end of it."""
        begin = self._mark()
        result = call()
        self._marks.append((begin, self._mark()))
        return result

    def skip(self) -> None:
        """Record a call that is not made, which takes no time."""
        self._marks.append(None)

    def read_ms(self) -> list[float]:
        """Return the milliseconds of every call since the last reading."""
        marks, self._marks = self._marks, []
        if self._cuda:
            if self._sensor is not None and (reading := self._sensor.read()) is not None:
                self.readings.append(reading)
            torch.cuda.synchronize()
        return [0.0 if pair is None else self._elapsed_ms(*pair) for pair in marks]

    def _elapsed_ms(self, begin: Any, end: Any) -> float:
        return begin.elapsed_time(end) if self._cuda else (end - begin) * 1e-6

    def _mark(self) -> Any:
        if not self._cuda:
            return time.process_time_ns()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


class Slowdown:
    """Wall time over CPU time of this process since creation: its waiting for a core."""

    def __init__(self) -> None:
        self._wall_ns, self._cpu_ns = time.perf_counter_ns(), time.process_time_ns()

    def read(self) -> float:
        return (time.perf_counter_ns() - self._wall_ns) / max(
            1, time.process_time_ns() - self._cpu_ns
        )


def time_module(
    layers: Sequence[PipelineLayer],
    entry: dict[str, Tensor],
    batch: Batch,
    stopwatch: Stopwatch,
    passes: int = 1,
) -> list[tuple[float, float]]:
    """Return (forward, backward) in ms of each layer, the median of some passes of all layers.

    `entry` holds the state that reaches the first layer. Parameter gradients accumulate, as in
    training. A layer of whose outputs none requires a gradient has no backward.
    """
    for _ in range(passes):
        _run(layers, entry, batch, stopwatch)
    times = np.reshape(stopwatch.read_ms(), (passes, 2, len(layers)))
    forward, backward = np.median(times, axis=0).tolist()
    return list(zip(forward, reversed(backward), strict=True))


def _run(
    layers: Sequence[PipelineLayer], entry: dict[str, Tensor], batch: Batch, stopwatch: Stopwatch
) -> None:
    """Run one forward and backward, each layer timed; backwards in reverse order."""
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
    for inputs_of, made in zip(reversed(inputs), reversed(outputs), strict=True):
        roots = [(name, tensor) for name, tensor in made.items() if tensor.requires_grad]
        seeds = [
            None if name.startswith(LOSS_PREFIX) else _gradient(gradients.pop(name, None), tensor)
            for name, tensor in roots
        ]
        if roots:
            tensors = [tensor for _, tensor in roots]
            stopwatch.time(partial(torch.autograd.backward, tensors, seeds))
        else:
            stopwatch.skip()
        for name, tensor in inputs_of.items():
            if tensor.grad is not None:
                gradients[name] = (
                    tensor.grad if name not in gradients else gradients[name] + tensor.grad
                )


def _leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_(tensor.is_floating_point())


def _gradient(known: Tensor | None, tensor: Tensor) -> Tensor:
    """Return the gradient from later layers, or random values of usual size at the module's end."""
    return torch.randn_like(tensor) * 1e-3 if known is None else known
