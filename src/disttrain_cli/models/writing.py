"""Text generation: encoders once, then the LLM's layers token by token.

Every token runs its sequence again, as far as it is written: simple, the same for any family of
decoders, and slow for long texts.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from disttrain_cli.models.decoder import Head
from disttrain_cli.models.layer import Batch, Items, PipelineLayer
from disttrain_cli.spec.inputs import ModelInputs

#: Tokens by which sequences grow: some room behind them costs less than a new batch per token.
ROOM = 8


@torch.no_grad()
def write(
    layers: Sequence[PipelineLayer],
    batch: Batch,
    inputs: ModelInputs,
    lengths: Sequence[int],
    *,
    most: int,
    ends: Collection[int],
    allowed: Tensor,
    temperature: float = 0.0,
    seed: int = 0,
) -> list[list[int]]:
    """Return the token ids generated after each sequence of a batch.

    Generation stops after `most` tokens or before one of the tokens `ends`. `layers` is the whole
    model on one device. The first `lengths[m]` tokens of sequence m are the prompt; its other
    positions are to be filled. Only ids for which `allowed` [V] is true are generated. Temperature
    0 selects the likeliest token, else one is sampled: sequence m's from (seed, m), the same on any
    device.
    """
    assert batch.token_ids is not None
    ids = batch.token_ids.clone()
    count, width = ids.shape
    *decoder, head = [layer for layer in layers if layer.module == inputs.llm]
    assert isinstance(head, Head)
    read: dict[str, Tensor] = {}
    for layer in (layer for layer in layers if layer.module in inputs.encoders):
        read.update(layer(read, batch))
    draws = [
        torch.Generator("cpu").manual_seed((seed * 1_000_003 + number) % 2**63)
        for number in range(count)
    ]
    written: list[list[int]] = [[] for _ in range(count)]
    going = [number for number in range(count) if most and lengths[number] < width]
    begun, filled = batch, 0
    while going:
        at = [lengths[number] + len(written[number]) for number in going]
        if max(at) > filled:
            filled = min(width, max(*lengths, *at) + ROOM)  # all prompts' items are among them
            begun = _beginning(batch, filled)
        state = dict(read)
        begun = replace(begun, token_ids=ids[:, :filled].contiguous(), cache={})
        for layer in decoder:
            state.update(layer(state, begun))
        rows = torch.tensor(
            [number * filled + index - 1 for number, index in zip(going, at, strict=True)]
        )
        logits = head.logits(state["hidden"].index_select(0, rows.to(state["hidden"].device)))
        chosen = [
            _choose(row, temperature, draws[number])
            for row, number in zip(
                logits.masked_fill(~allowed, -torch.inf).cpu(), going, strict=True
            )
        ]
        open_rows = []
        for number, index, token in zip(going, at, chosen, strict=True):
            if token not in ends:
                written[number].append(token)
                ids[number, index] = token
                open_rows += [number] if index + 1 < width and len(written[number]) < most else []
        going = open_rows
    return written


def _beginning(batch: Batch, filled: int) -> Batch:
    """Return the first tokens of every sequence of a batch; the items are all among them."""
    assert batch.token_ids is not None and batch.positions is not None
    count, width = batch.token_ids.shape

    def moved(items: Items) -> Items:
        def at(rows: Any) -> Any:
            return None if rows is None else rows // width * filled + rows % width

        return replace(items, rows=at(items.rows), at=at(items.at))

    return replace(
        batch,
        items={item: moved(items) for item, items in batch.items.items()},
        positions=batch.positions[..., :filled].contiguous(),
        sample_lengths=[filled] * count,
    )


def _choose(logits_V: Tensor, temperature: float, draws: torch.Generator) -> int:
    if not temperature:
        return int(logits_V.argmax())
    return int(
        torch.multinomial(torch.softmax(logits_V.double() / temperature, dim=0), 1, generator=draws)
    )
