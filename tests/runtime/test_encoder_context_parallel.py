"""Encoders whose images' rows CP groups share train as in a single process (losses, norms and
parameters, fp32, 1e-5): alone and beside an LLM that does likewise, with TP, DP, PP, freezing,
recomputing, split backwards, adapters, features over cuts, windows, tiles and newlines.
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
from tests.runtime import test_family_equivalence as families
from tests.runtime.factory import LORA, unit, write_run
from tests.runtime.layouts import Case, Models

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


#: On up to eight ranks. The tests' ViT has four layers, their LLM five; Qwen3's
#: tower seven, Qwen2.5's five, InternVL's four.
CASES = {
    "vit cp2": Case(
        "all",
        [_unit(EYE, [4], 2), _unit(LLM, [5]), _unit(PAINTER, [8])],
        2,
        None,
        0,
        True,
    ),
    "vit cp4 recomputed, llm cp2": Case(
        "all",
        [_unit(EYE, [4], 4, checkpointing=True), _unit(LLM, [5], 2), _unit(PAINTER, [8], 1, 2)],
        1,
        None,
        1,
        False,
    ),
    "vit cp2 pp2 later, llm cp2": Case(
        "all",
        [_unit(EYE, [2, 2], 2, weight_delay=[0, 1]), _unit(LLM, [5], 2), _unit(PAINTER, [8])],
        1,
        None,
        0,
        True,
    ),
    "vit frozen, tp2 cp2": Case(
        "all",
        [_unit(EYE, [4], 2, 1, 2), _unit(LLM, [5], 1, 2), _unit(PAINTER, [8])],
        1,
        [LLM, "projectors"],
        0,
        False,
    ),
    "vit with adapters, cp2": Case(
        "adapters",
        [_unit(EYE, [4], 2), _unit(LLM, [5], 2)],
        1,
        None,
        0,
        False,
    ),
    "monolithic cp2 pp2": Case("text", [_unit([EYE, LLM], [5, 4], 2)], 1, None, 1, True),
    "monolithic tp2 cp2 overlapped": Case(
        "text",
        [_unit([EYE, LLM], [9], 2, 1, 2, tp_overlap=True)],
        2,
        None,
        0,
        True,
    ),
    "qwen2.5 cp4": Case("qwen2_5_vl", [_unit(EYE, [5], 4), _unit(LLM, [5], 2)], 2, None, 0, True),
    "qwen2.5 tp2 cp2, dp2": Case(
        "qwen2_5_vl",
        [_unit(EYE, [5], 2, 1, 2), _unit(LLM, [5], 1, 2)],
        1,
        [EYE],
        1,
        False,
    ),
    "qwen3 cp2 pp2, llm tp2 cp2": Case(
        "qwen3_vl",
        [_unit(EYE, [3, 4], 2, weight_delay=[1, 0]), _unit(LLM, [5], 2, 1, 2)],
        1,
        None,
        0,
        True,
    ),
    "qwen3 cp2 dp2": Case(
        "qwen3_vl", [_unit(EYE, [7], 2, 2), _unit(LLM, [2, 3])], 1, None, 1, False
    ),
    "internvl cp2, overlapped tp2": Case(
        "internvl",
        [_unit(EYE, [4], 2, 1, 2, tp_overlap=True), _unit(LLM, [5], 2)],
        2,
        None,
        0,
        True,
    ),
    "gathers, monolithic cp2 pp2": Case(
        "text", [_unit([EYE, LLM], [5, 4], 2, cp_comm_type="all_gather")], 1, None, 1, True
    ),
    "gathers, qwen2.5 cp4": Case(
        "qwen2_5_vl",
        [
            _unit(EYE, [5], 4, cp_comm_type="all_gather", checkpointing=True),
            _unit(LLM, [5], 2, cp_comm_type="all_gather"),
        ],
        2,
        None,
        0,
        True,
    ),
    "smolvlm cp2 pp2": Case(
        "smolvlm",
        [_unit(TILES, [3, 2], 2), _unit(LLM, [4], 2)],
        1,
        None,
        0,
        False,
    ),
    "onevision cp4": Case(
        "llava_onevision",
        [_unit(TILES, [5], 4, checkpointing=True), _unit(LLM, [2, 2])],
        1,
        None,
        0,
        True,
    ),
    "onevision tp2 cp2": Case(
        "llava_onevision",
        [_unit(TILES, [5], 2, 1, 2), _unit(LLM, [4], 2)],
        2,
        None,
        1,
        False,
    ),
}


def run_of(folder: Path, data: Path, case: Case) -> Run:
    model = case.model
    if model in families.FAMILIES or model in families.WHOLE:
        run = families._run(folder, data, case)
    else:
        modules = (EYE, LLM, PAINTER) if model == "all" else (EYE, LLM)
        run = write_run(folder, data, name=folder.name, modules=modules, steps=STEPS)
    content = yaml.safe_load(run.path.read_text())
    content["cluster"]["gpus_per_node"] = 8
    content["data"]["sequence_length"] = 512
    content["train"] |= {"global_batch_size": 12, "zero_stage": case.zero_stage}
    content["model"]["trained"] = case.trained
    if model == "adapters":
        for name in (EYE, LLM):
            content["model"]["modules"][name]["lora"] = LORA[name]
    run.path.write_text(yaml.safe_dump(content, sort_keys=False))
    run = read_run(run.path)
    build_index(run, describe(run))
    return run


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    folder = tmp_path_factory.mktemp("shared")
    write_sample_data(folder / "data")
    return Models(
        CASES, lambda at, case: run_of(at, folder / "data", case), STEPS, folder, timeout_s=1500
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_layout_equals_single_process(models: Models, name: str) -> None:
    models.check(name)
