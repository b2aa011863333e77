"""Construction of layers whose initial weights depend only on the run's seed and the layer."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from disttrain_cli.models.empty_weights import STARTS
from disttrain_cli.models.experts import shard_experts
from disttrain_cli.models.layer import ADAPTER, PipelineLayer
from disttrain_cli.models.lora import Lora, adapt, draw
from disttrain_cli.models.tensor_parallel import shard


@dataclass(frozen=True)
class LayerMaker:
    """Layer factory: constructs one layer and initialises its weights.

    `std` is the standard deviation of normally drawn weights (biases zero, norms one), None for
    each class's own defaults, or a function that initialises the layer. `drawn_as` names the layer
    whose initial weights are copied (the embedding's, for a tied head), if not its own. `lora` are
    the adapters of its module, if any.
    """

    construct: Callable[[], PipelineLayer]
    std: float | Callable[[nn.Module], None] | None
    drawn_as: str | None = None
    lora: Lora | None = None

    def on_meta(self) -> PipelineLayer:
        """Return the layer without memory for its weights."""
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
        ep: int = 1,
        ep_rank: int = 0,
    ) -> PipelineLayer:
        """Return the layer with its initial weights, always drawn on the CPU in float32.

        With `tp` the layer is one rank's shard. With `tp_rank` it is that rank's shard of the same
        weights as the unsharded layer's, which occupies the CPU's memory meanwhile; without, the
        shard is drawn on its own: right shapes only, for measurements. With `ep` it has the experts
        of a rank of an EP group.
        """
        layer = self.on_meta() if tp_rank is not None else shard(self.on_meta(), tp=tp)
        if torch.device(device).type == "meta":
            return layer.to(device="meta", dtype=dtype)
        buffers = dict(layer.named_buffers())
        assert not any(buffer.is_meta for buffer in buffers.values()), "a buffer without a value"
        layer.to_empty(device="cpu")
        for name, buffer in buffers.items():
            layer.get_buffer(name).copy_(buffer)
        with torch.random.fork_rng(devices=[]):
            digest = hashlib.sha256(f"{seed}/{self.drawn_as or layer.name}".encode()).digest()
            torch.manual_seed(int.from_bytes(digest[:7], "big"))
            if callable(self.std):
                self.std(layer)
            else:
                _initialise(layer, self.std)
        draw(layer, seed)
        if tp_rank is not None:
            shard(layer, tp=tp, rank=tp_rank)
        shard_experts(layer, ep=ep, rank=ep_rank)
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
        for name, value in part.__dict__.get(STARTS, {}).items():
            part.get_parameter(name).copy_(value)
