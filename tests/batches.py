"""Batches with other items than they came with."""

from dataclasses import replace
from typing import Any

from disttrain_cli.models.layer import Batch


def changed(batch: Batch, item: str, **fields: Any) -> Batch:
    """A batch with other fields of the items of one modality, and nothing cached."""
    items = {**batch.items, item: replace(batch.items[item], **fields)}
    return replace(batch, items=items, cache={})
