"""Layers of the paper's models on one device: time, FLOPs and bytes beside what a plan would price
them with."""

from __future__ import annotations

import time
from collections.abc import Mapping
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.gpu.setting import Figures, Setting
from disttrain_cli.costs.hardware import Device, KernelWork, kernels_ms, lookup
from disttrain_cli.errors import SpecError
from disttrain_cli.models.activations import saved_bytes
from disttrain_cli.models.attention import kernel_for
from disttrain_cli.models.flops import layer_flops
from disttrain_cli.models.graph import LayerInfo, build_layers, describe, layer_table
from disttrain_cli.models.layer import Batch, PipelineLayer
from disttrain_cli.models.operators import layer_operators
from disttrain_cli.models.probe import probe_batch, state_at
from disttrain_cli.profiling.compute import Stopwatch, time_module
from disttrain_cli.profiling.trial import first_of_kinds
from disttrain_cli.spec.runfile import Run

MIB = float(1 << 20)
ROUNDS = 10


class Layers(NamedTuple):
    """Layers of one module on the device, and what reaches them."""

    run: Run
    places: list[int]  # in the model's table
    built: list[PipelineLayer]
    state: dict[str, Tensor]
    batch: Batch
    sizes: Mapping[str, Any]


def layers_of(
    setting: Setting, run: Run, module: str, sizes: Mapping[str, Any], kind: str | None = None
) -> Layers:
    """The first layer of every kind of a module, or of one kind, with random inputs of these
    sizes."""
    table, inputs = layer_table(run), describe(run)
    places = [
        place
        for start, stop in first_of_kinds(table, module, 1)
        for place in range(start, stop)
        if kind in (None, table[place].kind)
    ]
    built = [
        build_layers(run, place, place + 1, setting.device, setting.dtype)[0] for place in places
    ]
    for layer in built:
        layer.requires_grad_(not layer.frozen)
    batch = probe_batch(inputs, device=setting.device, **sizes)
    state = state_at(table, places[0], inputs, batch, setting.device, setting.dtype)
    return Layers(run, places, built, state, batch, sizes)


def measured(setting: Setting, name: str, layers: Layers) -> None:
    """Tell milliseconds, rates and MiB of one forward and backward of all the layers."""
    figures: Figures = {}
    for look in (_times, _bytes, _priced):
        figures |= look(setting, layers)
        setting.tell(name, figures)
    taken_ms = figures["forward_ms"] + figures["backward_ms"]
    figures |= {
        "tflops_that_run": 1e3 * figures["ran_tflop"] / taken_ms,
        "model_tflops": 1e3 * figures["model_tflop"] / taken_ms,
    }
    device = catalogued(setting)
    if device is not None:
        peak = device.peak_of("bf16")
        figures |= {
            "mfu": figures["model_tflops"] / peak,
            "share_of_peak": figures["tflops_that_run"] / peak,
        }
    setting.tell(name, figures)


def _times(setting: Setting, layers: Layers) -> Figures:
    """Of the device, medians; the first two calls by the host's clock, which sees what a new shape
    costs."""
    stopwatch = Stopwatch(setting.device)

    def once() -> list[tuple[float, float]]:
        for layer in layers.built:
            layer.zero_grad()
        return time_module(layers.built, layers.state, layers.batch, stopwatch)

    calls_ms = []
    for _ in range(2):
        start = time.perf_counter()
        once()
        calls_ms.append(1e3 * (time.perf_counter() - start))
    times = [once() for _ in range(1 if setting.small else ROUNDS)]
    forward_ms, backward_ms = (
        median(sum(pair[side] for pair in pairs) for pairs in times) for side in (0, 1)
    )
    return {
        "first_call_ms": calls_ms[0],
        "second_call_ms": calls_ms[1],
        "forward_ms": forward_ms,
        "backward_ms": backward_ms,
    }


def catalogued(setting: Setting) -> Device | None:
    """This device in the hardware catalogue, where it is there."""
    if setting.kind == "cpu":
        return None
    try:
        return lookup(torch.cuda.get_device_name())
    except SpecError:
        return None


def _bytes(setting: Setting, layers: Layers) -> Figures:
    """MiB kept from forward to backward by the layers' storages; of the allocator what one call
    takes at most."""
    state, kept = dict(layers.state), 0
    for layer in layers.built:
        kept += saved_bytes(layer, state, layers.batch)
        with torch.no_grad():
            made = layer(dict(state), layers.batch)
        state |= {
            name: tensor.detach().requires_grad_(tensor.is_floating_point())
            for name, tensor in made.items()
        }
    figures: Figures = {"kept_mib": kept / MIB}
    if setting.kind == "cuda":
        del state, made
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        time_module(layers.built, layers.state, layers.batch, Stopwatch(setting.device))
        figures["peak_mib"] = (torch.cuda.max_memory_allocated() - before) / MIB
        figures["reserved_over_allocated_mib"] = (
            torch.cuda.max_memory_reserved() - torch.cuda.max_memory_allocated()
        ) / MIB
    return figures


def _priced(setting: Setting, layers: Layers) -> Figures:
    """What `models.operators` says of the same layers, and what the catalogue's curve makes of
    it."""
    table, inputs = layer_table(layers.run), describe(layers.run)
    batch = probe_batch(inputs, device="meta", **layers.sizes)
    saved, model, done = 0, 0, []
    for place in layers.places:
        layer = build_layers(layers.run, place, place + 1, "meta", setting.dtype)[0]
        layer.requires_grad_(not layer.frozen)
        state = _meta_state(table, place, layers, batch)
        priced = layer_operators(layer, state, batch)
        saved += priced.saved_bytes
        done.append(priced)
        counts = layer_flops(layer, _meta_state(table, place, layers, batch), batch)
        model += counts.forward + (0 if layer.frozen else counts.backward)
    figures: Figures = {
        "priced_kept_mib": saved / MIB,
        "model_tflop": model / 1e12,
        "ran_tflop": sum(_flops(side) for one in done for side in (one.forward, one.backward))
        / 1e12,
        "priced_kernels": sum(one.forward.kernels + one.backward.kernels for one in done),
    }
    device = catalogued(setting)
    if device is not None:
        figures |= {
            "curve_forward_ms": sum(kernels_ms(device, "bf16", one.forward) for one in done),
            "curve_backward_ms": sum(kernels_ms(device, "bf16", one.backward) for one in done),
        }
    return figures


def _meta_state(
    table: list[LayerInfo], place: int, layers: Layers, batch: Batch
) -> dict[str, Tensor]:
    dtype = next(layers.built[0].parameters()).dtype
    return state_at(table, place, describe(layers.run), batch, "meta", dtype)


def _flops(work: KernelWork) -> float:
    return work.product_flops + work.attention_flops + work.convolution_flops


def kernels(setting: Setting, layers: Layers, most: int = 12) -> list[Figures]:
    """The kernels (on a CPU operators) of one forward and backward that take longest, and how often
    they run."""
    from torch.profiler import ProfilerActivity, profile

    activity = ProfilerActivity.CUDA if setting.kind == "cuda" else ProfilerActivity.CPU
    with profile(activities=[activity]) as found:
        time_module(layers.built, layers.state, layers.batch, Stopwatch(setting.device))
    side = "self_device_time_total" if setting.kind == "cuda" else "self_cpu_time_total"
    rows = sorted(found.key_averages(), key=lambda row: -getattr(row, side))
    return [
        {"name": row.key[:160], "ms": getattr(row, side) / 1e3, "calls": row.count}
        for row in rows[:most]
    ]


def attention_kernel(setting: Setting, head_width: int) -> str:
    """What the one predicate says for these heads here."""
    return kernel_for(setting.device, setting.dtype, head_width)
