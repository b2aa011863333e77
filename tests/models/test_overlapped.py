"""Linears that send while they multiply, against those that wait: groups of two, three and four
processes."""

import json
from typing import Any

import pytest
import yaml

from disttrain_cli.runtime.launching.launch import launch
from tests.models.conftest import AUDIO, VIT
from tests.models.overlapped_worker import SIZES, names
from tests.models.test_parallel import OTHERS
from tests.models.test_towers import TOWERS

DROPS = {"hidden_dropout_prob": 0.25}
#: Query heads share those of keys; some layers look back at the nearest tokens only.
DECODERS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0},
    "qwen3": {"head_dim": 12},
    "mistral": {"sliding_window": 8},
}


@pytest.fixture
def runs(make_run, tmp_path):  # type: ignore[no-untyped-def]
    """Run files with every family of layers that works row by row, some with dropout."""
    llm = {
        "vocab_size": 264,
        "hidden_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "intermediate_size": 96,
    }
    audio = AUDIO | {"config": AUDIO["config"] | {"dropout": 0.25, "activation_dropout": 0.25}}
    tiny = make_run(audio_encoder={}).file.model_dump(mode="json", exclude_none=True)
    models: dict[str, dict[str, Any]] = {
        architecture: {"llm": {"kind": "llm", "architecture": architecture, "config": llm | more}}
        for architecture, more in DECODERS.items()
    }
    towers = {name: OTHERS[name][1] for name in (*TOWERS, "internvit 6b") if name in OTHERS}
    towers["vit"] = {"kind": "encoder", "architecture": "vit", "merge": 2, "config": VIT | DROPS}
    for name, tower in towers.items():
        # a block for each of DeepStack's features
        blocks = len(tower["config"].get("deepstack_visual_indexes", [0]))
        under = {"architecture": "llama", "config": llm | {"num_hidden_layers": blocks}}
        models[name] = {"image_encoder": tower, "llm": {"kind": "llm"} | under}
    models["vit"]["audio_encoder"] = audio
    models["vit"] = dict(sorted(models["vit"].items(), key=lambda named: named[0] == "llm"))
    paths = [tmp_path / f"{name}.yaml" for name in models]
    for path, modules in zip(paths, models.values(), strict=True):
        file = tiny | {"model": tiny["model"] | {"modules": modules}}
        path.write_text(yaml.safe_dump(file, sort_keys=False))
    return paths


@pytest.mark.slow
@pytest.mark.parametrize("symmetric", [False, True])
def test_a_group_computes_what_it_does_when_it_waits(runs, tmp_path, symmetric):  # type: ignore[no-untyped-def]
    """Round a ring, and through memory that its ranks share."""
    payload = {
        "runs": [str(path) for path in runs],
        "out": str(tmp_path),
        "layers": [2, 4],
        "symmetric": symmetric,
    }
    launch(4, "tests.models.overlapped_worker:ranks", payload, tmp_path / "logs", timeout_s=300)
    for size in SIZES:
        checks = names(payload, size)
        assert len(checks) >= (120 + 9 * 9 if size != 3 else 120)
        for rank in range(size):
            found = json.loads((tmp_path / f"{size}-{rank}.json").read_text())
            assert set(found) == checks
            wrong = [
                f"{name}, rank {rank} of {size}: {said}" for name, said in found.items() if said
            ]
            assert not wrong, "\n".join(wrong)
