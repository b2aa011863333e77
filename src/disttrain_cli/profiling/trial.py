"""The layers of one module on a device, and what was measured of them: times and saved activations per draw."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import torch
from torch import Tensor

from disttrain_cli.models.activations import saved_bytes
from disttrain_cli.models.graph import LayerInfo, build_layers, describe, layer_table
from disttrain_cli.models.layer import Batch
from disttrain_cli.models.probe import entry_state, probe_batch, probe_work
from disttrain_cli.profiling.compute import Stopwatch, run_module
from disttrain_cli.spec.runfile import Run

#: Layers of one kind that are built: the first, which prepares what a stage needs once per batch, and another one.
LAYERS_PER_KIND = 2
#: Draws whose saved activations are counted, at most, per process.
MEMORY_DRAWS = 4
WARM_UP_DRAWS = 2

Pair = tuple[float, float]  # forward, backward


class ModuleTrial:
    """One process's draws of one module. A draw that does not fit into the device's memory is left out."""

    def __init__(self, run: Run, module: str, draws: list[dict[str, Any]], device: torch.device) -> None:
        self.draws = draws
        self._table, self._inputs, self._module, self._device = layer_table(run), describe(run), module, device
        self._kind = run.file.model.modules[module].kind
        self._dtype = torch.bfloat16 if run.file.train.precision == "bf16" else torch.float32
        self._layers = [layer for start, stop in first_of_kinds(self._table, module, LAYERS_PER_KIND)
                        for layer in build_layers(run, start, stop, device, self._dtype)]
        self._counts = Counter(layer.kind for layer in self._table if layer.module == module)
        self._stopwatch = Stopwatch(device)
        self._times: list[dict[str, list[Pair]]] = [{} for _ in draws]  # per draw: kind → one pair per pass

    def warm_up(self) -> None:
        """Run the largest draws, so that memory is taken once."""
        tokens = [probe_work(self._inputs, self._kind, **draw).tokens for draw in self.draws]
        for draw in np.argsort(tokens)[::-1][:WARM_UP_DRAWS].tolist():
            self.run(draw, keep=False)

    def run(self, draw: int, keep: bool = True) -> None:
        """One forward and backward of a draw."""
        try:
            state, batch = self._inputs_of(draw)
            times = run_module(self._layers, state, batch, self._stopwatch)
        except torch.OutOfMemoryError:
            self._stopwatch.read_ms()
            return
        by_kind: dict[str, list[Pair]] = {}
        for layer, pair in zip(self._layers, times, strict=True):
            by_kind.setdefault(layer.kind, []).append(pair)
        for kind, pairs in by_kind.items() if keep else ():
            self._times[draw].setdefault(kind, []).append(mean_layer(pairs, self._counts[kind]))

    def measured(self) -> list[dict[str, list[float]]]:
        """Per draw: kind → median (forward, backward) in ms over the passes."""
        return [{kind: np.median(passes, axis=0).tolist() for kind, passes in draw.items()} for draw in self._times]

    def activation_bytes(self) -> dict[int, dict[str, float]]:
        """Draw → kind → bytes that a layer keeps from forward to backward, for draws spread over all."""
        found: dict[int, dict[str, float]] = {}
        for draw in range(0, len(self.draws), max(1, -(-len(self.draws) // MEMORY_DRAWS))):
            try:
                found[draw] = self._activation_bytes(draw)
            except torch.OutOfMemoryError:
                continue
        return found

    def _activation_bytes(self, draw: int) -> dict[str, float]:
        state, batch = self._inputs_of(draw)
        kept: dict[str, float] = {}
        for layer in self._layers:
            if layer.kind not in kept:
                kept[layer.kind] = float(saved_bytes(layer, state, batch))
            with torch.no_grad():
                made = layer(state, batch)
            state |= {name: tensor.requires_grad_() for name, tensor in made.items()}
        return kept

    def _inputs_of(self, draw: int) -> tuple[dict[str, Tensor], Batch]:
        """State and batch of a draw, on the device; the numbers in them do not matter."""
        batch = probe_batch(self._inputs, device=self._device, **self.draws[draw])
        return entry_state(self._table, self._module, self._inputs, batch, self._device, self._dtype), batch


def first_of_kinds(table: list[LayerInfo], module: str, most: int) -> list[tuple[int, int]]:
    """The first `most` layers of every kind of a module, as ranges (start, stop) of the table."""
    seen: Counter[str] = Counter()
    ranges: list[tuple[int, int]] = []
    for place, layer in enumerate(table):
        if layer.module != module or seen[layer.kind] == most:
            continue
        seen[layer.kind] += 1
        start = ranges.pop()[0] if ranges and ranges[-1][1] == place else place
        ranges.append((start, place + 1))
    return ranges


def mean_layer(pairs: list[Pair], count: int) -> Pair:
    """Mean over the `count` layers of a kind, of which the first were measured; the rest are like the later ones."""
    times = np.array(pairs)
    if len(times) > 1:
        times = np.vstack([times[:1], np.repeat(times[1:].mean(axis=0, keepdims=True), count - 1, axis=0)])
    forward, backward = times.mean(axis=0).tolist()
    return forward, backward
