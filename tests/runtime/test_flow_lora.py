"""Adapters of flows over joint attention, on all that can have one and with dropout, in layouts of
four ranks: equal to a single process (fp32, 1e-5)."""

from pathlib import Path
from typing import Any

import pytest
import torch

from disttrain_cli.data.indexing.building import build_index
from disttrain_cli.data.sample_data import write_sample_data
from disttrain_cli.models.graph import build_layers, describe, layer_table
from disttrain_cli.models.layer import is_adapter
from disttrain_cli.spec.plan import UnitPlan
from disttrain_cli.spec.progress import silent
from disttrain_cli.spec.runfile import Run
from tests.runtime.equivalence_worker import check_equals, reference
from tests.runtime.factory import plan_of, unit, write_run
from tests.runtime.layouts import train
from tests.runtime.test_flow import BATCH, LLM, MURAL, PAINTER, STEPS

MODULES = (LLM, PAINTER, MURAL)
#: Layers of the LLM, and of the painter with its VAE and the mural.
COUNTS = (5, 7 + 6)
ADAPTERS = {
    name: {"r": 2, "lora_alpha": 5, "lora_dropout": 0.3, "target_modules": "all-linear"}
    for name in (PAINTER, MURAL)
}
LAYOUTS: dict[str, tuple[list[UnitPlan], int]] = {
    "tp4": ([unit("all", list(MODULES), [sum(COUNTS)], 1, 4)], 0),
    "tp2-dp2-zero1": ([unit("all", list(MODULES), [sum(COUNTS)], 2, 2)], 1),
    "pp4": ([unit("all", list(MODULES), [5, 5, 3, 5])], 0),
    "apart-tp2-recomputed": (
        [
            unit("l", [LLM], [COUNTS[0]], 2),
            unit("g", [PAINTER, MURAL], [COUNTS[1]], 1, 2).model_copy(
                update={"checkpointing": True}
            ),
        ],
        0,
    ),
}


def written(folder: Path, data: Path, **train: Any) -> Run:
    run = write_run(
        folder,
        data,
        name="flow",
        modules=MODULES,
        lora=ADAPTERS,
        global_batch_size=BATCH,
        **train,
    )
    build_index(run, describe(run), silent)
    return run


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Four ranks train every layout in the same processes; the reference trains alone."""
    folder = tmp_path_factory.mktemp("flow_lora")
    write_sample_data(folder / "data")
    cases = []
    for name, (units, zero_stage) in LAYOUTS.items():
        run = written(folder / name, folder / "data", zero_stage=zero_stage)
        cases.append((name, run, plan_of(run, units, 1)))
    alone = written(folder / "alone", folder / "data")
    out = train(cases, STEPS, folder)
    return {"out": out, "run": alone, "reference": reference(alone, STEPS)[:2]}


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_layout_equals_single_process(runs: dict[str, Any], name: str) -> None:
    check_equals(runs["out"] / name, *runs["reference"])


@pytest.mark.slow
def test_adapters_move_and_what_they_hang_on_does_not(runs: dict[str, Any]) -> None:
    run, (_, parameters) = runs["run"], runs["reference"]
    moved = {
        f"{layer.name}/{path}": not torch.equal(before, parameters[f"{layer.name}/{path}"])
        for layer in build_layers(run, 0, len(layer_table(run)))
        if layer.module in ADAPTERS and layer.kind not in ("projector", "vae_encoder")
        for path, before in layer.named_parameters()
    }
    # the last block's queries of the conditioning lead nowhere; A decays
    unread = f"{PAINTER}.block.2/block.attn.add_q_proj.lora_B.weight"
    expected = {name for name in moved if is_adapter(name)} - {unread}
    assert {name for name, differs in moved.items() if differs} == expected
