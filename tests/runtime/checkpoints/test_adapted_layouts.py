"""Adapters with dropout, averages and tied embeddings, in bf16, and beside a frozen encoder: any
layout opens the checkpoint of another and goes on alike."""

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from disttrain_cli.data.indexing.building import build_index
from disttrain_cli.data.sample_data import write_sample_data
from disttrain_cli.models.graph import build_layers, describe, layer_table
from disttrain_cli.models.layer import is_adapter
from disttrain_cli.runtime.checkpoints import checkpoint
from disttrain_cli.runtime.launching.launch import launch
from disttrain_cli.spec.progress import silent
from disttrain_cli.spec.runfile import Run, read_run
from tests.runtime.checkpoints.checkpoint_worker import history_of
from tests.runtime.factory import LORA, plan_of, unit, write_run

pytestmark = pytest.mark.slow

ENCODER, LLM, GENERATOR = ALL = ["image_encoder", "llm", "image_generator"]
DECAY = 0.8
#: Without the embedding and the head, which are one weight here.
ADAPTERS = LORA | {LLM: LORA[LLM] | {"modules_to_save": ["norm"]}}
FROZEN = [LLM, "projectors"]


def _run(folder: Path, name: str, trained: list[str] | None = None, **train: Any) -> Run:
    run = write_run(
        folder / name,
        folder / "data",
        name=name,
        held_out=0.3,
        tied=True,
        lora=ADAPTERS,
        zero_stage=1,
        ema={"decay": DECAY, "modules": [LLM]},
        evaluation={"every_steps": 2, "sequences": 4},
        **train,
    )
    content = yaml.safe_load(run.path.read_text())
    content["model"]["trained"] = trained
    run.path.write_text(yaml.safe_dump(content))
    run = read_run(run.path)
    build_index(run, describe(run), silent)
    return run


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four ranks train in one layout, and in others from its checkpoint."""
    folder = tmp_path_factory.mktemp("adapted")
    write_sample_data(folder / "data")
    runs = {
        "fp32": _run(folder, "fp32"),
        "bf16": _run(folder, "bf16", precision="bf16"),
        "frozen": _run(folder, "frozen", FROZEN),
    }
    modules = [info.module for info in layer_table(runs["fp32"])]
    e, m, g = (modules.count(name) for name in ALL)
    later = unit("all", ALL, [e + 2, m + g - 2], 2).model_copy(update={"weight_delay": [1, 0]})
    layouts = {
        "tp2dp2": [unit("all", ALL, [e + m + g], 2, 2)],
        "pp2dp2": [later],
        "1-tp2-1": [
            unit("enc", [ENCODER], [e]),
            unit("llm", [LLM], [m], tp=2),
            unit("gen", [GENERATOR], [g]),
        ],
        "1-pp2-1": [
            unit("enc", [ENCODER], [e]),
            unit("llm", [LLM], [2, m - 2]),
            unit("gen", [GENERATOR], [g]),
        ],
    }
    cases = [
        {
            "name": name,
            "run": runs[run].source,
            "plan": plan_of(runs[run], layouts[layout], 3, "dp2" in layout).model_dump(mode="json"),
            "last": 4,
            "load": load and str(folder / "out" / load / "checkpoints" / "step-000002"),
            "save": (2, 3, 4),
            "start": "",
            "out": str(folder / "out" / name),
        }
        for name, run, layout, load in (
            ("fp32", "fp32", "tp2dp2", ""),
            ("fp32 same", "fp32", "tp2dp2", "fp32"),
            ("fp32 pp2dp2", "fp32", "pp2dp2", "fp32"),
            ("fp32 1-tp2-1", "fp32", "1-tp2-1", "fp32"),
            ("fp32 1-pp2-1", "fp32", "1-pp2-1", "fp32"),
            ("bf16", "bf16", "pp2dp2", ""),
            ("bf16 same", "bf16", "pp2dp2", "bf16"),
            ("bf16 1-tp2-1", "bf16", "1-tp2-1", "bf16"),
            ("frozen", "frozen", "1-pp2-1", ""),
            ("frozen tp2dp2", "frozen", "tp2dp2", "frozen"),
        )
    ]
    launch(
        4,
        "tests.runtime.checkpoints.checkpoint_worker:ranks",
        {"cases": cases},
        folder / "logs",
        timeout_s=500,
    )
    return folder / "out"


def _tensors(out: Path, name: str, step: int, *groups: str) -> dict[str, torch.Tensor]:
    folder = out / name / "checkpoints" / f"step-{step:06d}"
    return checkpoint.read_tensors(folder, groups=groups or ("weight", "exp_avg", "ema"))


@pytest.mark.parametrize("name", ["fp32 pp2dp2", "fp32 1-tp2-1", "fp32 1-pp2-1", "frozen tp2dp2"])
def test_another_layout_goes_on_alike(out: Path, name: str) -> None:
    first = name.partition(" ")[0]
    assert torch.allclose(history_of(out, name), history_of(out, first)[2:], rtol=1e-5, atol=1e-5)
    own, other = (_tensors(out, one, 4) for one in (name, first))
    assert own.keys() == other.keys()
    for key, values in other.items():
        assert torch.allclose(own[key], values, rtol=1e-5, atol=1e-5), key


def test_the_same_layout_goes_on_bit_identically(out: Path) -> None:
    for name in ("fp32", "bf16"):
        assert torch.equal(history_of(out, f"{name} same"), history_of(out, name)[2:])


def test_another_layout_of_bf16_goes_on_alike(out: Path) -> None:
    assert torch.allclose(history_of(out, "bf16 1-tp2-1"), history_of(out, "bf16")[2:], rtol=0.03)


def test_bf16_follows_fp32(out: Path) -> None:
    assert torch.allclose(history_of(out, "bf16"), history_of(out, "fp32"), rtol=0.05)


def test_averages_of_adapters_are_those_of_one_process(out: Path) -> None:
    for name in ("fp32 pp2dp2", "fp32 1-tp2-1"):
        after, before = (_tensors(out, name, step, "weight", "ema") for step in (4, 3))
        averaged = [key for key in after if key.startswith("ema/")]
        assert any(map(is_adapter, averaged))
        for key in averaged:
            expected = torch.lerp(before[key], after["weight" + key.removeprefix("ema")], 1 - DECAY)
            assert torch.allclose(after[key], expected, rtol=1e-5, atol=1e-5), key


def test_only_what_trains_moves_and_has_moments(out: Path) -> None:
    for name in ("fp32", "frozen"):
        run = read_run(out.parent / name / "disttrain.yaml")
        layers = build_layers(run, 0, len(layer_table(run)), "meta")
        trained = {
            f"{layer.name}/{path}"
            for layer in layers
            for path, _ in layer.named_parameters()
            if layer.trains(path) and layer.owner_of(path) in run.file.model.trained_names
        }
        before, after = (_tensors(out, name, step) for step in (2, 4))
        moments = {key.partition("/")[2] for key in after if key.startswith("exp_avg/")}
        assert moments == trained and "llm.head/norm.weight" in trained
        assert f"{LLM}.head/lm_head.weight" not in {key.partition("/")[2] for key in after}
        for key in (key for key in after if key.startswith("weight/")):
            still = torch.equal(before[key], after[key])
            assert key.partition("/")[2] in trained or still, key
