"""A TP group of two processes computes what one does: every function and one layer of each kind,
both ways."""

import json

import pytest
import yaml

from disttrain_cli.runtime.launching.launch import launch
from tests.models.parallel_worker import names
from tests.models.test_generators import GENERATORS
from tests.models.test_towers import INTERNVIT_6B, TOWERS

GENERATOR = {
    "kind": "generator",
    "architecture": "unet2d_condition",
    "image_size": 16,
    "context_tokens": 4,
}
#: By name of a run, the module that takes the place of the tiny model's.
OTHERS = {
    **{
        tower: ("image_encoder", {"kind": "encoder", "architecture": tower, **TOWERS[tower]})
        for tower in TOWERS
        if tower != "vit"
    },
    "internvit 6b": (
        "image_encoder",
        {
            "kind": "encoder",
            "architecture": "internvl_vision",
            **TOWERS["internvl_vision"],
            "config": TOWERS["internvl_vision"]["config"] | INTERNVIT_6B,
        },
    ),
    **{
        name: ("image_generator", GENERATOR | GENERATORS[name])
        for name in ("sd xl", "pixart", "sd3.5", "flux", "lumina2")
    },
    "qwen3": (
        "llm",
        {
            "kind": "llm",
            "architecture": "qwen3",
            "config": {
                "vocab_size": 264,
                "hidden_size": 48,
                "num_hidden_layers": 1,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "intermediate_size": 96,
                "head_dim": 12,
            },
        },
    ),
}


@pytest.fixture
def runs(make_run, tmp_path):
    """Run files of the tiny model, and of it with another module each."""
    tiny = make_run(llm={"config": {"vocab_size": 264}}, audio_encoder={}).file.model_dump(
        mode="json", exclude_none=True
    )
    models = {"tiny": tiny["model"]["modules"]}
    for name, (module, spec) in OTHERS.items():
        models[name] = {module: spec} | ({} if module == "llm" else {"llm": models["tiny"]["llm"]})
        if module == "image_generator":
            models[name] = dict(reversed(models[name].items()))
    paths = [tmp_path / f"{name}.yaml" for name in models]
    for path, modules in zip(paths, models.values(), strict=True):
        path.write_text(
            yaml.safe_dump(tiny | {"model": tiny["model"] | {"modules": modules}}, sort_keys=False)
        )
    return paths


@pytest.mark.slow
def test_a_group_computes_what_one_process_does(runs, tmp_path):
    """Also rows that do not divide by the ranks, a rank without rows, and no items at all."""
    payload = {"runs": [str(path) for path in runs], "out": str(tmp_path)}
    launch(2, "tests.models.parallel_worker:ranks", payload, tmp_path / "logs", timeout_s=300)
    checks = set(names(runs))
    assert len(checks) >= 30 + 3 * 40
    for rank in range(2):
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        assert set(found) == checks
        assert not (
            wrong := [f"{name}, rank {rank}: {said}" for name, said in found.items() if said]
        ), "\n".join(wrong)
