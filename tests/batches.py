"""Batches with other items than they came with, and their way through layers."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from disttrain_cli.models.layer import Batch


def through(
    layers: Iterable[Any], batch: Batch, state: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """The state behind the layers, from that at their entry."""
    state = dict(state or {})
    for layer in layers:
        state.update(layer(state, batch))
    return state


def changed(batch: Batch, item: str, **fields: Any) -> Batch:
    """A batch with other fields of the items of one modality, and nothing cached."""
    items = {**batch.items, item: replace(batch.items[item], **fields)}
    return replace(batch, items=items, cache={})
