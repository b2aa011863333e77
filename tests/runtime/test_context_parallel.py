"""Context parallelism equals a single process in losses, gradient norms and parameters (fp32,
1e-5), with TP, DP, PP, freezing, recomputing, split backwards, ZeRO, images and generators.
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
from tests.runtime.equivalence_worker import check_equals, recorded, reference
from tests.runtime.factory import LORA, plan_of, unit, write_run
from tests.runtime.test_family_equivalence import FAMILIES

STEPS, RANKS, BATCH = 2, 8, 12
EYE, LLM, PAINTER = "image_encoder", "llm", "image_generator"


def shared(layers: list[int], cp: int, dp: int = 1, tp: int = 1, **how: Any) -> UnitPlan:
    """The LLM on CP groups."""
    one = unit("l", [LLM], layers, dp, tp)
    return one.model_copy(update={"cp": cp, "gpus": one.gpus * cp, **how})


def _alone(name: str, layers: int, **how: Any) -> UnitPlan:
    return unit({EYE: "e", PAINTER: "g"}[name], [name], [layers]).model_copy(update=how)


#: By name: model, units on up to eight ranks, sequences of a microbatch, what is trained, ZeRO
#: stage, whether messages go as over NCCL.
CASES: dict[str, tuple[str, list[UnitPlan], int, list[str] | None, int, bool]] = {
    "cp2": ("text", [shared([5], 2)], 1, None, 0, False),
    "cp4 dp2": ("text", [shared([5], 4, 2)], 1, None, 1, False),
    "tp2 cp2 pp2": ("text", [shared([2, 3], 2, 1, 2)], 2, None, 0, True),
    "tp2 cp2 dp2, tied, windows": ("windows", [shared([5], 2, 2, 2)], 1, None, 1, False),
    "cp2 pp2, tied": ("windows", [shared([2, 3], 2, weight_delay=[0, 1])], 2, None, 0, True),
    "tp2 cp2, adapters": ("adapters", [shared([5], 2, 1, 2)], 3, None, 0, False),
    "cp8": ("text", [shared([5], 8)], 2, None, 1, False),
    "everything, cp2 pp2": (
        "all",
        [_alone(EYE, 4), shared([2, 3], 2), _alone(PAINTER, 8)],
        1,
        None,
        0,
        True,
    ),
    "everything, cp4": (
        "all",
        [
            unit("e", [EYE], [4], 2),
            shared([5], 4, checkpointing=True),
            unit("g", [PAINTER], [8], 1, 2),
        ],
        2,
        None,
        1,
        False,
    ),
    "everything, tp2 cp2 overlapped": (
        "all",
        [
            unit("e", [EYE], [4], 1, 2),
            shared([5], 2, tp=2, tp_overlap=True),
            unit("g", [PAINTER], [8], 1, 2),
        ],
        1,
        None,
        0,
        True,
    ),
    "llm frozen": (
        "all",
        [unit("e", [EYE], [1, 3]), shared([2, 3], 2), unit("g", [PAINTER], [8], 2)],
        1,
        [EYE, PAINTER, "projectors"],
        0,
        False,
    ),
    "features over cuts": (
        "qwen3_vl",
        [unit("e", [EYE], [3, 4]), shared([2, 3], 2, weight_delay=[1, 0])],
        1,
        None,
        0,
        True,
    ),
    "features, tp2 cp2": (
        "qwen3_vl",
        [unit("e", [EYE], [7], 4), shared([5], 2, tp=2)],
        1,
        None,
        1,
        False,
    ),
    "llm alone trains, windows": (
        "qwen2_5_vl",
        [unit("e", [EYE], [5], 2), shared([2, 3], 2, 1)],
        1,
        [LLM],
        0,
        False,
    ),
}


def _run(folder: Path, data: Path, model: str, trained: list[str] | None, zero: int) -> Run:
    modules = (EYE, LLM) if model in FAMILIES else (EYE, LLM, PAINTER) if model == "all" else (LLM,)
    run = write_run(
        folder,
        data,
        name=folder.name,
        modules=modules,
        global_batch_size=BATCH,
        zero_stage=zero,
        steps=STEPS,
    )
    content = yaml.safe_load(run.path.read_text())
    content["cluster"]["gpus_per_node"] = RANKS
    content["data"]["sequence_length"] = 512
    content["model"]["trained"] = trained
    llm = content["model"]["modules"][LLM]
    if model == "windows":
        llm["architecture"] = "mistral"
        llm["config"] |= {"sliding_window": 24, "tie_word_embeddings": True}
    if model == "adapters":
        llm["lora"] = LORA[LLM] | {"lora_dropout": 0.2}
    if model in FAMILIES:
        tower, text = FAMILIES[model]
        modules = {EYE: {"kind": "encoder"} | tower, LLM: {"kind": "llm"} | text}
        content["model"]["modules"] = modules
    run.path.write_text(yaml.safe_dump(content, sort_keys=False))
    run = read_run(run.path)
    build_index(run, describe(run))
    return run


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Ranks train every layout, those of one number of ranks in the same processes; every model is
    trained alone once too."""
    folder = tmp_path_factory.mktemp("cp")
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
            timeout_s=900,
        )
    return {"out": folder / "out", "models": models}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_layout_equals_single_process(runs: dict[str, Any], name: str) -> None:
    model, _, _, trained, _, ordered = CASES[name]
    check_equals(runs["out"] / name, *runs["models"][model, str(trained)])
    if ordered:
        assert faults(recorded(runs["out"] / name)) == []
