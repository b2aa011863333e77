"""Building a layer anywhere with weights that depend on nothing but the run's seed and the layer's
name."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass

import torch

from disttrain_cli.models.layer import ADAPTER, PipelineLayer
from disttrain_cli.models.lora import Lora, adapt, draw
from disttrain_cli.models.tensor_parallel import shard


@dataclass(frozen=True)
class LayerMaker:
    """How to construct one layer, and how its weights start.

    `std` is the deviation of normal weights (biases zero, norms one), or None for each class's own
    defaults. `drawn_as` names a layer whose normal weights these are a copy of (a head's, of the
    embedding), if not its own. `lora` are the adapters of its module, if it has some.
    """

    construct: Callable[[], PipelineLayer]
    std: float | None
    drawn_as: str | None = None
    lora: Lora | None = None

    def on_meta(self) -> PipelineLayer:
        """The layer without memory for its weights."""
        with torch.device("meta"):
            layer = self.construct()
            if self.lora is not None:
                adapt(layer, self.lora)
        return layer

    def build(
        self,
        seed: int,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        *,
        tp: int = 1,
        tp_rank: int | None = None,
    ) -> PipelineLayer:
        """The layer with its initial weights, drawn on the CPU in float32 on any device.

        With `tp` one rank's part of it. With `tp_rank` that rank's part of the very weights that
        the whole layer has, which is in the CPU's memory meanwhile; else drawn for itself: of the
        right shapes, for measuring.
        """
        layer = self.on_meta() if tp_rank is not None else shard(self.on_meta(), tp=tp)
        if torch.device(device).type == "meta":
            return layer.to(dtype)
        assert not list(layer.buffers()), "a buffer's value would be lost on the meta device"
        layer.to_empty(device="cpu")
        with torch.random.fork_rng(devices=[]):
            digest = hashlib.sha256(f"{seed}/{self.drawn_as or layer.name}".encode()).digest()
            torch.manual_seed(int.from_bytes(digest[:7], "big"))
            _initialise(layer, self.std)
        draw(layer, seed)
        if tp_rank is not None:
            shard(layer, tp=tp, rank=tp_rank)
        return layer.to(device=device, dtype=dtype)


@torch.no_grad()
def _initialise(layer: PipelineLayer, std: float | None) -> None:
    for path, part in layer.named_modules():
        if path.endswith(ADAPTER):
            continue
        if std is None and hasattr(part, "reset_parameters"):
            part.reset_parameters()
            continue
        for name, parameter in part.named_parameters(recurse=False):
            if parameter.ndim == 1:
                parameter.fill_(layer.starts.get(name, 1.0 if name == "weight" else 0.0))
            else:
                parameter.normal_(0.0, 0.02 if std is None else std)
