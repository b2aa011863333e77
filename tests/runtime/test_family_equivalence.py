"""Families of vision-language models train alike on every layout: Qwen3-VL (M-RoPE, DeepStack, no
projector), Qwen2.5-VL, InternVL (norms over the heads of all ranks), and whole folders whose images
are cut into tiles: SmolVLM, LLaVA-OneVision (rows of the joined picture, with newlines, and
interpolated ones).

Losses, norms and parameters equal a single process (fp32, 1e-5), with cuts in the tower, behind
its DeepStack mergers, between tower and LLM, and inside the blocks that read their features.
"""

from pathlib import Path
from typing import Any

import pytest
import yaml

from disttrain_cli.data.indexing.building import build_index
from disttrain_cli.data.sample_data import write_sample_data
from disttrain_cli.models.graph import describe, layer_table, live_tensors
from disttrain_cli.spec.plan import UnitPlan
from disttrain_cli.spec.runfile import Run, read_run
from tests.data.test_parts import write_json
from tests.models.test_towers import INTERNVIT_6B, TOWERS
from tests.runtime.factory import unit, write_run
from tests.runtime.layouts import Case, Models
from tests.runtime.test_whole_conversations import SMALL
from tests.whole_models import write_tiled

STEPS = 2
EYE, TILES, LLM = "image_encoder", "vision", "llm"  # a folder's encoder is `vision`
TOWER = {
    "hidden_size": 32,
    "depth": 3,
    "num_heads": 4,
    "intermediate_size": 64,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "out_hidden_size": 48,
}
TEXT = {
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "intermediate_size": 96,
    "vocab_size": 272,
}
ROPE = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 2, 2]}
#: Of each family its tower and its LLM.
FAMILIES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "qwen3_vl": (
        {
            "architecture": "qwen3_vl_vision",
            "projector": "none",
            "config": TOWER | {"num_position_embeddings": 25, "deepstack_visual_indexes": [0, 1]},
        },
        {
            "architecture": "qwen3_vl_text",
            "config": TEXT
            | {"head_dim": 12, "rope_parameters": ROPE | {"mrope_interleaved": True}},
        },
    ),
    "qwen2_5_vl": (
        {
            "architecture": "qwen2_5_vl_vision",
            "projector": "none",
            "config": TOWER | {"window_size": 16, "fullatt_block_indexes": [1]},
        },
        {"architecture": "qwen2_5_vl_text", "config": TEXT | {"rope_parameters": ROPE}},
    ),
    "internvl": (
        {
            "architecture": "internvl_vision",
            "projector": "norm_mlp",
            "merge": 2,
            "config": TOWERS["internvl_vision"]["config"] | INTERNVIT_6B | {"num_hidden_layers": 2},
        },
        {"architecture": "qwen2", "config": TEXT},
    ),
}
WHOLE = ("smolvlm", "llava_onevision")  # folders


def _run(folder: Path, data: Path, case: Case) -> Run:
    family = case.model
    run = write_run(
        folder, data, name=folder.name, modules=(EYE, LLM), global_batch_size=12, steps=STEPS
    )
    content = yaml.safe_load(run.path.read_text())
    content["data"]["sequence_length"] = 512
    if family in WHOLE:
        of_family = SMALL | {"cut": SMALL} if family == "llava_onevision" else {}
        write_tiled(folder / "whole", family, text={"num_attention_heads": 8}, **of_family)
        write_json(folder / "talks")
        content["model"] = {"folder": "whole"}
        content["data"] = {"sources": [{"path": "talks"}], "sequence_length": 512}
    else:
        tower, text = FAMILIES[family]
        modules = {EYE: {"kind": "encoder"} | tower, LLM: {"kind": "llm"} | text}
        content["model"] |= {"modules": modules, "trained": case.trained}
    run.path.write_text(yaml.safe_dump(content, sort_keys=False))
    run = read_run(run.path)
    build_index(run, describe(run))
    return run


def _with(one: UnitPlan, **how: Any) -> UnitPlan:
    return one.model_copy(update=how)


#: On six ranks. Qwen3's tower is embed, block, deepstack, block, deepstack, block, merger; the LLM
#: embed, two blocks that read features, block, head.
CASES = {
    "4-2": Case("qwen3_vl", [unit("e", [EYE], [7], 4), unit("l", [LLM], [5], 2)], 1, None),
    "pp3-pp3": Case(
        "qwen3_vl", [unit("e", [EYE], [2, 2, 3]), unit("l", [LLM], [1, 1, 3])], 2, None
    ),
    "tp2-pp2dp2": Case(
        "qwen3_vl",
        [unit("e", [EYE], [7], 1, 2), unit("l", [LLM], [2, 3], 2)],
        1,
        None,
    ),
    "pp2-tp2pp2": Case(
        "qwen3_vl",
        [
            _with(unit("e", [EYE], [3, 4]), checkpointing=True),
            _with(unit("l", [LLM], [2, 3], 1, 2), tp_overlap=True),
        ],
        2,
        None,
    ),
    "3-tp2 later, recomputed": Case(
        "qwen3_vl",
        [
            _with(unit("e", [EYE], [7], 4), weight_delay=[1]),
            _with(unit("l", [LLM], [5], 1, 2), checkpointing=True),
        ],
        1,
        None,
    ),
    "monolithic pp6": Case("qwen3_vl", [unit("all", [EYE, LLM], [2, 2, 3, 1, 1, 3])], 2, None),
    "monolithic tp2 pp3 later": Case(
        "qwen3_vl",
        [_with(unit("all", [EYE, LLM], [4, 5, 3], 1, 2), weight_delay=[0, 1, 1])],
        1,
        None,
    ),
    "monolithic pp2 dp3": Case("qwen3_vl", [unit("all", [EYE, LLM], [5, 7], 3)], 2, None),
    "llm alone trains": Case(
        "qwen3_vl",
        [unit("e", [EYE], [4, 3], 2), unit("l", [LLM], [2, 3])],
        1,
        [LLM],
    ),
    "tower alone trains": Case(
        "qwen3_vl",
        [unit("e", [EYE], [3, 4]), unit("l", [LLM], [2, 3], 2)],
        1,
        [EYE],
    ),
    "qwen2.5 pp2-tp2dp2": Case(
        "qwen2_5_vl",
        [unit("e", [EYE], [2, 3]), unit("l", [LLM], [5], 2, 2)],
        1,
        None,
    ),
    "internvl tp2dp2-pp2": Case(
        "internvl",
        [unit("e", [EYE], [4], 2, 2), unit("l", [LLM], [2, 3])],
        2,
        None,
    ),
    "internvl pp2 overlapped-tp2dp2": Case(
        "internvl",
        [
            _with(unit("e", [EYE], [3, 1]), checkpointing=True),
            _with(unit("l", [LLM], [5], 2, 2), tp_overlap=True),
        ],
        1,
        None,
    ),
    "internvl monolithic tp2 pp3 later": Case(
        "internvl",
        [
            _with(
                unit("all", [EYE, LLM], [2, 4, 3], 1, 2),
                weight_delay=[0, 1, 1],
                tp_overlap=True,
            )
        ],
        1,
        None,
    ),
    "smolvlm tp2-pp2dp2": Case(
        "smolvlm",
        [unit("e", [TILES], [5], 1, 2), unit("l", [LLM], [2, 2], 2)],
        1,
        None,
    ),
    "smolvlm dp4-tp2": Case(
        "smolvlm",
        [unit("e", [TILES], [5], 4), unit("l", [LLM], [4], 1, 2)],
        2,
        None,
    ),
    "smolvlm monolithic pp3 dp2": Case(
        "smolvlm", [unit("all", [TILES, LLM], [3, 3, 3], 2)], 2, None
    ),
    "onevision tp2-pp2tp2": Case(
        "llava_onevision",
        [unit("e", [TILES], [5], 1, 2), unit("l", [LLM], [2, 2], 1, 2)],
        1,
        None,
    ),
    "onevision 2-tp2cp2": Case(
        "llava_onevision",
        [unit("e", [TILES], [5], 2), _with(unit("l", [LLM], [4], 1, 2), cp=2, gpus=4)],
        1,
        None,
    ),
    "onevision pp2-dp4": Case(
        "llava_onevision",
        [_with(unit("e", [TILES], [4, 1]), checkpointing=True), unit("l", [LLM], [4], 4)],
        1,
        None,
    ),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    folder = tmp_path_factory.mktemp("families")
    write_sample_data(folder / "data")
    return Models(CASES, lambda at, case: _run(at, folder / "data", case), STEPS, folder)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_layout_equals_single_process(models: Models, name: str) -> None:
    models.check(name)


def test_features_cross_every_cut_until_their_block(tmp_path: Path) -> None:
    write_sample_data(tmp_path / "data")
    table = layer_table(_run(tmp_path / "run", tmp_path / "data", CASES["4-2"]))
    crossing = [[spec.name for spec in live_tensors(table, cut)] for cut in range(len(table))]
    first, second = "image_features.0", "image_features.1"
    assert [names.count(first) for names in crossing] == [0] * 3 + [1] * 6 + [0] * 3
    assert [names.count(second) for names in crossing] == [0] * 5 + [1] * 5 + [0] * 2
    assert crossing[7] == [first, second, "image_embeds"]
    specs = {spec.name: spec for spec in live_tensors(table, 7)}
    assert {(spec.item, spec.rows, spec.shape) for spec in specs.values()} == {
        ("image", "tokens", (48,))
    }
