"""A training job whose starter believes in eight CUDA devices and fails when any of them is touched
before the fork.

A process that has called the CUDA driver leaves its children with one that does not work. Counting
devices by NVML (torch does where PYTORCH_NVML_BASED_CUDA_CHECK says so) is no such call; counting
them by the CUDA runtime, as torch does where there is no NVML, is.
"""

import gc
import os
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.cuda


def touched(*given: Any, **more: Any) -> NoReturn:
    raise AssertionError("CUDA was touched before the fork")


torch.cuda._is_compiled = lambda: True  # type: ignore[assignment]
torch.cuda._device_count_nvml = lambda: int(os.environ["NVML_COUNT"])  # type: ignore[assignment]
torch.cuda._lazy_init = touched  # type: ignore[assignment]
for name in (
    "_cuda_init",
    "_cuda_getDeviceCount",
    "_cuda_setDevice",
    "_cuda_getDevice",
    "_cuda_getCurrentRawStream",
):
    setattr(torch._C, name, touched)

from deepspeed.accelerator import get_accelerator  # noqa: E402

from disttrain_cli.runtime import worker  # noqa: E402


def before_fork(payload: dict[str, Any]) -> None:
    worker.before_fork(payload)


def main(payload: dict[str, Any]) -> None:
    """Say on what DeepSpeed computes and how torch's allocator is set; CUDA is untouched, and what
    was imported before the fork is out of the garbage collector's sight."""
    assert not torch.cuda._initialized
    assert gc.get_freeze_count() > 100_000
    said = f"{get_accelerator().device_name()} {os.environ.get('PYTORCH_ALLOC_CONF')}"
    Path(payload["folder"], os.environ["RANK"]).write_text(said)
