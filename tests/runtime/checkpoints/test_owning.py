"""Every value of the state is kept by one rank, and every rank gets back all it needs."""

from collections import defaultdict
from typing import Any

import pytest
import torch

from disttrain_cli.models.division import piece, shard_of
from disttrain_cli.runtime.checkpoints.owning import (
    allocate_moments,
    named_parameters,
    staged,
    wanted,
)
from tests.runtime.checkpoints.checkpoint_parts import SHAPES, engine_of

LAYOUTS = [
    {"dp": 1},
    {"dp": 3},
    {"dp": 3, "zero": True},
    {"dp": 2, "tp": 2},
    {"dp": 3, "tp": 2, "zero": True},
    {"dp": 5, "tp": 1, "zero": True},
    {"dp": 40},
]


def _ranks(layout: dict[str, Any], seed: int = 1) -> list[Any]:
    engines = [
        engine_of(seed, **layout, replica=replica, tp_rank=tp_rank)
        for replica in range(layout["dp"])
        for tp_rank in range(layout.get("tp", 1))
    ]
    for engine in engines:
        allocate_moments(engine)
    return engines


def _saved(engines: list[Any]) -> dict[str, torch.Tensor]:
    """What the ranks keep, put together; a value that two of them keep, or none, becomes NaN."""
    found: dict[str, torch.Tensor] = {}
    times: dict[str, torch.Tensor] = defaultdict(lambda: torch.tensor(0))
    for engine in engines:
        for key, part, values in staged(engine):
            pieces = part.pieces(values)
            found.setdefault(key, torch.zeros(pieces.shape))
            times[key] = times[key].expand(pieces.shape).clone()
            for offsets, box in pieces.boxes:
                place = tuple(
                    slice(at, at + size) for at, size in zip(offsets, box.shape, strict=True)
                )
                found[key][place] = box
                times[key][place] += 1
    return {key: torch.where(times[key] == 1, values, torch.nan) for key, values in found.items()}


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_all_ranks_together_keep_everything_once(layout: dict[str, Any]) -> None:
    expected, found = _saved(_ranks({"dp": 1})), _saved(_ranks(layout))
    assert len(expected) == 2 * len(SHAPES) * 3 and expected.keys() == found.keys()
    for key, values in expected.items():
        assert torch.equal(found[key], values), key


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_rank_gets_what_it_needs_of_any_layout(layout: dict[str, Any]) -> None:
    stored, engines = _saved(_ranks({"dp": 1}, seed=9)), _ranks(layout)
    for engine in engines:
        for key, pieces in wanted(engine, ["llm"]).items():
            assert pieces.shape == stored[key].shape
            for offsets, box in pieces.boxes:
                place = tuple(
                    slice(at, at + size) for at, size in zip(offsets, box.shape, strict=True)
                )
                box.copy_(stored[key][place])
    for key, values in _saved(engines).items():
        assert torch.equal(values, stored[key]), key
    for engine in engines:
        for name, parameter in named_parameters(engine.module.layers):
            assert torch.equal(parameter, piece(stored[f"weight/{name}"], shard_of(parameter))), (
                name
            )


def test_shares_are_level() -> None:
    counts = [
        sum(values.numel() for _, _, values in staged(engine)) for engine in _ranks({"dp": 6})
    ]
    assert max(counts) - min(counts) <= 6
