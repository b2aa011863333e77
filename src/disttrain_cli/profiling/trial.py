"""The layers of one module on a device at one TP size: times and saved activations.

A TP shard is measured on one device: its compute alone, with its part of the weights; the group's
messages are added from the measured links (`assemble.py`). Frozen means that no weight requires a
gradient while inputs do.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from disttrain_cli.models.activations import saved_bytes
from disttrain_cli.models.graph import LayerInfo, build_layers, describe, layer_table
from disttrain_cli.models.layer import Batch, PipelineLayer
from disttrain_cli.models.probe import entry_state, probe_batch
from disttrain_cli.profiling.compute import Stopwatch, time_module
from disttrain_cli.profiling.sustained import LOOK_S, MEASURED_S, passes_for, settle
from disttrain_cli.runtime.engine.partitions import add_at_once
from disttrain_cli.spec.runfile import Run

#: Layers of one kind that are built: the first, which does a stage's preparation once per batch,
#: and another one.
LAYERS_PER_KIND = 2

Pair = tuple[float, float]  # forward, backward
Sizes = Mapping[str, Any]  # arguments of `models.probe.probe_batch`


class Bench:
    """One module at one TP size, to be measured.

    In bf16 a backward adds the gradients of weights to fp32 sums, as in the runtime. Measurements
    return None for sizes that do not fit into the device's memory.
    """

    def __init__(
        self, run: Run, module: str, device: torch.device, stopwatch: Stopwatch, *, tp: int
    ) -> None:
        self._table, self._inputs, self._module, self._device = (
            layer_table(run),
            describe(run),
            module,
            device,
        )
        self._dtype = torch.bfloat16 if run.file.train.precision == "bf16" else torch.float32
        self._layers = [
            layer
            for start, stop in first_of_kinds(self._table, module, LAYERS_PER_KIND)
            for layer in build_layers(run, start, stop, device, self._dtype, tp=tp)
        ]
        #: Number of the module's layers, by kind.
        self.counts = Counter(layer.kind for layer in self._table if layer.module == module)
        self._stopwatch = stopwatch
        if self._dtype == torch.bfloat16:
            add_at_once(
                (weight, torch.zeros_like(weight, dtype=torch.float32))
                for layer in self._layers
                for weight in layer.parameters()
                if weight.requires_grad
            )

    def times(self, sizes: Sizes, frozen: bool) -> dict[str, Pair] | None:
        """Return (forward, backward) in ms by kind, mean over the module's layers of that kind."""
        self._freeze(frozen)
        try:
            state, batch = self._inputs_of(sizes)
            times = self._time(state, batch)
        except torch.OutOfMemoryError:
            self._stopwatch.read_ms()
            return None
        by_kind: dict[str, list[Pair]] = {}
        for layer, pair in zip(self._layers, times, strict=True):
            by_kind.setdefault(layer.kind, []).append(pair)
        return {kind: mean_layer(pairs, self.counts[kind]) for kind, pairs in by_kind.items()}

    def _time(self, state: dict[str, Tensor], batch: Batch) -> list[Pair]:
        """Return the times of all layers; on a GPU under sustained load, whose reading stays."""
        readings = self._stopwatch.readings
        before = len(readings)
        run = partial(time_module, self._layers, state, batch, self._stopwatch)
        times = run()
        if self._device.type == "cpu":
            return times
        begin_s = time.monotonic()
        run()  # kernels are loaded, memory is allocated
        pass_s = time.monotonic() - begin_s
        if not self._stopwatch.settled:
            settle(lambda: run(passes_for(LOOK_S, pass_s)), readings)
            self._stopwatch.settled = True
        times = run(passes_for(MEASURED_S, pass_s))
        readings[before:] = readings[-1:]
        return times

    def kept_bytes(self, sizes: Sizes, frozen: bool) -> dict[str, float] | None:
        """Return the bytes saved from forward to backward, by kind of layer."""
        self._freeze(frozen)
        try:
            return self._kept_bytes(sizes)
        except torch.OutOfMemoryError:
            return None

    def _kept_bytes(self, sizes: Sizes) -> dict[str, float]:
        state, batch = self._inputs_of(sizes)
        kept: dict[str, float] = {}
        for layer in self._layers:
            if layer.kind not in kept:
                count = allocated_bytes if self._device.type == "cuda" else saved_bytes
                kept[layer.kind] = float(count(layer, state, batch))
            with torch.no_grad():
                made = layer(state, batch)
            state |= {name: tensor.requires_grad_() for name, tensor in made.items()}
        return kept

    def _freeze(self, frozen: bool) -> None:
        """Set whether weights require gradients; those of never-trained layers do not."""
        for layer in self._layers:
            layer.ask_for_gradients(not frozen)

    def _inputs_of(self, sizes: Sizes) -> tuple[dict[str, Tensor], Batch]:
        """Return state and batch of a draw on the device; their values do not matter."""
        batch = probe_batch(self._inputs, device=self._device, **sizes)
        return entry_state(
            self._table, self._module, self._inputs, batch, self._device, self._dtype
        ), batch


def allocated_bytes(layer: PipelineLayer, state: Mapping[str, Tensor], batch: Batch) -> int:
    """Return the bytes that the CUDA allocator holds more after a forward than before it.

    This includes the output, not the layer's input, which counts as the output of the layer before.
    A stage fits or not by the allocator's bytes, so the profile holds these rather than
    `saved_bytes`.
    """
    device = next(iter(state.values())).device if state else next(layer.parameters()).device
    with torch.no_grad():
        layer(dict(state), batch)  # fills the batch's cache and takes workspaces
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    made = layer(dict(state), batch)
    torch.cuda.synchronize(device)
    kept = max(0, torch.cuda.memory_allocated(device) - before)
    del made
    return kept


def first_of_kinds(table: list[LayerInfo], module: str, most: int) -> list[tuple[int, int]]:
    """Return the first `most` layers of every kind of a module, as (start, stop) in the table."""
    seen: Counter[str] = Counter()
    ranges: list[tuple[int, int]] = []
    for index, layer in enumerate(table):
        if layer.module != module or seen[layer.kind] == most:
            continue
        seen[layer.kind] += 1
        start = ranges.pop()[0] if ranges and ranges[-1][1] == index else index
        ranges.append((start, index + 1))
    return ranges


def mean_layer(pairs: list[Pair], count: int) -> Pair:
    """Return the mean over the `count` layers of a kind, of which the first few were measured.

    Layers that were not measured are assumed to be like the measured ones after the first.
    """
    times = np.array(pairs)
    if len(times) > 1:
        times = np.vstack(
            [times[:1], np.repeat(times[1:].mean(axis=0, keepdims=True), count - 1, axis=0)]
        )
    forward, backward = times.mean(axis=0).tolist()
    return forward, backward
