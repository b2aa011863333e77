"""Checks of a rank's device for the kernels and memory that its plan prices, before the rendezvous.

A missing kernel is not replaced silently: the plan's times and memory would be those of another
one.
"""

from __future__ import annotations

import socket
from typing import Any

import torch

from disttrain_cli.calls import call
from disttrain_cli.errors import DisttrainError, SpecError
from disttrain_cli.models import flash4, recurrent
from disttrain_cli.models.architectures import read_configs
from disttrain_cli.models.attention import CAPABILITY, HEAD_STEP, WIDEST_HEAD
from disttrain_cli.models.configs.decoders import head_width
from disttrain_cli.models.library_decoder import library_decoder
from disttrain_cli.spec.extras import EXTRAS, install_command
from disttrain_cli.spec.plan import Plan
from disttrain_cli.spec.profile import DeviceProfile
from disttrain_cli.spec.runfile import Run
from disttrain_cli.spec.stage_graph import RankCoords


def check_fit(run: Run, profiled: DeviceProfile, device: torch.device) -> None:
    """Compare a device with the profiled one.

    A CPU, and fp32 anywhere, run the kernels that are priced for them.

    Raises:
        DisttrainError: the device is too old for flash attention, and the profile is not one of
            such a device; or it lacks FlashAttention 4 or the kernels of recurrent layers, which
            the plan prices.
        SpecError: a module has a head size for which every kernel needs memory that grows with the
            square of the length.
    """
    if device.type != "cuda" or run.file.train.precision != "bf16":
        return
    name, capability = torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device)
    if capability < CAPABILITY and (profiled.kind, profiled.name) != ("cuda", name):
        raise DisttrainError(
            f"The {name} on {socket.gethostname()} is too old for the attention that the plan"
            " prices",
            f"compute capability {_dotted(capability)}; flash attention needs"
            f" {_dotted(CAPABILITY)}. The plan was made for: {profiled.name}",
            "Use such devices, or profile this one and plan again:"
            f" {call('profile', device='cuda')} && {call('plan')}",
        )
    if profiled.flash_attention == 4 and not flash4.available(device):
        raise DisttrainError(
            f"The {name} on {socket.gethostname()} has no FlashAttention 4, which the plan prices",
            f"compute capability {_dotted(capability)}; the package flash-attn-4 is"
            f" {'' if EXTRAS['flash'].installed else 'not '}installed",
            f"Install it on every host: {install_command('flash')}; or profile and plan with"
            f" cluster.flash_attention: 2: {call('profile')} && {call('plan')}",
        )
    for module, config in read_configs(run).items():
        if config.kind == "llm" and not EXTRAS["recurrent"].installed:
            _check_recurrent(module, config.config)
        width = head_width(config.config) if hasattr(config.config, "num_attention_heads") else 0
        if width > WIDEST_HEAD and width % HEAD_STEP:
            raise SpecError(
                f"No kernel attends with heads as wide as those of {module}",
                f"{width}; allowed: up to {WIDEST_HEAD}, or multiples of {HEAD_STEP}",
                f"Change head_dim or num_attention_heads of {module}, or train with"
                " train.precision: fp32.",
            )


def _check_recurrent(module: str, config: Any) -> None:
    if any(recurrent.needs_kernels(layer) for layer in library_decoder(config).layers):
        raise DisttrainError(
            f"{socket.gethostname()} has no kernels for the recurrent layers of {module}, which"
            " the plan prices",
            "the package flash-linear-attention is not installed",
            f"Install it on every host: {install_command('recurrent')}",
        )


def check_memory(
    plan: Plan, profiled: DeviceProfile, coords: RankCoords, device: torch.device
) -> None:
    """Compare the plan's memory on a device with its size and its free memory.

    Raises:
        DisttrainError: the device is smaller than this rank's stage, or in use.
    """
    if device.type != "cuda":
        return
    free_gib, total_gib = (size / 2**30 for size in torch.cuda.mem_get_info(device))
    peak_gib = next(
        (
            stage.peak_gib
            for stage in plan.predicted.memory
            if (stage.unit, stage.stage) == (coords.unit.name, coords.stage.index)
        ),
        0.0,
    )
    where = f"{device} ({torch.cuda.get_device_name(device)}) on {socket.gethostname()}"
    stage = (
        f"unit {coords.unit.name}, stage {coords.stage.index}, is planned with up to"
        f" {peak_gib:.1f} GiB"
    )
    if total_gib < peak_gib:
        raise DisttrainError(
            f"{where} is too small for its part of the plan",
            f"it has {total_gib:.1f} GiB; {stage}. The plan was "
            f"made for: {profiled.name}, {profiled.memory_gib:.1f} GiB",
            f"Use such devices, or plan for these: set cluster.memory_gib: {total_gib:.1f}, then"
            f" {call('plan')}",
        )
    if free_gib + profiled.context_gib < peak_gib:  # this process's context is allocated already
        raise DisttrainError(
            f"{where} has too little memory left",
            f"{free_gib:.1f} of {total_gib:.1f} GiB are free; {stage}",
            "See who uses it, and end that: nvidia-smi. Or plan with less: set cluster.memory_gib,"
            f" then {call('plan')}",
        )


def _dotted(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))
