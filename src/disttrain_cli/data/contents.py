"""Samples in each slot of a step: a global batch in traces (`spec.trace.SAMPLE_COLUMNS`)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from disttrain_cli.data.index.sample_index import Index
from disttrain_cli.data.packing import Packing
from disttrain_cli.data.slots import StepOrder
from disttrain_cli.spec.plan import Layout


def contents(order: StepOrder, batch: Packing, layout: Layout) -> Iterator[dict[str, Any]]:
    """Yield a row for every packed sequence of a step, with the LLM replica that processes it."""
    for number, slot in enumerate(order.slots):
        unit = layout.unit_of(slot.inputs.llm).name
        for replica, items in enumerate(slot.replicas[unit]):
            for index in items["sequence"].tolist():
                sequence = int(slot.sequences[index])
                at = sequence - int(batch.ids[0])
                samples = batch.samples[
                    batch.sample_start[at] : batch.sample_start[at + 1]
                ].tolist()
                yield {
                    "slot": number,
                    "unit": unit,
                    "replica": replica,
                    "sequence": sequence,
                    "tokens": int(slot.sequence_tokens[index]),
                    "samples": samples,
                    "names": [_name(batch.index, sample) for sample in samples],
                }


def _name(index: Index, sample: int) -> str:
    """Return a sample's name, its key in its shard; drawn samples have no shard."""
    shard = f"{index.shards[index.shard[sample]].name}/" if index.shards else ""
    return f"{shard}{index.keys[sample]}"
