"""Towers whose images' rows a CP group shares leave what a single process leaves, and their
gradients."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from disttrain_cli.runtime.launching.launch import launch
from tests.models.shared_towers_worker import IMAGES, RANKS, SIZES, ranks
from tests.models.test_towers import INTERNVIT_6B, TOWERS

VARIANTS: dict[str, dict[str, Any]] = TOWERS | {
    "internvit": TOWERS["internvl_vision"]
    | {
        "architecture": "internvl_vision",
        "config": TOWERS["internvl_vision"]["config"] | INTERNVIT_6B,
    },
    "inner": TOWERS["clip_vision_model"]
    | {"architecture": "clip_vision_model", "merge": 1, "feature_layer": -2},
}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, list[float]]]:
    from tests.models.conftest import LLAMA

    folder, runs = tmp_path_factory.mktemp("towers"), {}
    for name, tower in VARIANTS.items():
        runs[name] = str(folder / name / "disttrain.yaml")
        model = {
            "eye": {"kind": "encoder", "architecture": name} | tower,
            "llm": {"kind": "llm", "architecture": "llama", "config": LLAMA},
        }
        content = {
            "name": "test",
            "model": {"modules": model},
            "data": {"sources": [{"path": "data"}], "sequence_length": 64},
            "cluster": {"device": "cpu"},
            "train": {"global_batch_size": 4, "steps": 1, "precision": "fp32"},
        }
        Path(runs[name]).parent.mkdir()
        Path(runs[name]).write_text(yaml.safe_dump(content))
    payload = {"out": str(folder), "runs": runs}
    launch(RANKS, f"{ranks.__module__}:ranks", payload, folder / "logs", timeout_s=600)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(RANKS)]


@pytest.mark.slow
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("images", IMAGES)
@pytest.mark.parametrize("name", VARIANTS)
def test_own_rows_are_those_of_a_single_process(
    found: list[dict[str, list[float]]], name: str, images: str, size: str
) -> None:
    outputs, gradients = (
        max(rank[f"{name}, {images}, {size}"][number] for rank in found) for number in (0, 1)
    )
    assert outputs < 1e-5 and gradients < 1e-5
