"""TP sizes that fit a run's modules."""

from __future__ import annotations

from disttrain_cli.models.graph import build_layers, layer_table
from disttrain_cli.models.layer import PipelineLayer
from disttrain_cli.models.tensor_parallel import pieces
from disttrain_cli.spec.runfile import Run


def tp_degrees(run: Run, module: str, most: int) -> list[int]:
    """Return the TP sizes that fit a module, ascending.

    They are the divisors of `most` that divide heads, KV heads, FFN widths and vocabulary. A layer
    that no rule shards (convolutions, a ViT's embedding) is replicated at any TP size.

    Raises:
        SpecError: the model's configuration is wrong.
    """
    counts = {count for layer in _one_of_each_kind(run, module).values() for count in pieces(layer)}
    return [
        tp
        for tp in range(1, most + 1)
        if most % tp == 0 and not any(count % tp for count in counts)
    ]


def _one_of_each_kind(run: Run, module: str) -> dict[int, PipelineLayer]:
    """Return the first layer of every kind in a module on meta, by its index in the model."""
    first: dict[str, int] = {}
    for index, info in enumerate(layer_table(run)):
        if info.module == module:
            first.setdefault(info.kind, index)
    return {
        index: build_layers(run, index, index + 1, device="meta")[0] for index in first.values()
    }
