"""What kernels reach of a CUDA device's peaks: the curve of the hardware catalogue, measured.

Prints an entry for `curves` in templates/hardware.yaml. A kernel's time is taken as launch + FLOPs
/ (peak · fraction) + bytes / (bandwidth · memory fraction); launch and memory are measured first,
by themselves, and each fraction is what is left of the times of its operators, forward and
backward, at the sizes that models here have. Medians; bf16.

Each fraction is measured twice: in short bursts, and sustained, after seconds of full load, without
a pause, as training runs.

The catalogue's curve of Hopper was measured so on an H100, and corrected by what its layers take
(benchmarks/README.md); the others are published figures (see their sources).
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import (
    conv_flop_count,
    mm_flop,
    sdpa_backward_flop_count,
    sdpa_flop_count,
)

from disttrain_cli.costs.hardware import Device, lookup
from disttrain_cli.errors import DisttrainError
from disttrain_cli.profiling.sustained import passes_for

REPEATS = 20
WARM_UP_S = 1.0
LOAD_S = 3.0  # of full load before what is sustained is measured
SUSTAINED_S = 0.3  # of each operator then
# Rows, inputs, outputs: Llama 7B and 70B whole and at TP 8, ViT-Huge.
PRODUCTS = (
    (8192, 4096, 4096),
    (8192, 4096, 11008),
    (8192, 11008, 4096),
    (8192, 4096, 1376),
    (8192, 8192, 28672),
    (8192, 8192, 1024),
    (8192, 3584, 8192),
    (10368, 1280, 5120),
)
ATTENTIONS = (
    (1, 32, 8192, 128, True),
    (4, 32, 2048, 128, True),
    (8, 16, 1297, 80, False),
)  # N, heads, L, D, causal
# N, channels in and out, side: Stable Diffusion's U-Net at 512² and 1024², its VAE's first level.
CONVOLUTIONS = (
    (8, 320, 320, 64),
    (8, 640, 640, 32),
    (8, 1280, 1280, 16),
    (2, 320, 320, 128),
    (1, 128, 128, 512),
)
COPY_BYTES = 1 << 30
TINY_KERNELS = 200
KERNELS = 3  # of an operator's forward and backward


@dataclass(frozen=True)
class Case:
    """One operator to be timed."""

    forward: Callable[[], torch.Tensor]
    inputs: list[torch.Tensor]
    flops: float  # of forward and backward, as they run


Seconds = Callable[[Callable[[], object]], float]


def measure(device: torch.device, known: Device, small: bool = False) -> dict[str, Any]:
    """Fractions and launch time of a device with these peaks; `small` takes one case of each,
    shrunk 32 times, for hardly any time."""
    shrink, cases = (32, 1) if small else (1, None)
    shorter = 0.01 if small else 1.0
    deadline = time.perf_counter() + (0.0 if small else WARM_UP_S)
    while time.perf_counter() < deadline:
        torch.randn(4096, 4096, device=device) @ torch.randn(4096, 4096, device=device)
    launch_s = _launch_s(device)
    source = torch.zeros(COPY_BYTES // shrink**2, dtype=torch.uint8, device=device)
    kinds = {
        "product": [
            _product(device, *(size // shrink for size in sizes)) for sizes in PRODUCTS[:cases]
        ],
        "attention": [
            _attention(device, n, heads, length // shrink, width, causal)
            for n, heads, length, width, causal in ATTENTIONS[:cases]
        ],
        "convolution": [
            _convolution(device, n, inputs // shrink, outputs // shrink, side // shrink)
            for n, inputs, outputs, side in CONVOLUTIONS[:cases]
        ],
    }

    def fractions(seconds: Seconds) -> dict[str, float]:
        """Peak's shares that are left when launches and bytes are taken off, and the memory's."""
        bandwidth = 2.0 * source.numel() / max(seconds(source.clone) - launch_s, 1e-9)
        return {
            kind: median(_rate(seconds, case, launch_s, bandwidth) for case in made)
            / (known.peak_tflops * 1e12)
            for kind, made in kinds.items()
        } | {"memory": bandwidth / (known.memory_gbytes_s * 1e9)}

    burst = fractions(lambda call: _seconds(device, call))
    steps = [_both(case) for made in kinds.values() for case in made]
    _sustained(device, lambda: [step() for step in steps], shorter * LOAD_S)
    sustained = fractions(lambda call: _sustained(device, call, shorter * SUSTAINED_S))
    return burst | {"launch_us": 1e6 * launch_s, "sustained": sustained}


def _seconds(device: torch.device, call: Callable[[], object]) -> float:
    """Median seconds of a call on the device, which is waited for after each."""
    times = [_elapsed_s(device, call, 1) for _ in range(REPEATS + 1)]
    return median(times[1:])


def _sustained(device: torch.device, call: Callable[[], object], seconds: float) -> float:
    """Mean seconds of calls that keep the device busy for some time without a pause."""
    once_s = _elapsed_s(device, call, 1)
    return _elapsed_s(device, call, passes_for(seconds, once_s))


def _elapsed_s(device: torch.device, call: Callable[[], object], times: int) -> float:
    """Mean seconds of calls that are queued at once."""
    if device.type != "cuda":
        start = time.perf_counter()
        for _ in range(times):
            call()
        return (time.perf_counter() - start) / times
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(times):
        call()
    end.record()
    torch.cuda.synchronize(device)
    return float(begin.elapsed_time(end)) * 1e-3 / times


def _launch_s(device: torch.device) -> float:
    """Time of a kernel that does next to nothing, replayed from a graph so that the host does not
    count."""
    numbers = torch.zeros(32, device=device)

    def tiny() -> None:
        for _ in range(TINY_KERNELS):
            numbers.add_(1.0)

    tiny()
    if device.type != "cuda":
        return _seconds(device, tiny) / TINY_KERNELS
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tiny()
    return _seconds(device, graph.replay) / TINY_KERNELS


def _both(case: Case) -> Callable[[], object]:
    """Its forward and backward."""
    seed = torch.ones_like(case.forward())
    return lambda: torch.autograd.grad(case.forward(), case.inputs, seed)


def _rate(seconds: Seconds, case: Case, launch_s: float, bandwidth: float) -> float:
    """FLOPs per second of a forward and backward, without launches and the bytes of inputs, outputs
    and gradients."""
    tensors = [*case.inputs, case.forward()]
    moved = 3 * sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    taken_s = seconds(_both(case)) - KERNELS * launch_s - moved / bandwidth
    return case.flops / max(taken_s, 1e-9)


def _leaf(device: torch.device, *shape: int) -> torch.Tensor:
    return torch.randn(shape, device=device, dtype=torch.bfloat16).requires_grad_()


def _product(device: torch.device, rows: int, inputs: int, outputs: int) -> Case:
    left, right = _leaf(device, rows, inputs), _leaf(device, outputs, inputs)
    return Case(
        lambda: functional.linear(left, right),
        [left, right],
        3 * mm_flop(left.shape, right.t().shape),
    )


def _attention(
    device: torch.device, items: int, heads: int, length: int, width: int, causal: bool
) -> Case:
    """Flash attention's kernel, which models run here; left to itself, torch takes cuDNN's on
    Hopper and Blackwell."""
    query, key, value = (_leaf(device, items, heads, length, width) for _ in range(3))
    shape = query.shape

    def attend() -> torch.Tensor:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return functional.scaled_dot_product_attention(query, key, value, is_causal=causal)

    flops = sdpa_flop_count(shape, shape, shape) + sdpa_backward_flop_count(
        shape, shape, shape, shape
    )
    return Case(attend, [query, key, value], flops / 2 if causal else flops)


def _convolution(device: torch.device, items: int, inputs: int, outputs: int, side: int) -> Case:
    image, weight = (
        tensor.detach().to(memory_format=torch.channels_last).requires_grad_()
        for tensor in (
            _leaf(device, items, inputs, side, side),
            _leaf(device, outputs, inputs, 3, 3),
        )
    )
    flops = 3 * conv_flop_count(list(image.shape), list(weight.shape), [items, outputs, side, side])
    return Case(lambda: functional.conv2d(image, weight, padding=1), [image, weight], flops)


def entry(name: str, found: dict[str, Any]) -> str:
    """The measured curve as the catalogue writes it."""
    burst = {key: value for key, value in found.items() if key != "sustained"}
    sustained = ", ".join(f"{key}: {value:.3f}" for key, value in found["sustained"].items())
    lines = [
        f"  {name}:",
        *(f"    {key}: {value:.3f}" for key, value in burst.items()),
        f"    sustained: {{{sustained}}}",
    ]
    source = (
        f"calibrated: python -m benchmarks.efficiency, torch {torch.__version__},"
        f" {time.strftime('%Y-%m-%d')}"
    )
    return "\n".join([*lines, f'    source: "{source}"'])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.parse_args()
    try:
        if not torch.cuda.is_available():
            raise DisttrainError(
                "No CUDA device was found",
                f"torch {torch.__version__} sees none",
                "Run this on a machine with a GPU of the catalogue.",
            )
        known = lookup(torch.cuda.get_device_name())
    except DisttrainError as error:
        sys.exit(str(error))
    print(entry(known.curve, measure(torch.device("cuda"), known)))


if __name__ == "__main__":
    main()
