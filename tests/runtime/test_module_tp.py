"""Encoders and generators that the TP group of their unit does not divide (`UnitPlan.module_tp`):
every rank works on other images, and layouts train as a single process does (losses, norms and
parameters, fp32, 1e-5), with DP, PP, freezing, recomputing, split backwards, adapters, features
over cuts, tiles, and ranks without images.
"""

from typing import Any

import pytest

from disttrain_cli.data.sample_data import write_sample_data
from disttrain_cli.spec.plan import UnitPlan
from tests.runtime.factory import unit
from tests.runtime.layouts import Case, Models
from tests.runtime.test_encoder_context_parallel import STEPS, run_of

EYE, TILES, LLM, PAINTER = "image_encoder", "vision", "llm", "image_generator"


def _unit(
    modules: list[str], layers: list[int], replicated: list[str], tp: int, dp: int = 1, **how: Any
) -> UnitPlan:
    one = unit("-".join(modules), modules, layers, dp, tp)
    return one.model_copy(update={"module_tp": dict.fromkeys(replicated, 1), **how})


#: On two or four ranks; `test_equivalence` has two more.
CASES = {
    "eye and painter, dp2, zero 1": Case(
        "all",
        [_unit([EYE, LLM, PAINTER], [17], [EYE, PAINTER], 2, 2)],
        1,
        None,
        1,
        True,
    ),
    "eye pp2 later, overlapped": Case(
        "all",
        [_unit([EYE, LLM, PAINTER], [6, 11], [EYE], 2, tp_overlap=True, weight_delay=[1, 0])],
        2,
        None,
        0,
        True,
    ),
    "qwen3 pp2 later, overlapped": Case(
        "qwen3_vl",
        [_unit([EYE, LLM], [8, 4], [EYE], 2, tp_overlap=True, weight_delay=[1, 0])],
        2,
        None,
        0,
        True,
    ),
    "eye alone trains": Case("text", [_unit([EYE, LLM], [9], [EYE], 4)], 1, [EYE], 1),
    "painter pp2, later": Case(
        "all",
        [_unit([EYE, LLM, PAINTER], [7, 10], [EYE, PAINTER], 2, weight_delay=[0, 1])],
        2,
        None,
        0,
        True,
    ),
    "painter alone trains": Case(
        "all", [_unit([EYE, LLM, PAINTER], [17], [PAINTER], 4)], 1, [PAINTER], 1
    ),
    "painter behind an eye of its own": Case(
        "all",
        [unit("e", [EYE], [4], 2), _unit([LLM, PAINTER], [13], [PAINTER], 2)],
        2,
        None,
    ),
    "projectors alone train": Case(
        "text", [_unit([EYE, LLM], [9], [EYE], 2, 2)], 1, ["projectors"]
    ),
    "llm alone trains": Case("text", [_unit([EYE, LLM], [6, 3], [EYE], 2)], 1, [LLM], 1, True),
    "recomputed tp4": Case(
        "text", [_unit([EYE, LLM], [9], [EYE], 4, checkpointing=True)], 3, None, 1, True
    ),
    "adapters": Case("adapters", [_unit([EYE, LLM], [4, 5], [EYE], 2)], 1, None, 1),
    "eye on a stage of its own": Case(
        "text", [_unit([EYE, LLM], [4, 5], [EYE], 2)], 1, None, 0, True
    ),
    "qwen2.5 tp4": Case("qwen2_5_vl", [_unit([EYE, LLM], [10], [EYE], 4)], 2, None, 1),
    "qwen3 recomputed, dp2": Case(
        "qwen3_vl", [_unit([EYE, LLM], [12], [EYE], 2, 2, checkpointing=True)], 1, None, 1, True
    ),
    "qwen3 over cuts": Case("qwen3_vl", [_unit([EYE, LLM], [7, 5], [EYE], 2)], 1, None, 0, True),
    "internvl": Case("internvl", [_unit([EYE, LLM], [9], [EYE], 2, 2)], 1, None, 1),
    "smolvlm": Case("smolvlm", [_unit([TILES, LLM], [9], [TILES], 2, 2)], 1, None, 1, True),
    "onevision pp2": Case("llava_onevision", [_unit([TILES, LLM], [6, 3], [TILES], 2)], 2, None, 0),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    folder = tmp_path_factory.mktemp("replicated")
    write_sample_data(folder / "data")
    return Models(
        CASES, lambda at, case: run_of(at, folder / "data", case), STEPS, folder, timeout_s=1500
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_layout_equals_single_process(models: Models, name: str) -> None:
    models.check(name)
