"""Mixtures of experts train alike on every layout: EP 2 and 4 with TP, CP, DP and PP, ZeRO 0 and 1,
recomputing, a split backward, overlapped reductions, frozen experts; EP groups in one node, in two;
rows exchanged at once or in halves.

Losses, norms and parameters equal a single process (fp32, 1e-5).
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
from tests.runtime.factory import unit, write_run
from tests.runtime.layouts import Case, Models

STEPS = 3
EYE, LLM = "image_encoder", "llm"
TEXT = {
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "intermediate_size": 32,
    "vocab_size": 272,
    "max_position_embeddings": 512,
    "num_experts_per_tok": 2,
}
#: By family, its LLM: one whose second layer has no experts, and one of experts alone.
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_moe": TEXT
    | {
        "num_experts": 8,
        "moe_intermediate_size": 24,
        "norm_topk_prob": True,
        "mlp_only_layers": [1],
    },
    "mixtral": TEXT | {"num_local_experts": 4, "sliding_window": None},
}

#: An EP group of four lies in two nodes, or in one.
GPUS_PER_NODE = {"qwen3_moe": 2, "mixtral": 8}


def _run(folder: Path, data: Path, case: Case) -> Run:
    run = write_run(
        folder,
        data,
        name=folder.name,
        modules=(EYE, LLM),
        global_batch_size=8,
        steps=STEPS,
        zero_stage=case.zero_stage,
    )
    content = yaml.safe_load(run.path.read_text())
    content["model"]["modules"][LLM] |= {
        "architecture": case.model,
        "config": FAMILIES[case.model],
    }
    content["model"]["trained"] = case.trained
    content["cluster"]["gpus_per_node"] = GPUS_PER_NODE[case.model]
    run.path.write_text(yaml.safe_dump(content, sort_keys=False))
    run = read_run(run.path)
    build_index(run, describe(run))
    return run


def _unit(
    name: str, modules: list[str], layers: list[int], dp: int = 1, tp: int = 1, **how: Any
) -> UnitPlan:
    plain = unit(name, modules, layers, dp, tp).model_dump()
    return UnitPlan(**plain | {"gpus": plain["gpus"] * how.get("cp", 1)} | how)


BOTH = [EYE, LLM]
#: On eight ranks. The encoder is embed, two blocks, projector; the LLM embed, three blocks, head.
CASES = {
    "qwen3 tp2 dp2 pp2 ep4": Case(
        "qwen3_moe",
        [_unit("all", BOTH, [5, 4], 2, 2, ep=4, ep_overlap=True)],
        2,
        None,
        zero_stage=1,
    ),
    "qwen3 dp4-dp4 ep4 recomputed": Case(
        "qwen3_moe",
        [
            _unit("e", [EYE], [4], 4),
            _unit("l", [LLM], [5], 4, ep=4, ep_overlap=True, checkpointing=True),
        ],
        1,
        None,
    ),
    "qwen3 tp2 cp2 pp2 ep2 in order": Case(
        "qwen3_moe", [_unit("all", BOTH, [5, 4], 1, 2, cp=2, ep=2)], 2, None, in_order=True
    ),
    "qwen3 tp4 ep2 later, pp2": Case(
        "qwen3_moe",
        [_unit("all", BOTH, [6, 3], 1, 4, ep=2, ep_overlap=True, weight_delay=[1, 0])],
        2,
        None,
        zero_stage=1,
    ),
    "qwen3 frozen experts ep4": Case(
        "qwen3_moe",
        [_unit("e", [EYE], [4], 4), _unit("l", [LLM], [5], 4, ep=4, ep_overlap=True)],
        1,
        [EYE],
    ),
    "qwen3 first layer without gradients ep2": Case(
        "qwen3_moe",
        [_unit("e", [EYE], [4], 4), _unit("l", [LLM], [5], 2, 2, ep=2)],
        1,
        [LLM],
        zero_stage=1,
    ),
    "mixtral cp2 dp2-dp4 ep4": Case(
        "mixtral",
        [
            _unit("e", [EYE], [4], 4),
            _unit("l", [LLM], [5], 2, cp=2, ep=4, ep_overlap=True, cp_comm_type="all_gather"),
        ],
        1,
        None,
    ),
    "mixtral tp2 dp4 ep4": Case(
        "mixtral", [_unit("all", BOTH, [9], 4, 2, ep=4)], 1, None, zero_stage=1
    ),
    "mixtral dp2 pp4 ep2": Case("mixtral", [_unit("all", BOTH, [4, 2, 1, 2], 2, ep=2)], 1, None),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    folder = tmp_path_factory.mktemp("experts")
    write_sample_data(folder / "data")
    return Models(CASES, lambda at, case: _run(at, folder / "data", case), STEPS, folder)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_layout_equals_single_process(models: Models, name: str) -> None:
    models.check(name)
