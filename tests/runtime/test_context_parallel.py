"""Context parallelism equals a single process in losses, gradient norms and parameters (fp32,
1e-5), with TP, DP, PP, freezing, recomputing, split backwards, ZeRO, images and generators.
"""

from pathlib import Path
from typing import Any

import pytest
import yaml

from disttrain_cli.data.indexing.building import build_index
from disttrain_cli.data.sample_data import write_sample_data
from disttrain_cli.models.graph import describe
from disttrain_cli.spec.plan import UnitPlan
from disttrain_cli.spec.runfile import Run, read_run
from tests.runtime.factory import LORA, unit, write_run
from tests.runtime.layouts import Case, Models
from tests.runtime.test_family_equivalence import FAMILIES

STEPS, RANKS, BATCH = 2, 8, 12
EYE, LLM, PAINTER = "image_encoder", "llm", "image_generator"


def shared(layers: list[int], cp: int, dp: int = 1, tp: int = 1, **how: Any) -> UnitPlan:
    """The LLM on CP groups."""
    one = unit("l", [LLM], layers, dp, tp)
    return one.model_copy(update={"cp": cp, "gpus": one.gpus * cp, **how})


def _alone(name: str, layers: int, **how: Any) -> UnitPlan:
    return unit({EYE: "e", PAINTER: "g"}[name], [name], [layers]).model_copy(update=how)


#: On up to eight ranks; rows exchanged for heads.
CASES = {
    "cp2": Case("text", [shared([5], 2)], 1, None, 0, False),
    "cp4 dp2": Case("text", [shared([5], 4, 2)], 1, None, 1, False),
    "tp2 cp2 pp2": Case("text", [shared([2, 3], 2, 1, 2)], 2, None, 0, True),
    "tp2 cp2 dp2, tied, windows": Case("windows", [shared([5], 2, 2, 2)], 1, None, 1, False),
    "cp2 pp2, tied": Case("windows", [shared([2, 3], 2, weight_delay=[0, 1])], 2, None, 0, True),
    "tp2 cp2, adapters": Case("adapters", [shared([5], 2, 1, 2)], 3, None, 0, False),
    "cp8": Case("text", [shared([5], 8)], 2, None, 1, False),
    "everything, cp2 pp2": Case(
        "all",
        [_alone(EYE, 4), shared([2, 3], 2), _alone(PAINTER, 8)],
        1,
        None,
        0,
        True,
    ),
    "everything, cp4": Case(
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
    "everything, tp2 cp2 overlapped": Case(
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
    "llm frozen": Case(
        "all",
        [unit("e", [EYE], [1, 3]), shared([2, 3], 2), unit("g", [PAINTER], [8], 2)],
        1,
        [EYE, PAINTER, "projectors"],
        0,
        False,
    ),
    "features over cuts": Case(
        "qwen3_vl",
        [unit("e", [EYE], [3, 4]), shared([2, 3], 2, weight_delay=[1, 0])],
        1,
        None,
        0,
        True,
    ),
    "features, tp2 cp2": Case(
        "qwen3_vl",
        [unit("e", [EYE], [7], 4), shared([5], 2, tp=2)],
        1,
        None,
        1,
        False,
    ),
    "llm alone trains, windows": Case(
        "qwen2_5_vl",
        [unit("e", [EYE], [5], 2), shared([2, 3], 2, 1)],
        1,
        [LLM],
        0,
        False,
    ),
}
#: The same where groups gather keys and values, with tokens levelled by their work.
GATHERS = {
    "gathers, cp4 dp2": Case("text", [shared([5], 4, 2)], 1, None, 1, False),
    "gathers, tp2 cp2 pp2": Case("text", [shared([2, 3], 2, 1, 2)], 2, None, 0, True),
    "gathers, cp8": Case("text", [shared([5], 8)], 2, None, 1, False),
    "gathers, cp2 pp2, tied, windows": Case(
        "windows", [shared([2, 3], 2, weight_delay=[0, 1])], 2, None, 0, True
    ),
    "gathers, tp2 cp2, adapters": Case("adapters", [shared([5], 2, 1, 2)], 3, None, 0, False),
    "gathers, everything, cp4": Case(
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
    "gathers, everything, tp2 cp2 overlapped": Case(
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
    "gathers, llm frozen": Case(
        "all",
        [unit("e", [EYE], [1, 3]), shared([2, 3], 2), unit("g", [PAINTER], [8], 2)],
        1,
        [EYE, PAINTER, "projectors"],
        0,
        False,
    ),
    "gathers, features, tp2 cp2": Case(
        "qwen3_vl", [unit("e", [EYE], [7], 4), shared([5], 2, tp=2)], 1, None, 1, False
    ),
}
CASES |= {
    name: case._replace(
        units=[
            one.model_copy(update={"cp_comm_type": "all_gather"}) if one.cp > 1 else one
            for one in case.units
        ]
    )
    for name, case in GATHERS.items()
}


def _run(folder: Path, data: Path, case: Case) -> Run:
    model = case.model
    modules = (EYE, LLM) if model in FAMILIES else (EYE, LLM, PAINTER) if model == "all" else (LLM,)
    run = write_run(
        folder,
        data,
        name=folder.name,
        modules=modules,
        global_batch_size=BATCH,
        zero_stage=case.zero_stage,
        steps=STEPS,
    )
    content = yaml.safe_load(run.path.read_text())
    content["cluster"]["gpus_per_node"] = RANKS
    content["data"]["sequence_length"] = 512
    content["model"]["trained"] = case.trained
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
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    folder = tmp_path_factory.mktemp("cp")
    write_sample_data(folder / "data")
    return Models(CASES, lambda at, case: _run(at, folder / "data", case), STEPS, folder)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_layout_equals_single_process(models: Models, name: str) -> None:
    models.check(name)
