"""A model with two generators, or two image encoders, trains alike on every layout, side by side
and in a line.

Losses, norms and parameters equal a single process (fp32, 1e-5).
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from disttrain_cli.data.indexing.building import build_index
from disttrain_cli.data.sample_data import write_sample_data
from disttrain_cli.models.graph import describe, layer_table
from disttrain_cli.runtime.checkpoints import checkpoint
from disttrain_cli.runtime.checkpoints import folder as checkpoint_folder
from disttrain_cli.runtime.messages.proof import faults
from disttrain_cli.runtime.messages.records import SEND
from disttrain_cli.spec.plan import UnitPlan
from disttrain_cli.spec.runfile import Run, read_run
from tests.runtime.equivalence_worker import recorded, reference
from tests.runtime.factory import REFINER, plan_of, unit
from tests.runtime.factory import write_run as write_one
from tests.runtime.layouts import train

STEPS = 2
EYE, LLM, FIRST, SECOND, OTHER_EYE = (
    "image_encoder",
    "llm",
    "image_generator",
    "refiner",
    "other_encoder",
)
#: SigLIP, which has no class token, beside the tests' ViT, which has one.
SIGLIP: dict[str, Any] = {
    "kind": "encoder",
    "architecture": "siglip_vision_model",
    "merge": 2,
    "config": {
        "hidden_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 48,
        "image_size": 32,
        "patch_size": 8,
    },
}


def write_run(
    folder: Path,
    data: Path,
    more: dict[str, Any],
    trained: list[str] | None = None,
    without: tuple[str, ...] = (),
    **train: Any,
) -> Run:
    """The tests' run with more modules; the loss of a second generator weighs twice."""
    run = write_one(folder, data, name=folder.name, global_batch_size=4, steps=STEPS, **train)
    content = yaml.safe_load(run.path.read_text())
    model = content["model"]
    model["modules"] = {
        name: one for name, one in (model["modules"] | more).items() if name not in without
    }
    model |= {
        "trained": trained,
        "loss_weights": {
            "text": 1.0,
            "image": 0.5,
            "modules": {SECOND: 2.0} if SECOND in model["modules"] else {},
        },
    }
    run.path.write_text(yaml.safe_dump(content, sort_keys=False))
    run = read_run(run.path)
    build_index(run, describe(run))
    return run


def _seeing(run: Run) -> dict[str, list[UnitPlan]]:
    """By name, units on six ranks, of two image encoders."""
    modules = [info.module for info in layer_table(run)]
    e, o, m = (modules.count(name) for name in (EYE, OTHER_EYE, LLM))
    eye, other = unit("eye", [EYE], [e]), unit("other", [OTHER_EYE], [o])
    return {
        "eyes 1+3-2": [eye, unit("other", [OTHER_EYE], [o], 3), unit("llm", [LLM], [m], 2)],
        "eyes pp2+1-pp3": [
            unit("eye", [EYE], [1, e - 1]),
            other,
            unit("llm", [LLM], [1, m - 2, 1]),
        ],
        "eyes 2+tp2-tp2": [
            unit("eye", [EYE], [e], 2),
            unit("other", [OTHER_EYE], [o], tp=2),
            unit("llm", [LLM], [m], tp=2),
        ],
        "eyes both pp2-dp4": [
            unit("both", [EYE, OTHER_EYE], [e + 1, o - 1]),
            unit("llm", [LLM], [m], 4),
        ],
        "eyes 5-with the LLM": [
            unit("eye", [EYE], [e], 5),
            unit("rest", [OTHER_EYE, LLM], [o + m]),
        ],
        "eyes monolithic tp2 pp3": [unit("all", [EYE, OTHER_EYE, LLM], [e - 1, o, m + 1], tp=2)],
    }


def _layouts(run: Run) -> dict[str, list[UnitPlan]]:
    """By name, units on six ranks."""
    modules = [info.module for info in layer_table(run)]
    e, m, g, r = (modules.count(name) for name in (EYE, LLM, FIRST, SECOND))
    eye, llm = unit("eye", [EYE], [e]), unit("llm", [LLM], [m])
    gen, ref = unit("gen", [FIRST], [g]), unit("ref", [SECOND], [r])
    return {
        "1-2-1+2": [eye, unit("llm", [LLM], [m], 2), gen, unit("ref", [SECOND], [r], 2)],
        "1-1-2+pp2": [eye, llm, unit("gen", [FIRST], [g], 2), unit("ref", [SECOND], [3, r - 3])],
        "1-1-pp3+1": [eye, llm, unit("gen", [FIRST], [2, 3, g - 5]), ref],
        "1-tp2-tp2+1": [eye, unit("llm", [LLM], [m], tp=2), unit("gen", [FIRST], [g], tp=2), ref],
        "1-pp2-1+tp2": [eye, unit("llm", [LLM], [2, m - 2]), gen, unit("ref", [SECOND], [r], tp=2)],
        "1-1-both pp2 dp2": [eye, llm, unit("both", [FIRST, SECOND], [g + 2, r - 2], 2)],
        "with the LLM pp2+2": [
            unit("eye", [EYE], [e], 2),
            unit("rest", [LLM, FIRST], [m + 3, g - 3]),
            unit("ref", [SECOND], [r], 2),
        ],
        "monolithic pp3 dp2": [unit("all", [EYE, LLM, FIRST, SECOND], [e + m, g + 2, r - 2], 2)],
        "monolithic pp6": [unit("all", [EYE, LLM, FIRST, SECOND], [e, m, 4, g - 2, 1, r - 3])],
    }


CASES = [
    "1-2-1+2",
    "1-1-2+pp2",
    "1-1-pp3+1",
    "1-tp2-tp2+1",
    "1-pp2-1+tp2",
    "1-1-both pp2 dp2",
    "with the LLM pp2+2",
    "monolithic pp3 dp2",
    "monolithic pp6",
    "refiner alone 1-1-2+pp2",
    "frozen refiner 1-1-2+pp2",
    "frozen refiner monolithic pp6",
    "eyes 1+3-2",
    "eyes pp2+1-pp3",
    "eyes 2+tp2-tp2",
    "eyes both pp2-dp4",
    "eyes 5-with the LLM",
    "eyes monolithic tp2 pp3",
    "one eye frozen 1+3-2",
    "zero 1-2-1+2",
]
#: Those that run a second time with NCCL's order of messages, sends that block, and `overlap`.
IN_ORDER = [
    "1-2-1+2",
    "1-1-pp3+1",
    "1-tp2-tp2+1",
    "monolithic pp6",
    "frozen refiner 1-1-2+pp2",
    "eyes pp2+1-pp3",
    "zero 1-2-1+2",
]
BF16 = "bf16 1-2-1+2"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Six ranks train every layout in the same processes; references train alone. By case: (out,
    reference)."""
    folder = tmp_path_factory.mktemp("several")
    write_sample_data(folder / "data")
    two, eyes = {SECOND: REFINER}, {OTHER_EYE: SIGLIP}
    every = write_run(folder / "every", folder / "data", two)
    alone = write_run(folder / "alone", folder / "data", two, [SECOND])
    frozen = write_run(folder / "frozen", folder / "data", two, [LLM, FIRST, "projectors"])
    seeing = write_run(folder / "seeing", folder / "data", eyes, without=(FIRST,))
    one_eye = write_run(folder / "one-eye", folder / "data", eyes, [EYE, LLM], without=(FIRST,))
    zero = write_run(folder / "zero", folder / "data", two, zero_stage=1)
    bf16 = write_run(folder / "bf16", folder / "data", two, zero_stage=1, precision="bf16")
    cases = [(name, every, units) for name, units in _layouts(every).items()]
    cases += [
        ("refiner alone 1-1-2+pp2", alone, _layouts(alone)["1-1-2+pp2"]),
        *(
            (f"frozen refiner {name}", frozen, _layouts(frozen)[name])
            for name in ("1-1-2+pp2", "monolithic pp6")
        ),
        *((name, seeing, units) for name, units in _seeing(seeing).items()),
        ("one eye frozen 1+3-2", one_eye, _seeing(one_eye)["eyes 1+3-2"]),
        ("zero 1-2-1+2", zero, _layouts(zero)["1-2-1+2"]),
        (BF16, bf16, _layouts(bf16)["1-2-1+2"]),
    ]
    plans = [(name, run, plan_of(run, units, 1)) for name, run, units in cases]
    ordered = {
        f"{name} in order": (run, plan_of(run, units, 1, overlap=True))
        for name, run, units in cases
        if name in (*IN_ORDER, BF16)
    }
    plans += [(name, *case) for name, case in ordered.items()]
    out = train(plans, STEPS, folder, in_order=ordered)
    references = {id(run): reference(run, STEPS) for run in (every, alone, frozen, seeing, one_eye)}
    references[id(zero)] = references[id(every)]
    return {
        f"{name}{how}": (out / f"{name}{how}", references.get(id(run)))
        for name, run, _ in cases
        for how in ("", " in order")
    }


@pytest.mark.slow
@pytest.mark.parametrize("name", [*CASES, *(f"{name} in order" for name in IN_ORDER)])
def test_layout_equals_single_process(runs: dict[str, Any], name: str) -> None:
    out, (history, parameters, _) = runs[name]
    found = json.loads((out / "history.json").read_text())
    # text, both images, norm
    assert [len(row) for row in found] == [2 if "eye" in name else 4] * STEPS
    assert torch.allclose(torch.tensor(found), torch.tensor(history), rtol=1e-5, atol=1e-5)
    saved = checkpoint_folder.latest(out / "checkpoints")
    assert saved is not None
    weights = checkpoint.read_tensors(saved)
    assert len(weights) == len(parameters)
    for key, expected in parameters.items():
        assert torch.allclose(weights[f"weight/{key}"], expected, rtol=1e-5, atol=1e-5), key


@pytest.mark.slow
def test_the_order_of_messages_changes_no_bit_in_bf16(runs: dict[str, Any]) -> None:
    usual, ordered = (
        json.loads((runs[name][0] / "history.json").read_text())
        for name in (BF16, f"{BF16} in order")
    )
    assert len(ordered) == STEPS and ordered == usual


@pytest.mark.slow
@pytest.mark.parametrize("name", [*IN_ORDER, BF16])
def test_messages_ran_in_an_order_that_nccl_can_run(runs: dict[str, Any], name: str) -> None:
    records = recorded(runs[f"{name} in order"][0])
    assert len(records) == 6 and faults(records) == []
    messages = [one for record in records for one in record.operations if one.is_message]
    assert messages and all(" to " in one.communicator for one in messages)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["zero 1-2-1+2", BF16])
def test_reductions_begin_before_the_last_gradients_leave(runs: dict[str, Any], name: str) -> None:
    """On the replicas of the LLM, which send to the encoder where they have images."""
    kinds = [
        "".join(
            "S"
            if one.kind == SEND and "to eye" in one.communicator
            else "R" * one.kind.startswith("reduce_scatter")
            for one in record.operations
        )
        for record in recorded(runs[f"{name} in order"][0])[1:3]
    ]
    assert kinds[0].count("R") == kinds[1].count("R") >= 3 * STEPS
    assert any("RS" in one for one in kinds), kinds
