"""Adapters in layouts of four ranks: losses, gradient norms and weights equal a single process
(fp32, 1e-5), and the modules' own weights stay as they were."""

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
from tests.runtime.equivalence_worker import check_equals, reference
from tests.runtime.factory import LORA, MODEL, plan_of, unit, write_run
from tests.runtime.layouts import train

RANKS, STEPS, BATCH = 4, 3, 4
ENCODER, LLM, GENERATOR = EVERYTHING = tuple(MODEL["modules"])
COUNTS = (4, 5, 8)
ALL = sum(COUNTS)


def _later(one: UnitPlan, *delays: int) -> UnitPlan:
    return one.model_copy(update={"weight_delay": list(delays)})


def _with(one: UnitPlan, **fields: Any) -> UnitPlan:
    return one.model_copy(update=fields)


def _apart(encoder: int, llm: tuple[int, ...], tp: int = 1) -> list[UnitPlan]:
    return [
        unit("e", [ENCODER], [COUNTS[0]], encoder),
        unit("l", [LLM], list(llm), 1, tp),
        unit("g", [GENERATOR], [COUNTS[2]]),
    ]


#: Name → (units, ZeRO stage, whether messages run beside computing).
LAYOUTS: dict[str, tuple[list[UnitPlan], int, bool]] = {
    "tp4": ([unit("all", list(EVERYTHING), [ALL], 1, 4)], 0, False),
    "tp2-dp2-zero1": ([unit("all", list(EVERYTHING), [ALL], 2, 2)], 1, False),
    "tp2-pp2-overlapped": (
        [_with(unit("all", list(EVERYTHING), [8, 9], 1, 2), tp_overlap=True)],
        0,
        False,
    ),
    "dp4-zero1-beside": ([unit("all", list(EVERYTHING), [ALL], 4)], 1, True),
    "pp4": ([unit("all", list(EVERYTHING), [2, 3, 4, 8])], 0, False),
    "pp2-dp2-later": ([_later(unit("all", list(EVERYTHING), [6, 11], 2), 1, 0)], 0, True),
    "tp2-dp2-later": ([_later(unit("all", list(EVERYTHING), [ALL], 2, 2), 1)], 1, True),
    "tp2-pp2-recomputed": (
        [_with(unit("all", list(EVERYTHING), [8, 9], 1, 2), checkpointing=True)],
        0,
        False,
    ),
    "apart-tp2": (_apart(1, (5,), 2), 0, False),
    "apart-pp2": (_apart(1, (2, 3)), 0, False),
    "apart-dp2": (_apart(2, (5,)), 1, False),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Four ranks train every layout in the same processes; the reference trains alone."""
    folder = tmp_path_factory.mktemp("lora")
    write_sample_data(folder / "data")
    cases = []
    for name, (units, zero_stage, beside) in LAYOUTS.items():
        run = write_run(
            folder / name,
            folder / "data",
            name=name,
            lora=LORA,
            zero_stage=zero_stage,
            global_batch_size=BATCH,
        )
        build_index(run, describe(run), silent)
        cases.append((name, run, plan_of(run, units, 1, beside)))
    out = train(cases, STEPS, folder)
    alone = write_run(
        folder / "tp4", folder / "data", name="tp4", lora=LORA, global_batch_size=BATCH
    )
    return {
        "out": out,
        "run": alone,
        "data": folder / "data",
        "reference": reference(alone, STEPS)[:2],
    }


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_layout_equals_single_process(runs: dict[str, Any], name: str) -> None:
    check_equals(runs["out"] / name, *runs["reference"])


@pytest.mark.slow
def test_only_adapters_and_projectors_move(runs: dict[str, Any]) -> None:
    run, (_, parameters) = runs["run"], runs["reference"]
    moved = {
        f"{layer.name}/{path}": not torch.equal(before, parameters[f"{layer.name}/{path}"])
        for layer in build_layers(run, 0, len(layer_table(run)))
        for path, before in layer.named_parameters()
    }
    layers = {layer.name: layer for layer in build_layers(run, 0, len(layer_table(run)), "meta")}
    trained = {
        name for name in moved if layers[name.partition("/")[0]].trains(name.partition("/")[2])
    }
    assert {name for name, differs in moved.items() if differs} <= trained
    still = {name for name in trained if not moved[name]}
    assert all("projector/norm" in name for name in still), still
    assert {"llm.embed/embedding.weight", "llm.head/lm_head.weight"} < trained
    assert sum(map(is_adapter, trained)) > 100


@pytest.mark.slow
def test_adapters_drop_what_they_read(runs: dict[str, Any], tmp_path: Path) -> None:
    none = {name: spec | {"lora_dropout": 0.0} for name, spec in LORA.items()}
    plain = write_run(tmp_path, runs["data"], lora=none, global_batch_size=BATCH)
    build_index(plain, describe(plain), silent)
    _, parameters = reference(plain, STEPS)[:2]
    _, dropped = runs["reference"]
    differ = {
        name.partition(".")[0]
        for name, values in parameters.items()
        if is_adapter(name) and (values - dropped[name]).abs().max() > 1e-4
    }
    assert differ == set(EVERYTHING)
