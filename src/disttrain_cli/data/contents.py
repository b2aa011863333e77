"""Which samples are in which slot of a step: what the traces say of a global batch
(`spec.trace.SAMPLE_COLUMNS`)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from disttrain_cli.data.index import Index
from disttrain_cli.data.packing import Packing
from disttrain_cli.data.slots import StepOrder
from disttrain_cli.spec.plan import Layout


def contents(order: StepOrder, batch: Packing, layout: Layout) -> Iterator[dict[str, Any]]:
    """A row for every packed sequence of a step, where the LLM's replicas work on it.

    Args:
        batch: the step's global batch, in the order of the stream.
    """
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
    """What a sample is called: its key in its shard; drawn ones have no shard."""
    shard = f"{index.shards[index.shard[sample]].name}/" if index.shards else ""
    return f"{shard}{index.keys[sample]}"
