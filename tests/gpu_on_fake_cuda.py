"""A part of `benchmarks.gpu` on a fake CUDA device of which every call takes 20 ms."""

from pathlib import Path
from typing import Any
from unittest.mock import patch

DEVICE = "NVIDIA H100 80GB HBM3"


def figures_of(part: str, folder: str) -> dict[str, Any]:
    """What the part tells."""
    import torch
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    from benchmarks.gpu import modules
    from benchmarks.gpu.parts import run_part
    from benchmarks.gpu.setting import Setting
    from disttrain_cli.models.probe import probe_batch
    from tests.models.executed import _on_device

    def batch_of(inputs: Any, device: Any, **sizes: Any) -> Any:
        with unset_fake_temporarily():  # which rows hold tokens is read from their values
            batch = probe_batch(inputs, device="meta" if device == "meta" else "cpu", **sizes)
        return batch if device == "meta" else _on_device(batch)

    setting = Setting("cuda", Path(folder), Path(folder) / "figures.json")
    with (
        patch.object(modules, "probe_batch", batch_of),
        patch.object(modules, "kernels", lambda *_: []),  # torch's profiler wants a real device
        patch.object(torch.cuda, "get_device_name", lambda *_: DEVICE),
        patch.object(torch.cuda.Event, "elapsed_time", lambda *_: 20.0),
    ):
        return run_part(part, setting)
