"""Moving averages are those of one process, whoever keeps which part of them."""

from pathlib import Path
from typing import Any

import pytest
import torch

from disttrain_cli.errors import SpecError
from disttrain_cli.runtime.checkpoints.averaging import Average
from disttrain_cli.spec.runfile.train import EmaSpec
from tests.runtime.checkpoints.checkpoint_parts import engine_of
from tests.runtime.factory import write_run

DECAY = 0.9
LAYOUTS: list[dict[str, Any]] = [
    {"dp": 1},
    {"dp": 3},
    {"dp": 3, "tp": 2},
    {"dp": 2, "tp": 2, "zero": True},
]


def _averaged(layout: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The ranks' averages put together, after two steps that moved all weights by 1 and by 2."""
    found: dict[str, torch.Tensor] = {}
    for replica in range(layout["dp"]):
        for tp_rank in range(layout.get("tp", 1)):
            engine = engine_of(1, **layout, replica=replica, tp_rank=tp_rank)
            average = Average(engine, EmaSpec(decay=DECAY, modules=["llm"]))
            with torch.no_grad():
                for moved in (1.0, 2.0):
                    for parameter in (
                        p for layer in engine.module.layers for p in layer.parameters()
                    ):
                        parameter += moved
                        if getattr(parameter, "_hp_mapping", None) is not None:
                            parameter._hp_mapping.hp_fragment += moved
                    average.update()
            for part, values in average.values():
                pieces = part.pieces(values)
                whole = found.setdefault(part.name, torch.full(pieces.shape, torch.nan))
                for offsets, box in pieces.boxes:
                    whole[
                        tuple(
                            slice(at, at + size)
                            for at, size in zip(offsets, box.shape, strict=True)
                        )
                    ] = box
    return found


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_averages_are_those_of_one_process(layout: dict[str, Any]) -> None:
    found = _averaged(layout)
    for layer in engine_of(1).module.layers:
        for name, weight in layer.named_parameters():
            average = weight.detach().clone()
            for moved in (1.0, 3.0):
                average = DECAY * average + (1 - DECAY) * (weight.detach() + moved)
            assert torch.allclose(found[f"{layer.name}/{name}"], average, atol=1e-6), name


def test_only_the_chosen_modules_are_averaged() -> None:
    assert not Average(engine_of(1), EmaSpec(decay=DECAY, modules=["image_generator"])).values()


def test_an_unknown_module_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        SpecError, match=r"train.ema.modules: no such module: generatr; allowed: image_encoder, "
    ):
        write_run(tmp_path, tmp_path, ema={"modules": ["generatr"]})
