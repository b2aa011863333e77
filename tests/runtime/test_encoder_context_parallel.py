"""Encoders whose images' rows CP groups share train as in a single process (losses, norms and
parameters, fp32, 1e-5): alone and beside an LLM that does likewise, with TP, DP, PP, freezing,
recomputing, split backwards, adapters, features over cuts, windows, tiles and newlines.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from disttrain_cli.data.index import build_index
from disttrain_cli.data.sample_data import write_sample_data
from disttrain_cli.models.graph import describe
from disttrain_cli.runtime.launching.launch import launch
from disttrain_cli.runtime.messages.proof import faults
from disttrain_cli.spec.plan import UnitPlan
from disttrain_cli.spec.runfile import Run, read_run
from tests.runtime import test_family_equivalence as families
from tests.runtime.equivalence_worker import check_equals, recorded, reference
from tests.runtime.factory import LORA, plan_of, unit, write_run

STEPS = 2
EYE, TILES, LLM, PAINTER = "image_encoder", "vision", "llm", "image_generator"


def _unit(
    modules: str | list[str],
    layers: list[int],
    cp: int = 1,
    dp: int = 1,
    tp: int = 1,
    **how: Any,
) -> UnitPlan:
    modules = [modules] if isinstance(modules, str) else modules
    one = unit("-".join(modules), modules, layers, dp, tp)
    return one.model_copy(update={"cp": cp, "gpus": one.gpus * cp, **how})


Case = tuple[str, list[UnitPlan], int, list[str] | None, int, bool]
#: By name: model, units on up to eight ranks, sequences of a microbatch, what is trained, ZeRO
#: stage, whether messages go as over NCCL. The tests' ViT has four layers, their LLM five; Qwen3's
#: tower seven, Qwen2.5's five, InternVL's four.
CASES: dict[str, Case] = {
    "vit cp2": (
        "all",
        [_unit(EYE, [4], 2), _unit(LLM, [5]), _unit(PAINTER, [8])],
        2,
        None,
        0,
        True,
    ),
    "vit cp4 recomputed, llm cp2": (
        "all",
        [_unit(EYE, [4], 4, checkpointing=True), _unit(LLM, [5], 2), _unit(PAINTER, [8], 1, 2)],
        1,
        None,
        1,
        False,
    ),
    "vit cp2 pp2 later, llm cp2": (
        "all",
        [_unit(EYE, [2, 2], 2, weight_delay=[0, 1]), _unit(LLM, [5], 2), _unit(PAINTER, [8])],
        1,
        None,
        0,
        True,
    ),
    "vit frozen, tp2 cp2": (
        "all",
        [_unit(EYE, [4], 2, 1, 2), _unit(LLM, [5], 1, 2), _unit(PAINTER, [8])],
        1,
        [LLM, "projectors"],
        0,
        False,
    ),
    "vit with adapters, cp2": (
        "adapters",
        [_unit(EYE, [4], 2), _unit(LLM, [5], 2)],
        1,
        None,
        0,
        False,
    ),
    "monolithic cp2 pp2": ("text", [_unit([EYE, LLM], [5, 4], 2)], 1, None, 1, True),
    "monolithic tp2 cp2 overlapped": (
        "text",
        [_unit([EYE, LLM], [9], 2, 1, 2, tp_overlap=True)],
        2,
        None,
        0,
        True,
    ),
    "qwen2.5 cp4": ("qwen2_5_vl", [_unit(EYE, [5], 4), _unit(LLM, [5], 2)], 2, None, 0, True),
    "qwen2.5 tp2 cp2, dp2": (
        "qwen2_5_vl",
        [_unit(EYE, [5], 2, 1, 2), _unit(LLM, [5], 1, 2)],
        1,
        [EYE],
        1,
        False,
    ),
    "qwen3 cp2 pp2, llm tp2 cp2": (
        "qwen3_vl",
        [_unit(EYE, [3, 4], 2, weight_delay=[1, 0]), _unit(LLM, [5], 2, 1, 2)],
        1,
        None,
        0,
        True,
    ),
    "qwen3 cp2 dp2": ("qwen3_vl", [_unit(EYE, [7], 2, 2), _unit(LLM, [2, 3])], 1, None, 1, False),
    "internvl cp2, overlapped tp2": (
        "internvl",
        [_unit(EYE, [4], 2, 1, 2, tp_overlap=True), _unit(LLM, [5], 2)],
        2,
        None,
        0,
        True,
    ),
    "smolvlm cp2 pp2": (
        "smolvlm",
        [_unit(TILES, [3, 2], 2), _unit(LLM, [4], 2)],
        1,
        None,
        0,
        False,
    ),
    "onevision cp4": (
        "llava_onevision",
        [_unit(TILES, [5], 4, checkpointing=True), _unit(LLM, [2, 2])],
        1,
        None,
        0,
        True,
    ),
    "onevision tp2 cp2": (
        "llava_onevision",
        [_unit(TILES, [5], 2, 1, 2), _unit(LLM, [4], 2)],
        2,
        None,
        1,
        False,
    ),
}


def _run(folder: Path, data: Path, model: str, trained: list[str] | None, zero: int) -> Run:
    if model in families.FAMILIES or model in families.WHOLE:
        run = families._run(folder, data, model, trained)
    else:
        modules = (EYE, LLM, PAINTER) if model == "all" else (EYE, LLM)
        run = write_run(folder, data, name=folder.name, modules=modules, steps=STEPS)
    content = yaml.safe_load(run.path.read_text())
    content["cluster"]["gpus_per_node"] = 8
    content["data"]["sequence_length"] = 512
    content["train"] |= {"global_batch_size": 12, "zero_stage": zero}
    content["model"]["trained"] = trained
    if model == "adapters":
        for name in (EYE, LLM):
            content["model"]["modules"][name]["lora"] = LORA[name]
    run.path.write_text(yaml.safe_dump(content, sort_keys=False))
    run = read_run(run.path)
    build_index(run, describe(run))
    return run


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Ranks train every layout, those of one number of ranks in the same processes; every model is
    trained alone once too."""
    folder = tmp_path_factory.mktemp("shared")
    write_sample_data(folder / "data")
    payloads: dict[int, list[Any]] = {}
    models: dict[Any, Any] = {}
    for number, (name, (model, units, microbatch, trained, zero, ordered)) in enumerate(
        CASES.items()
    ):
        run = _run(folder / f"run-{number}", folder / "data", model, trained, zero)
        plan = plan_of(run, units, microbatch)
        plan = plan.model_copy(update={"plan": plan.plan.model_copy(update={"trained": trained})})
        payloads.setdefault(plan.plan.gpus_used, []).append(
            {
                "name": name,
                "run": str(run.path.resolve()),
                "plan": plan.model_dump(mode="json"),
                "steps": STEPS,
                "in order": ordered,
                "out": str(folder / "out" / name),
            }
        )
        if (model, str(trained)) not in models:
            alone = _run(folder / f"alone-{number}", folder / "data", model, trained, 0)
            models[model, str(trained)] = reference(alone, STEPS)[:2]
    for ranks, cases in payloads.items():
        launch(
            ranks,
            "tests.runtime.equivalence_worker:ranks",
            {"cases": cases},
            folder / "logs" / str(ranks),
            timeout_s=1500,
        )
    return {"out": folder / "out", "models": models}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_layout_equals_single_process(runs: dict[str, Any], name: str) -> None:
    model, _, _, trained, _, ordered = CASES[name]
    check_equals(runs["out"] / name, *runs["models"][model, str(trained)])
    if ordered:
        assert faults(recorded(runs["out"] / name)) == []
