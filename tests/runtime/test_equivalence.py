"""Layouts of six ranks train the same model: losses, gradient norms and parameters equal a single
process (fp32, 1e-5).

One of each kind, a few of them in every run; `test_equivalence_matrix` draws many more.
"""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch

from disttrain_cli.data.epochs.mixture import Mixture
from disttrain_cli.data.index.sample_index import read_index
from disttrain_cli.data.indexing.building import build_index
from disttrain_cli.data.packing import SequenceStream
from disttrain_cli.data.sample_data import write_sample_data
from disttrain_cli.models.graph import describe, layer_table
from disttrain_cli.runtime.checkpoints import checkpoint
from disttrain_cli.runtime.checkpoints import folder as checkpoint_folder
from disttrain_cli.schedule.one_f_one_b import last_slots
from disttrain_cli.spec.plan import UnitPlan
from disttrain_cli.spec.progress import silent
from disttrain_cli.spec.runfile import Run
from tests.cases import mostly_slow
from tests.data.dataset import damaged, encoded, image, interleaved, text, write_tar
from tests.runtime.equivalence_worker import SLOTWISE, orders_of, reference
from tests.runtime.factory import LORA, plan_of, unit, write_run
from tests.runtime.layouts import train

STEPS = 2
POLICIES = ("paper", "best")  # beside none, which the others use
ENCODER, LLM, GENERATOR = "image_encoder", "llm", "image_generator"


def _counts(run: Run) -> dict[str, int]:
    modules = [info.module for info in layer_table(run)]
    return {name: modules.count(name) for name in dict.fromkeys(modules)}


def _layouts(run: Run) -> dict[str, tuple[list[UnitPlan], int]]:
    """Name → (units, microbatch size); all on six ranks, so that they share their start-up."""
    e, m, g = (_counts(run)[name] for name in (ENCODER, LLM, GENERATOR))

    def three(encoder: UnitPlan, llm: UnitPlan, generator: UnitPlan) -> list[UnitPlan]:
        return [encoder, llm, generator]

    everything = [ENCODER, LLM, GENERATOR]
    return {
        "3-2-1": (
            three(
                unit("enc", [ENCODER], [e], 3),
                unit("llm", [LLM], [m], 2),
                unit("gen", [GENERATOR], [g]),
            ),
            1,
        ),
        "2-pp2-2": (
            three(
                unit("enc", [ENCODER], [e], 2),
                unit("llm", [LLM], [2, m - 2]),
                unit("gen", [GENERATOR], [g], 2),
            ),
            1,
        ),  # slots of one sequence: some are text only
        "pp2-2-pp2": (
            three(
                unit("enc", [ENCODER], [1, e - 1]),
                unit("llm", [LLM], [m], 2),
                unit("gen", [GENERATOR], [3, g - 3]),
            ),
            1,
        ),
        "1-tp2dp2-1": (
            three(
                unit("enc", [ENCODER], [e]),
                unit("llm", [LLM], [m], 2, tp=2),
                unit("gen", [GENERATOR], [g]),
            ),
            1,
        ),
        "monolithic-tp2pp3": (
            [
                unit("all", everything, [e + 1, m + 1, g - 2], tp=2).model_copy(
                    update={"tp_overlap": True}
                )
            ],
            1,
        ),
        "monolithic-pp3dp2": ([unit("all", everything, [e + 1, m + 1, g - 2], 2)], 1),
        "dealt-tp2dp3": ([_dealt(unit("all", everything, [e + m + g], 3, tp=2))], 1),
        "dealt-tp2pp3": (
            [
                _dealt(unit("all", everything, [e + 1, m - 2, g + 1], tp=2)).model_copy(
                    update={"tp_overlap": True, "weight_delay": [1, 0, 1]}
                )
            ],
            2,
        ),
    }


def _dealt(one: UnitPlan) -> UnitPlan:
    """The unit with encoder and generator whole on every rank, which works on other images."""
    return one.model_copy(update={"module_tp": {ENCODER: 1, GENERATOR: 1}})


def _later(one: UnitPlan) -> UnitPlan:
    """The unit with gradients of weights later than those of inputs."""
    return one.model_copy(
        update={"weight_delay": DELAYS["all" if len(one.modules) > 1 else one.modules[0]]}
    )


@pytest.fixture(scope="module")
def runs(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """Six ranks train what the selected tests compare, in the same processes; the reference trains
    alone."""
    folder = tmp_path_factory.mktemp("equivalence")
    write_sample_data(folder / "data")
    texts = [
        interleaved(f"{n:03d}", text(f"Text {n}: " + "no image here, only words. " * 9))
        for n in range(240)
    ]
    cut = [
        (f"b{n}.{place}.jpg", damaged(encoded(24, 24)) if place else encoded(24, 24))
        for n in range(160)
        for place in range(2)
    ]  # left out of both losses on all ranks, also the pictures that can be decoded
    left_out = [
        interleaved(
            f"b{n}",
            text("Not trained."),
            image(f"b{n}.0.jpg", n % 3 == 2),
            image(f"b{n}.1.jpg", n % 3 == 1),
        )
        for n in range(160)
    ]
    write_tar(folder / "data" / "interleaved" / "text.tar", [*texts, *cut, *left_out])
    run = write_run(folder, folder / "data")
    zero = write_run(folder / "zero", folder / "data", name="zero", zero_stage=1)
    bf16 = write_run(folder / "bf16", folder / "data", name="bf16", zero_stage=1, precision="bf16")
    tied, tied_zero, tied_bf16 = (
        write_run(folder / f"tied-{number}", folder / "data", name="tied", tied=True, **train)
        for number, train in enumerate(
            ({}, {"zero_stage": 1}, {"zero_stage": 1, "precision": "bf16"})
        )
    )
    ordered = [
        write_run(folder / policy, folder / "data", name=policy, ordering=policy)
        for policy in POLICIES
    ]
    lora = write_run(folder / "lora", folder / "data", name="lora", lora=LORA, zero_stage=1)
    for each in (run, zero, bf16, lora, tied, tied_zero, tied_bf16, *ordered):
        build_index(each, describe(each), silent)
    cases = [(name, run, *layout) for name, layout in _layouts(run).items()]
    cases += [(f"zero1-{name}", zero, *_layouts(zero)[name]) for name in ZERO]
    cases += [("lora", lora, *_layouts(lora)["1-tp2dp2-1"])]
    cases += [("faulty", run, *_layouts(run)["3-2-1"])]
    cases += [(f"bf16-{name}", bf16, *_layouts(bf16)[name]) for name in BF16]
    cases += [(f"{each.file.name}-3-2-1", each, *_layouts(each)["3-2-1"]) for each in ordered]
    later = [
        (f"later-{name}", each, list(map(_later, units)), m)
        for name, each, units, m in cases
        if name in LATER
    ]
    cases += [
        (f"overlap-{name}", *case)
        for name, *case in [*cases, *later]
        if name in OVERLAPPING or f"overlap-{name}" in BY_LAYER
    ]
    cases += [(f"{SLOTWISE}-{name}", *case) for name, *case in later]
    cases += [case for case in later if case[0] in BY_LAYER]
    cases += [(f"tied-{name}", tied, *_layouts(tied)[name]) for name in TIED]
    units, m = _layouts(tied)["monolithic-pp3dp2"]
    units = [one.model_copy(update={"layers_per_stage": APART}) for one in units]
    later_units = list(map(_later, units))
    cases += [
        ("tied-apart", tied, units, m),
        ("tied-zero1-apart", tied_zero, units, m),
        ("overlap-tied-zero1-later-apart", tied_zero, later_units, m),
        ("overlap-tied-bf16-later-apart", tied_bf16, later_units, m),
    ]
    compared = {"faulty", "lora"} | {
        _base(item.callspec.params["name"])
        for item in request.session.items
        if item.path == request.path and hasattr(item, "callspec")
    }
    plans = [
        (name, each, plan_of(each, units, m, name.startswith("overlap")))
        for name, each, units, m in cases
        if _base(name) in compared
    ]
    train(plans, STEPS, folder)
    history, parameters, orders = reference(run, STEPS)
    tied_history, tied_parameters, _ = reference(tied, STEPS)
    layouts = {
        each.file.train.ordering: plan_of(each, *_layouts(each)["3-2-1"]).plan
        for each in (run, *ordered)
    }
    index = read_index(run, describe(run))
    drawn = (
        SequenceStream(Mixture(index, run.file.train.seed))
        .batch(0, STEPS * run.file.train.global_batch_size)
        .samples
    )
    assert any(index.keys[row].startswith("b") for row in drawn.tolist()), (
        "no damaged sample is in these steps"
    )
    members = {
        each.file.train.ordering: [
            [place for slot in order.slots for place in slot.sequences]
            for order in (
                orders_of(each, layouts[each.file.train.ordering]).of(step)[0]
                for step in range(STEPS)
            )
        ]
        for each in (run, *ordered)
    }
    return {
        "folder": folder / "out",
        "history": history,
        "parameters": parameters,
        "tied history": tied_history,
        "tied parameters": tied_parameters,
        "lora": reference(lora, STEPS)[:2],
        "orders": orders,
        "members": members,
    }


def _base(name: str) -> str:
    """Return the case that messages or parts of a slot are compared with."""
    return name.removeprefix("overlap-").removeprefix(f"{SLOTWISE}-")


def _trained(runs: dict[str, Any], name: str) -> tuple[list[list[float]], dict[str, torch.Tensor]]:
    out: Path = runs["folder"] / name
    folder = checkpoint_folder.latest(out / "checkpoints")
    assert folder is not None
    return json.loads((out / "history.json").read_text()), checkpoint.read_tensors(folder)


ZERO = ("1-tp2dp2-1", "monolithic-pp3dp2", "dealt-tp2dp3")
BF16 = ("1-tp2dp2-1",)
LATER = ("zero1-monolithic-pp3dp2", "3-2-1", "bf16-1-tp2dp2-1")
DELAYS = {ENCODER: [5], LLM: [1], GENERATOR: [0], "all": [1, 0, 2]}  # of three slots
FP32 = [
    "3-2-1",
    "2-pp2-2",
    "pp2-2-pp2",
    "1-tp2dp2-1",
    "monolithic-pp3dp2",
    "monolithic-tp2pp3",
    "dealt-tp2dp3",
    "dealt-tp2pp3",
    *(f"zero1-{name}" for name in ZERO),
    *(f"{policy}-3-2-1" for policy in POLICIES),
]
#: Trained in every run.
FAST = ("1-tp2dp2-1", "dealt-tp2pp3", "zero1-monolithic-pp3dp2")
OVERLAPPING = (
    "3-2-1",
    "1-tp2dp2-1",
    "monolithic-pp3dp2",
    *(f"zero1-{name}" for name in ZERO),
    *(f"bf16-{name}" for name in BF16),
    f"later-{LATER[0]}",
)
#: With the embedding and the head on one stage, on two of a unit, and on two of two TP ranks each.
TIED = ("3-2-1", "2-pp2-2", "monolithic-tp2pp3")
APART = [5, 2, 10]  # layers of stages: the head is on the one in the middle
TIED_FP32 = [
    *(f"tied-{name}" for name in TIED),
    "tied-apart",
    "tied-zero1-apart",
    "overlap-tied-zero1-later-apart",
]
TIED_BF16 = ["overlap-tied-bf16-later-apart"]
#: Beside `SLOTWISE`.
BY_LAYER = (f"later-{LATER[0]}", *(f"overlap-later-{name}" for name in LATER))


@pytest.mark.parametrize("name", mostly_slow(FP32, *FAST))
def test_layout_equals_single_process(runs: dict[str, Any], name: str) -> None:
    history, weights = _trained(runs, name)
    assert torch.allclose(
        torch.tensor(history), torch.tensor(runs["history"]), rtol=1e-5, atol=1e-5
    )
    assert len(weights) == len(runs["parameters"])
    for key, expected in runs["parameters"].items():
        assert torch.allclose(weights[f"weight/{key}"], expected, rtol=1e-5, atol=1e-5), key


@pytest.mark.parametrize("name", mostly_slow(TIED_FP32, TIED_FP32[-1]))
def test_tied_weights_equal_a_single_process(runs: dict[str, Any], name: str) -> None:
    """The ranks have compared both copies where there are two (`check_twins`)."""
    history, weights = _trained(runs, name)
    expected = torch.tensor(runs["tied history"])
    assert torch.allclose(torch.tensor(history), expected, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(expected, torch.tensor(runs["history"]), rtol=1e-3, atol=1e-3)
    assert weights.keys() == {f"weight/{key}" for key in runs["tied parameters"]} | {
        key for key in weights if not key.startswith("weight/")
    }
    assert "weight/llm.head/lm_head.weight" not in weights
    for key, value in runs["tied parameters"].items():
        assert torch.allclose(weights[f"weight/{key}"], value, rtol=1e-5, atol=1e-5), key


@pytest.mark.parametrize("name", mostly_slow(TIED_BF16))
def test_tied_weights_in_bf16_follow_the_reference(runs: dict[str, Any], name: str) -> None:
    history, _ = _trained(runs, name)
    assert torch.allclose(torch.tensor(history), torch.tensor(runs["tied history"]), rtol=0.05)


def test_adapters_equal_single_process(runs: dict[str, Any]) -> None:
    """Of every module; `test_lora` has other layouts."""
    (history, weights), (expected, parameters) = _trained(runs, "lora"), runs["lora"]
    assert torch.allclose(torch.tensor(history), torch.tensor(expected), rtol=1e-5, atol=1e-5)
    for key, values in parameters.items():
        assert torch.allclose(weights[f"weight/{key}"], values, rtol=1e-5, atol=1e-5), key


@pytest.mark.parametrize("name", [f"bf16-{name}" for name in BF16])
def test_bf16_follows_the_reference(runs: dict[str, Any], name: str) -> None:
    history, _ = _trained(runs, name)
    assert torch.allclose(torch.tensor(history), torch.tensor(runs["history"]), rtol=0.05)


@pytest.mark.parametrize("name", mostly_slow(OVERLAPPING, "zero1-monolithic-pp3dp2"))
def test_messages_beside_computing_change_nothing(runs: dict[str, Any], name: str) -> None:
    """The same buckets are summed over the same ranks: also in slots without images."""
    history, weights = _trained(runs, name)
    beside, same = _trained(runs, f"overlap-{name}")
    assert beside == history
    assert {key: torch.equal(value, same[key]) for key, value in weights.items()} == dict.fromkeys(
        same, True
    )


@pytest.mark.parametrize("name", mostly_slow(BY_LAYER, BY_LAYER[0]))
def test_gradients_of_weights_are_the_same_by_layer_as_by_slot(
    runs: dict[str, Any], name: str
) -> None:
    """Those of each weight are summed in the order of the slots either way."""
    history, weights = _trained(runs, name)
    by_slot, same = _trained(runs, f"{SLOTWISE}-{name.removeprefix('overlap-')}")
    assert by_slot == history
    assert {key: torch.equal(value, same[key]) for key, value in weights.items()} == dict.fromkeys(
        same, True
    )


@pytest.mark.parametrize("name", mostly_slow(BY_LAYER[:2], BY_LAYER[0]))
def test_weights_parts_have_a_row_per_slot_one_after_the_other(
    runs: dict[str, Any], name: str
) -> None:
    kinds, most = {"backward": 0, "weights": 1}, 0
    for folder in (runs["folder"] / name / "traces").glob("rank*"):
        rows = [row for row in pq.read_table(folder).to_pylist() if row["operation"] in kinds]
        assert all(row["start_ns"] <= row["end_ns"] for row in rows)
        assert all(a["end_ns"] <= b["start_ns"] for a, b in pairwise(rows))
        delay = DELAYS["all"][rows[0]["stage"]]
        for step in range(STEPS):
            order = [
                (kinds[row["operation"]], row["slot"], row["module"])
                for row in rows
                if row["step"] == step
            ]
            assert len(order) == len(set(order))
            done = [slot for kind, slot, _ in order if kind == kinds["weights"]]
            assert done == sorted(done)
            after_last = order[max(i for i, (kind, *_) in enumerate(order) if not kind) + 1 :]
            left = {slot for _, slot, _ in after_last}
            assert left == set(done) & set(last_slots(3, delay))
            most = max(most, len(left))
    assert most > 1  # of several slots at a time


def test_the_layouts_were_given_every_mix_of_modalities(runs: dict[str, Any]) -> None:
    """Text only (so that whole slots are), images only read, and images read and generated."""
    mixes = set()
    for slot in (order.slots[0] for order in runs["orders"]):
        for place in range(len(slot.sequences)):
            mixes.add(
                (place in slot.items["image"].sequence, place in slot.items["target"].sequence)
            )
    assert mixes >= {(False, False), (True, False), (True, True)}


def test_policies_order_the_same_sequences_differently(runs: dict[str, Any]) -> None:
    none, *others = (runs["members"][policy] for policy in ("none", *POLICIES))
    for own in others:
        assert own != none
        assert [sorted(step) for step in own] == [sorted(step) for step in none]


def test_the_comparison_finds_a_broker_that_reverses_rows(runs: dict[str, Any]) -> None:
    history, _ = _trained(runs, "faulty")
    assert not torch.allclose(
        torch.tensor(history), torch.tensor(runs["history"]), rtol=1e-3, atol=1e-3
    )
