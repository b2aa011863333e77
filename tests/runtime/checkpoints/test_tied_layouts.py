"""Checkpoints of a model whose head is its embedding go from layouts with both on one stage to
layouts with a copy on each of two, and back."""

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from disttrain_cli.data.indexing.building import build_index
from disttrain_cli.data.sample_data import write_sample_data
from disttrain_cli.models.graph import describe, layer_table
from disttrain_cli.runtime.checkpoints import checkpoint
from disttrain_cli.runtime.launching.launch import launch
from disttrain_cli.spec.plan import UnitPlan
from disttrain_cli.spec.progress import silent
from disttrain_cli.spec.runfile import Run, read_run
from tests.runtime.checkpoints.checkpoint_worker import history_of
from tests.runtime.factory import plan_of, unit, write_run

pytestmark = pytest.mark.slow

ENCODER, LLM, GENERATOR = ALL = ["image_encoder", "llm", "image_generator"]
STEPS = 6
#: By name: run, layout, last step, checkpoint that it goes on from, and steps at which it saves.
CASES: dict[str, tuple[str, str, int, str, tuple[int, ...]]] = {
    "one": ("plain", "together", STEPS, "", (2, STEPS)),
    "two": ("plain", "apart", STEPS, "one/checkpoints/step-000002", (4,)),
    "two replicas": ("zero", "apart in two", STEPS, "one/checkpoints/step-000002", (4,)),
    "one again": ("plain", "together", STEPS, "two/checkpoints/step-000004", (STEPS,)),
    "one after replicas": ("plain", "together", STEPS, "two replicas/checkpoints/step-000004", ()),
    "two from the start": ("zero", "apart in two", STEPS, "", (STEPS,)),
    "bf16": ("bf16", "apart in two", STEPS, "", (2,)),
    "bf16 again": ("bf16", "apart in two", STEPS, "bf16/checkpoints/step-000002", ()),
    "frozen on": ("frozen", "apart", 3, "one/checkpoints/step-000002", ()),
    "begun": ("zero", "apart in two", 0, "", (0,)),
}
START = {"begun": "one/checkpoints/step-000002"}


def _run(folder: Path, data: Path, name: str, **train: Any) -> Run:
    run = write_run(
        folder / name,
        data,
        name=name,
        held_out=0.3,
        tied=True,
        **({"zero_stage": 0} | train),
        ema={"decay": 0.8, "modules": [LLM]},
        evaluation={"every_steps": 1, "sequences": 6},
    )
    if name == "frozen":
        content = yaml.safe_load(run.path.read_text())
        content["model"]["trained"] = ["projectors", GENERATOR]
        run.path.write_text(yaml.safe_dump(content))
        run = read_run(run.path)
    build_index(run, describe(run), silent)
    return run


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four ranks train every case in the same processes."""
    folder = tmp_path_factory.mktemp("tied")
    write_sample_data(folder / "data")
    runs = {
        name: _run(folder, folder / "data", name, **train)
        for name, train in {
            "plain": {},
            "zero": {"zero_stage": 1},
            "bf16": {"zero_stage": 1, "precision": "bf16"},
            "frozen": {},
        }.items()
    }
    modules = [info.module for info in layer_table(runs["plain"])]
    e, m, g = (modules.count(name) for name in ALL)
    layouts: dict[str, list[UnitPlan]] = {
        "together": [
            unit("enc", [ENCODER], [e]),
            unit("llm", [LLM], [m], 2),
            unit("gen", [GENERATOR], [g]),
        ],
        "apart": [
            unit("enc", [ENCODER], [e]),
            unit("llm", [LLM], [2, m - 2]),
            unit("gen", [GENERATOR], [g]),
        ],
        "apart in two": [unit("all", ALL, [e + 2, m + g - 2], 2)],
    }
    cases = [
        {
            "name": name,
            "run": runs[run].source,
            "plan": plan_of(runs[run], layouts[layout], 3).model_dump(mode="json"),
            "last": last,
            "load": load and str(folder / "out" / load),
            "save": save,
            "start": name in START and str(folder / "out" / START[name]),
            "out": str(folder / "out" / name),
        }
        for name, (run, layout, last, load, save) in CASES.items()
    ]
    launch(
        4,
        "tests.runtime.checkpoints.checkpoint_worker:ranks",
        {"cases": cases},
        folder / "logs",
        timeout_s=500,
    )
    return folder / "out"


@pytest.mark.parametrize(
    ("name", "since"),
    [
        ("two", 2),
        ("two replicas", 2),
        ("one again", 4),
        ("one after replicas", 4),
        ("two from the start", 0),
    ],
)
def test_losses_are_those_of_one_stage(out: Path, name: str, since: int) -> None:
    assert torch.allclose(
        history_of(out, name), history_of(out, "one")[since:], rtol=1e-5, atol=1e-5
    )


def test_the_same_layout_goes_on_bit_identically(out: Path) -> None:
    assert torch.equal(history_of(out, "bf16 again"), history_of(out, "bf16")[2:])


def test_a_frozen_pair_does_not_change(out: Path) -> None:
    assert len(history_of(out, "frozen on")) == 1


def test_one_tensor_is_stored_with_its_moments_and_average(out: Path) -> None:
    groups = ("weight", "exp_avg", "exp_avg_sq", "ema")
    one, two, begun, before = (
        checkpoint.read_tensors(out / name / "checkpoints" / f"step-{step:06d}", groups=groups)
        for name, step in (("one", 6), ("two from the start", 6), ("begun", 0), ("one", 2))
    )
    assert one.keys() == two.keys()
    assert not any("lm_head" in key for key in one)
    for group in groups:
        key = f"{group}/llm.embed/embedding.weight"
        assert torch.allclose(one[key], two[key], rtol=1e-5, atol=1e-5)
    key = "weight/llm.embed/embedding.weight"
    assert torch.equal(begun[key], before[key])
