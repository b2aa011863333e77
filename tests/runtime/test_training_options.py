"""Freezing, recomputation, schedules, bad losses and models without parts, over four ranks, against
one process."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

from disttrain_cli.data.indexing.building import build_index
from disttrain_cli.data.sample_data import write_sample_data
from disttrain_cli.models.graph import build_layers, describe, layer_table
from disttrain_cli.runtime.launching.launch import launch
from disttrain_cli.spec.plan import UnitPlan
from disttrain_cli.spec.progress import silent
from disttrain_cli.spec.runfile import Run, read_run
from tests.data.dataset import interleaved, text, write_tar
from tests.runtime.equivalence_worker import reference
from tests.runtime.factory import plan_of, unit, write_run

pytestmark = pytest.mark.slow

Runs = dict[str, tuple[Run, Path]]
STEPS, SPOILT = 2, 1
VAE = {
    "block_out_channels": [8, 8],
    "down_block_types": ["DownEncoderBlock2D"] * 2,
    "up_block_types": ["UpDecoderBlock2D"] * 2,
    "norm_num_groups": 4,
    "latent_channels": 4,
}
ENCODER, LLM, GENERATOR = EVERYTHING = ("image_encoder", "llm", "image_generator")


def _units(run: Run, layout: str, recompute: bool) -> list[UnitPlan]:
    """Four ranks: three units with a pipeline in the LLM's, or one unit with everything, as a
    pipeline or over TP."""
    modules = [info.module for info in layer_table(run)]
    counts = {name: modules.count(name) for name in dict.fromkeys(modules)}
    total = len(modules)
    if layout == "monolithic":
        units = [unit("all", list(counts), [total // 2, total - total // 2], 2)]
    elif layout == "tp":
        units = [unit("all", list(counts), [total], 2, tp=2)]
    else:
        free = 4 - sum(name != LLM for name in counts)
        units = [
            unit(name, [name], _split(count, free)) if name == LLM else unit(name, [name], [count])
            for name, count in counts.items()
        ]
    return [each.model_copy(update={"checkpointing": recompute}) for each in units]


def _split(layers: int, stages: int) -> list[int]:
    return [layers // stages + (place < layers % stages) for place in range(stages)]


#: Name → (layout, modules, what is trained, recomputed, train section).
CASES: dict[str, tuple[str, tuple[str, ...], list[str] | None, bool, dict[str, Any]]] = {
    "frozen-encoder": ("units", EVERYTHING, [LLM, GENERATOR, "projectors"], False, {}),
    "frozen-encoder-projector": ("units", EVERYTHING, [LLM, GENERATOR], False, {}),
    "frozen-llm": ("units", EVERYTHING, [ENCODER, GENERATOR, "projectors"], False, {}),
    "frozen-both": ("units", EVERYTHING, [GENERATOR], False, {}),
    "projectors": ("units", EVERYTHING, ["projectors"], False, {}),
    "encoder-only": ("units", EVERYTHING, [ENCODER], False, {}),
    "zero1-projectors": ("monolithic", EVERYTHING, ["projectors"], False, {"zero_stage": 1}),
    "recompute": ("units", EVERYTHING, None, True, {}),
    "recompute-frozen-llm": ("monolithic", EVERYTHING, [ENCODER, "projectors"], True, {}),
    "rates": (
        "monolithic",
        EVERYTHING,
        None,
        False,
        {
            "zero_stage": 1,
            "optimizer": {
                "lr": 1e-3,
                "eps": 1e-5,
                "weight_decay": 0.1,
                "warmup_steps": 1,
                "schedule": "cosine",
                "modules": {
                    LLM: {"lr": 3e-3, "schedule": "linear", "weight_decay": 0.0},
                    "projectors": {"warmup_steps": 2},
                },
            },
        },
    ),
    "no-generator": ("units", (ENCODER, LLM), None, False, {}),
    "no-encoder": ("units", (LLM, GENERATOR), None, False, {}),
    "llm-alone": ("units", (LLM,), None, False, {}),
    "vae": ("units", EVERYTHING, None, False, {}),
    "dropout": ("units", EVERYTHING, None, False, {}),
    "dropout-recompute": ("monolithic", EVERYTHING, None, True, {}),
    "dropout-tp": ("tp", EVERYTHING, None, False, {"zero_stage": 1}),
    "tp-projectors": ("tp", EVERYTHING, ["projectors"], True, {}),
    "dropout-frozen-encoder": ("monolithic", EVERYTHING, [GENERATOR, "projectors"], False, {}),
    "skipped": ("units", EVERYTHING, None, False, {"on_bad_loss": "skip"}),
    "skipped-zero1": (
        "monolithic",
        EVERYTHING,
        None,
        False,
        {"on_bad_loss": "skip", "zero_stage": 1},
    ),
    "stopped": ("units", EVERYTHING, None, False, {}),
    "bf16-frozen": (
        "units",
        EVERYTHING,
        [ENCODER, "projectors"],
        True,
        {"precision": "bf16", "zero_stage": 1},
    ),
}
SPOILED = ("skipped", "skipped-zero1", "stopped")
EXACT = [name for name in CASES if name not in ("stopped", "bf16-frozen")]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """A case's run and what its ranks left."""
    return _train(list(CASES), tmp_path_factory.mktemp("options"))


def _train(names: list[str], folder: Path) -> dict[str, tuple[Run, Path]]:
    """Four ranks train some cases, one after the other, in the same processes."""
    write_sample_data(folder / "data")
    texts = [
        interleaved(f"{n:03d}", text(f"Text {n}: " + "no image here, only words. " * 8))
        for n in range(40)
    ]
    write_tar(folder / "data" / "interleaved" / "text.tar", texts)
    found, cases = {}, []
    for name in names:
        layout, modules, trained, recompute, train = CASES[name]
        run = write_run(folder / name, folder / "data", name=name, modules=modules, **train)
        run = _changed(run, trained, vae=name == "vae", dropout=0.2 if "dropout" in name else 0.0)
        build_index(run, describe(run), silent)
        replicas = layout != "units"  # which then reduce and gather beside computing
        plan = plan_of(run, _units(run, layout, recompute), 1, overlap=replicas)
        plan = plan.model_copy(
            update={
                "plan": plan.plan.model_copy(
                    update={"zero_stage": run.file.train.zero_stage, "trained": trained}
                )
            }
        )
        found[name] = (run, folder / "out" / name)
        cases.append(
            {
                "run": run.source,
                "plan": plan.model_dump(mode="json"),
                "out": str(found[name][1]),
                "steps": STEPS + (name in SPOILED),
                "spoilt": SPOILT if name in SPOILED else None,
            }
        )
    launch(
        4, "tests.runtime.options_worker:ranks", {"cases": cases}, folder / "logs", timeout_s=400
    )
    return found


def _changed(run: Run, trained: list[str] | None, vae: bool, dropout: float) -> Run:
    """The run with a choice of what is trained, with a VAE in front of its generator, with
    dropout."""
    content = yaml.safe_load(run.path.read_text())
    content["model"]["trained"] = trained
    if dropout:
        content["model"]["modules"][ENCODER]["config"]["hidden_dropout_prob"] = dropout
        content["model"]["modules"][GENERATOR]["config"]["dropout"] = dropout
    if vae:
        content["model"]["modules"][GENERATOR]["vae"] = VAE
        content["model"]["modules"][GENERATOR]["config"] |= {
            "in_channels": 4,
            "out_channels": 4,
            "sample_size": 8,
        }
    run.path.write_text(yaml.safe_dump(content))
    return read_run(run.path)


def _weights(out: Path) -> dict[str, torch.Tensor]:
    return {
        key: value
        for file in out.glob("stage-*.safetensors")
        for key, value in load_file(file).items()
    }


def _ranks(out: Path) -> list[dict[str, Any]]:
    return [json.loads((out / f"rank-{rank}.json").read_text()) for rank in range(4)]


@pytest.mark.parametrize("name", EXACT)
def test_training_equals_a_single_process(runs: Runs, name: str) -> None:
    run, out = runs[name]
    steps, left_out = STEPS + (name in SPOILED), SPOILT if name in SPOILED else None
    history, parameters, _ = reference(run, steps, left_out)
    found = json.loads((out / "history.json").read_text())
    assert len(found) == steps
    kept = [step for step in range(steps) if step != left_out]
    assert torch.allclose(
        torch.tensor(found)[kept], torch.tensor(history)[kept], rtol=1e-5, atol=1e-5
    )
    weights = _weights(out)
    assert set(weights) == set(parameters)
    for key, expected in parameters.items():
        # else a TP rank's part, whose gradients the norm has shown
        if weights[key].shape == expected.shape:
            assert torch.allclose(weights[key], expected, rtol=1e-5, atol=1e-5), key


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case[2] is not None])
def test_frozen_weights_have_neither_gradients_nor_moments(runs: Runs, name: str) -> None:
    run, out = runs[name]
    trained = run.file.model.trained
    assert trained is not None
    table = layer_table(run)
    start = {
        f"{layer.name}/{path}": (
            p,
            "projectors" if layer.published_name(path) is None else layer.module,
        )
        for layer in build_layers(run, 0, len(table))
        for path, p in layer.named_parameters()
    }
    expected = sum(2 * p.numel() for p, owner in start.values() if owner in trained)
    for key, weight in _weights(out).items():
        p, owner = start[key]
        if owner not in trained and weight.shape == p.shape:
            assert torch.equal(weight, p.to(weight.dtype)), key
    ranks, (layout, *_) = _ranks(out), CASES[name]
    if layout == "units":
        assert sum(rank["moments"] for rank in ranks) == expected
    assert not any(rank["gradients"] for rank in ranks)
    assert any(rank["frozen"] for rank in ranks)


def _counts(out: Path) -> list[dict[str, int]]:
    return [rank["counts"] for rank in _ranks(out)]


def test_where_nothing_before_trains_there_is_no_backward_and_no_gradient_is_sent(
    runs: Runs,
) -> None:
    encoder, first, last, generator = _counts(runs["frozen-encoder-projector"][1])
    assert "backward" not in encoder and "receive_gradient" not in encoder
    assert first["backward"] and "send_gradient" not in first and first["receive_gradient"]
    assert last["send_gradient"] and generator["send_gradient"]


def test_backwards_reach_as_far_as_what_is_trained(runs: Runs) -> None:
    for still in _counts(runs["frozen-both"][1])[:3]:
        assert not {"backward", "receive_gradient", "send_gradient"} & set(still)
    assert all(rank["backward"] for rank in _counts(runs["encoder-only"][1]))


def test_recomputation_changes_no_bit(runs: Runs) -> None:
    kept, again = (
        json.loads((runs[name][1] / "history.json").read_text())
        for name in ("skipped", "recompute")
    )
    assert kept[0] == again[0]


def test_a_bad_step_is_skipped_alike_everywhere(runs: Runs) -> None:
    for name in ("skipped", "skipped-zero1"):
        assert [rank["skipped"] for rank in _ranks(runs[name][1])] == [1] * 4


def test_a_bad_step_stops_all_ranks_and_names_the_module(runs: Runs) -> None:
    out = runs["stopped"][1]
    told = {rank["stopped"] for rank in _ranks(out)}
    assert len(told) == 1
    message = told.pop()
    assert message.startswith(
        f"Step {SPOILT} is not finite: {ENCODER} computed the first such number, in the forward of"
    )
    assert "text loss nan" in message and "disttrain_cli.train(resume=True)" in message
    assert len(json.loads((out / "history.json").read_text())) == SPOILT


def test_bf16_follows_the_reference(runs: Runs) -> None:
    run, out = runs["bf16-frozen"]
    history, _, _ = reference(run, STEPS)
    found = json.loads((out / "history.json").read_text())
    assert torch.allclose(torch.tensor(found), torch.tensor(history), rtol=0.05)
    weights = _weights(out)
    assert {weight.dtype for weight in weights.values()} == {torch.bfloat16}
