"""Any layout opens any checkpoint, averages and held-out losses are the same in all, ranks are
killed in writing."""

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from disttrain_cli.data.index.sample_index import read_index
from disttrain_cli.data.indexing.building import build_index
from disttrain_cli.data.sample_data import write_sample_data
from disttrain_cli.errors import RankFailedError
from disttrain_cli.models.graph import build_layers, describe, layer_table
from disttrain_cli.runtime.checkpoints import checkpoint
from disttrain_cli.runtime.launching.launch import launch
from disttrain_cli.runtime.outputs.export import export
from disttrain_cli.spec.plan import UnitPlan
from disttrain_cli.spec.progress import silent
from disttrain_cli.spec.runfile import Run, read_run
from tests.runtime.checkpoints.checkpoint_parts import engine_of
from tests.runtime.checkpoints.checkpoint_worker import history_of
from tests.runtime.factory import plan_of, unit, write_run
from tests.runtime.outputs.test_export import trained
from tests.runtime.test_evaluation import SEQUENCES, mean_losses

pytestmark = pytest.mark.slow

ENCODER, LLM, GENERATOR = "image_encoder", "llm", "image_generator"
ALL = [ENCODER, LLM, GENERATOR]
DECAY = 0.8
#: A mixture of experts in place of the LLM.
EXPERTS: dict[str, Any] = {
    "architecture": "mixtral",
    "config": {
        "hidden_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "intermediate_size": 32,
        "vocab_size": 272,
        "num_local_experts": 4,
    },
}
#: Runs that reduce and gather beside computing.
OVERLAPPING = (
    "experts",
    "experts tp2dp2ep2",
    "bf16 experts tp2dp2ep4",
    *("zero tp2dp2", "again pp2dp2", "bf16 same", "unfrozen", "frozen other"),
)
#: Runs that start from the weights of others, without a step: run, layout, and where the weights
#: are.
STARTS = {
    "from checkpoint": ("zero", "tp2dp2", "whole/checkpoints/step-000002"),
    "from bf16": ("bf16", "1-tp2-1", "bf16/checkpoints/step-000002"),
    "from export": ("zero", "tp2dp2", "export"),
    "from export bf16": ("bf16", "pp2dp2", "export"),
    "from export frozen": ("frozen", "1-2-1", "export"),
}


def shared(one: UnitPlan) -> UnitPlan:
    """The unit, each replica's work on twice the ranks."""
    return one.model_copy(update={"cp": 2, "gpus": 2 * one.gpus})


def experts_over(ep: int, one: UnitPlan) -> UnitPlan:
    """The unit, its experts divided over so many ranks."""
    return one.model_copy(update={"ep": ep})


def dealt(one: UnitPlan) -> UnitPlan:
    """The unit, encoder and generator whole on every rank."""
    return one.model_copy(update={"module_tp": {ENCODER: 1, GENERATOR: 1}})


def _run(
    folder: Path,
    data: Path,
    name: str,
    trained: list[str] | None = None,
    llm: dict[str, Any] | None = None,
    **train: Any,
) -> Run:
    run = write_run(
        folder / name,
        data,
        name=name,
        held_out=0.3,
        **train,
        ema={"decay": DECAY, "modules": [GENERATOR, LLM]},
        evaluation={"every_steps": 1, "sequences": SEQUENCES},
    )
    if trained is not None or llm is not None:
        content = yaml.safe_load(run.path.read_text())
        content["model"]["trained"] = trained
        content["model"]["modules"][LLM] |= llm or {}
        run.path.write_text(yaml.safe_dump(content))
        run = read_run(run.path)
    build_index(run, describe(run), silent)
    return run


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four ranks train in one layout, go on in it, and in others from its checkpoint."""
    folder = tmp_path_factory.mktemp("checkpoints")
    write_sample_data(folder / "data")
    plain, zero, bf16, frozen, experts, bf16_experts = (
        _run(folder, folder / "data", name, **train)
        for name, train in {
            "plain": {},
            "zero": {"zero_stage": 1},
            "bf16": {"zero_stage": 1, "precision": "bf16"},
            "frozen": {"trained": [LLM, "projectors"], "zero_stage": 1},
            "experts": {"llm": EXPERTS, "zero_stage": 1},
            "bf16-experts": {"llm": EXPERTS, "zero_stage": 1, "precision": "bf16"},
        }.items()
    )
    modules = [info.module for info in layer_table(plain)]
    e, m, g = (modules.count(name) for name in ALL)
    layouts = {
        "1-2-1": [
            unit("enc", [ENCODER], [e]),
            unit("llm", [LLM], [m], 2),
            unit("gen", [GENERATOR], [g]),
        ],
        "dp4": [unit("all", ALL, [e + m + g], 4)],
        "pp2dp2": [unit("all", ALL, [e + 2, m + g - 2], 2)],
        "1-pp2-1": [
            unit("enc", [ENCODER], [e]),
            unit("llm", [LLM], [2, m - 2]),
            unit("gen", [GENERATOR], [g]),
        ],
        "1-tp2-1": [
            unit("enc", [ENCODER], [e]),
            unit("llm", [LLM], [m], tp=2),
            unit("gen", [GENERATOR], [g]),
        ],
        "tp2dp2": [unit("all", ALL, [e + m + g], 2, 2)],
        "dealt tp2dp2": [dealt(unit("all", ALL, [e + m + g], 2, 2))],
        "tp2dp2ep4": [experts_over(4, unit("all", ALL, [e + m + g], 2, 2))],
        "tp2dp2ep2": [experts_over(2, unit("all", ALL, [e + m + g], 2, 2))],
        "cp2-1-1": [
            shared(unit("enc", [ENCODER], [e])),
            unit("llm", [LLM], [m]),
            unit("gen", [GENERATOR], [g]),
        ],
        "cp2-2": [
            shared(unit("sees", [ENCODER, LLM], [e + m])),
            unit("gen", [GENERATOR], [g], 2),
        ],
    }
    cases: list[dict[str, Any]] = []

    def case(
        name: str,
        run: Run,
        layout: str,
        last: int,
        load: str = "",
        save: tuple[int, ...] = (),
        start: str = "",
    ) -> None:
        size = 1 if layout == "dp4" else 3
        plan = plan_of(run, layouts[layout], size, name in OVERLAPPING)
        cases.append(
            {
                "name": name,
                "run": run.source,
                "plan": plan.model_dump(mode="json"),
                "last": last,
                "load": load and str(folder / "out" / load),
                "save": save,
                "start": start and str(folder / "out" / start),
                "out": str(folder / "out" / name),
            }
        )

    case("whole", plain, "1-2-1", 4, save=(2, 4))
    from_2 = "whole/checkpoints/step-000002"
    case("same", plain, "1-2-1", 4, from_2, save=(4,))
    for layout in ("1-pp2-1", "pp2dp2", "tp2dp2"):
        case(f"plain {layout}", plain, layout, 4, from_2)
    for layout in ("1-tp2-1", "pp2dp2", "tp2dp2"):
        case(f"zero {layout}", zero, layout, 4, from_2, save=(3, 4) if layout == "tp2dp2" else (3,))
    case("back", plain, "1-2-1", 4, "zero tp2dp2/checkpoints/step-000003")
    for layout in ("pp2dp2", "1-tp2-1"):
        case(f"again {layout}", zero, layout, 4, f"zero {layout}/checkpoints/step-000003")
    for layout in ("cp2-1-1", "cp2-2", "dealt tp2dp2"):
        case(f"zero {layout}", zero, layout, 4, from_2, save=(3,))
        case(f"again {layout}", zero, layout, 4, f"zero {layout}/checkpoints/step-000003")
    case("cp2 to tp2", zero, "tp2dp2", 4, "zero cp2-1-1/checkpoints/step-000003")
    case("cp2 to pp2", plain, "1-pp2-1", 4, "zero cp2-2/checkpoints/step-000003")
    case("cp2 to cp2", zero, "cp2-2", 4, "zero cp2-1-1/checkpoints/step-000003")
    case("dealt to tp2", zero, "tp2dp2", 4, "zero dealt tp2dp2/checkpoints/step-000003")
    case("tp2 to dealt", plain, "dealt tp2dp2", 4, "zero tp2dp2/checkpoints/step-000003")
    case("bf16", bf16, "pp2dp2", 3, save=(2,))
    case("bf16 dealt", bf16, "dealt tp2dp2", 3, "bf16/checkpoints/step-000002")
    case("bf16 same", bf16, "pp2dp2", 3, "bf16/checkpoints/step-000002")
    case("bf16 other", bf16, "1-tp2-1", 3, "bf16/checkpoints/step-000002")
    case("frozen", frozen, "1-2-1", 3, save=(2,))
    case("frozen dealt", frozen, "dealt tp2dp2", 3, "frozen/checkpoints/step-000002")
    case("frozen other", frozen, "tp2dp2", 3, "frozen/checkpoints/step-000002", save=(3,))
    case("unfrozen", zero, "tp2dp2", 4, "frozen/checkpoints/step-000002", save=(3,))
    case("unfrozen on", zero, "tp2dp2", 4, "unfrozen/checkpoints/step-000003")
    case("unfrozen other", plain, "1-pp2-1", 4, "frozen/checkpoints/step-000002")
    for precision, run in (("", experts), ("bf16 ", bf16_experts)):
        case(f"{precision}experts", run, "tp2dp2ep2", 4, save=(2,))
        from_2 = f"{precision}experts/checkpoints/step-000002"
        for layout in ("1-2-1", "tp2dp2ep2", "tp2dp2ep4") if not precision else ("tp2dp2ep4",):
            case(f"{precision}experts {layout}", run, layout, 4, from_2, save=(4,))
    exported = _run(folder, folder / "data", "exported", seed=5)
    trained(exported)
    export(exported, folder / "out" / "export")
    for name, (run, layout, start) in STARTS.items():
        case(
            name,
            {"plain": plain, "zero": zero, "bf16": bf16, "frozen": frozen}[run],
            layout,
            0,
            save=(0,),
            start=start,
        )
    launch(
        4,
        "tests.runtime.checkpoints.checkpoint_worker:ranks",
        {"cases": cases},
        folder / "logs",
        timeout_s=500,
    )
    return folder / "out"


def test_the_same_layout_goes_on_bit_identically(out: Path) -> None:
    assert torch.equal(history_of(out, "same"), history_of(out, "whole")[2:])
    for layout in ("pp2dp2", "1-tp2-1", "cp2-1-1", "cp2-2", "dealt tp2dp2"):
        assert torch.equal(
            history_of(out, f"again {layout}"), history_of(out, f"zero {layout}")[1:]
        )
    assert torch.equal(history_of(out, "bf16 same"), history_of(out, "bf16")[2:])
    groups = ("weight", "exp_avg", "exp_avg_sq", "ema")
    own, other = (
        checkpoint.read_tensors(out / name / "checkpoints" / "step-000004", groups=groups)
        for name in ("same", "whole")
    )
    assert own.keys() == other.keys() and all(torch.equal(own[key], other[key]) for key in own)


@pytest.mark.parametrize(
    "name",
    [
        "plain 1-pp2-1",
        "plain pp2dp2",
        "plain tp2dp2",
        "zero 1-tp2-1",
        "zero pp2dp2",
        "zero tp2dp2",
        "zero cp2-1-1",
        "zero cp2-2",
        "zero dealt tp2dp2",
    ],
)
def test_another_layout_goes_on_with_equal_losses(out: Path, name: str) -> None:
    assert torch.allclose(history_of(out, name), history_of(out, "whole")[2:], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "name",
    ["back", "cp2 to tp2", "cp2 to pp2", "cp2 to cp2", "dealt to tp2", "tp2 to dealt"],
)
def test_what_another_layout_went_on_to_is_opened_by_others(out: Path, name: str) -> None:
    assert torch.allclose(history_of(out, name), history_of(out, "whole")[3:], rtol=1e-5, atol=1e-5)


def test_experts_go_on_at_any_degree_of_parallelism(out: Path) -> None:
    whole = history_of(out, "experts")
    assert torch.equal(history_of(out, "experts tp2dp2ep2"), whole[2:])
    for layout in ("1-2-1", "tp2dp2ep4"):
        own = history_of(out, f"experts {layout}")
        assert torch.allclose(own, whole[2:], rtol=1e-5, atol=1e-5)
    own, other = (
        checkpoint.read_tensors(
            out / f"experts {layout}" / "checkpoints" / "step-000004",
            groups=("weight", "exp_avg", "exp_avg_sq", "ema"),
        )
        for layout in ("1-2-1", "tp2dp2ep4")
    )
    assert own.keys() == other.keys()
    for key, values in other.items():
        assert torch.allclose(own[key], values, rtol=1e-5, atol=1e-5), key
    assert any(key.endswith("experts.gate_up_proj") for key in own)
    bf16 = history_of(out, "bf16 experts")
    assert torch.allclose(bf16, whole, rtol=0.05)
    assert torch.allclose(history_of(out, "bf16 experts tp2dp2ep4"), bf16[2:], rtol=0.03)


def test_another_layout_of_bf16_goes_on_alike(out: Path) -> None:
    for name in ("bf16 other", "bf16 dealt"):
        assert torch.allclose(history_of(out, name), history_of(out, "bf16")[2:], rtol=0.03)


def test_frozen_modules_have_weights_and_no_moments(out: Path) -> None:
    for name in ("frozen other", "frozen dealt"):
        assert torch.allclose(
            history_of(out, name), history_of(out, "frozen")[2:], rtol=1e-5, atol=1e-5
        )
    groups = ("weight", "exp_avg")
    before, after = (
        checkpoint.read_tensors(out / name / "checkpoints" / step, groups=groups)
        for name, step in (("frozen", "step-000002"), ("frozen other", "step-000003"))
    )
    still = [key for key in before if key.startswith(f"weight/{ENCODER}.block")]
    assert (
        still
        and before.keys() == after.keys()
        and not any(key.startswith(f"exp_avg/{ENCODER}.block") for key in before)
    )
    assert all(torch.equal(before[key], after[key]) for key in still)


def test_what_was_frozen_trains_on_with_moments_of_its_own(out: Path) -> None:
    """In any layout, and after another checkpoint; the first step is AdamW's with the first
    moments."""
    assert torch.allclose(
        history_of(out, "unfrozen other"), history_of(out, "unfrozen"), rtol=1e-5, atol=1e-5
    )
    assert torch.equal(history_of(out, "unfrozen on"), history_of(out, "unfrozen")[1:])
    groups = ("weight", "exp_avg", "exp_avg_sq")
    before, after = (
        checkpoint.read_tensors(out / name / "checkpoints" / step, groups=groups)
        for name, step in (("frozen", "step-000002"), ("unfrozen", "step-000003"))
    )
    beta1, beta2, lr, decay, eps = 0.9, 0.95, 1e-3, 0.01, 1e-5
    fresh = [
        key.removeprefix("weight/")
        for key in before
        if key.startswith("weight/") and f"exp_avg/{key.removeprefix('weight/')}" not in before
    ]
    assert (
        any(name.startswith(f"{GENERATOR}.") for name in fresh)
        and f"{ENCODER}.projector/norm.weight" in fresh
    )
    for name in fresh:
        mean, square = (after[f"{moment}/{name}"] for moment in ("exp_avg", "exp_avg_sq"))
        assert torch.allclose(
            mean / (1 - beta1), (square / (1 - beta2)).sqrt().copysign(mean), rtol=1e-4, atol=1e-9
        )
        if sum(size > 1 for size in mean.shape) > 1:
            gradient, weight = mean / (1 - beta1), before[f"weight/{name}"]
            expected = weight * (1 - lr * decay) - lr * gradient / (gradient.abs() + eps)
            assert torch.allclose(after[f"weight/{name}"], expected, rtol=1e-5, atol=1e-7), name


@pytest.mark.parametrize("name", STARTS)
def test_a_run_starts_from_the_weights_of_another_bit_for_bit(out: Path, name: str) -> None:
    _, _, start = STARTS[name]
    folder = (
        out.parent / "exported" / "runs" / "exported" / "checkpoints" / "step-000001"
        if start == "export"
        else out / start
    )
    own = checkpoint.read_tensors(
        out / name / "checkpoints" / "step-000000", groups=("weight", "exp_avg")
    )
    other = checkpoint.read_tensors(folder)
    assert {key for key in own if key.startswith("weight/")} == other.keys()
    assert all(torch.equal(own[key], values.to(own[key].dtype)) for key, values in other.items())
    assert not any(values.any() for key, values in own.items() if key.startswith("exp_avg/"))


def test_what_another_layout_saved_is_the_same(out: Path) -> None:
    groups = ("weight", "exp_avg", "exp_avg_sq", "ema")
    own, other = (
        checkpoint.read_tensors(out / name / "checkpoints" / "step-000004", groups=groups)
        for name in ("zero tp2dp2", "whole")
    )
    assert own.keys() == other.keys()
    for key, values in other.items():
        assert torch.allclose(own[key], values, rtol=1e-5, atol=1e-5), key


def test_averages_are_those_of_one_process(out: Path) -> None:
    """From step 2 to 4 with the weights that were saved at 3 and 4."""
    folders = [
        out / "zero pp2dp2" / "checkpoints" / "step-000003",
        out / "whole" / "checkpoints" / "step-000002",
    ]
    after, before = (
        checkpoint.read_tensors(folder, groups=("weight", "ema")) for folder in folders
    )
    averaged = [key for key in after if key.startswith("ema/")]
    assert 0 < len(averaged) < len(after) // 2
    for key in averaged:
        expected = torch.lerp(before[key], after["weight" + key.removeprefix("ema")], 1 - DECAY)
        assert torch.allclose(after[key], expected, rtol=1e-5, atol=1e-5), key


def test_held_out_losses_are_those_of_one_process(out: Path) -> None:
    run = read_run(out.parent / "plain" / "disttrain.yaml")
    history = history_of(out, "whole")
    weights = checkpoint.read_tensors(out / "whole" / "checkpoints" / "step-000004")
    layers = build_layers(run, 0, len(layer_table(run)))
    with torch.no_grad():
        for name, parameter in checkpoint.named_parameters(layers):
            parameter.copy_(weights[f"weight/{name}"])
    losses = mean_losses(run, layers, read_index(run, describe(run)))
    assert torch.allclose(history[-1, 4:], torch.tensor(losses, dtype=torch.float64), rtol=1e-5)
    assert history[-1, 4] < history[0, 4]


@pytest.mark.parametrize(
    ("rank", "stage"),
    [(1, "write_tensors"), (0, "write_tensors"), (0, "replace_folder"), (0, "write_whole")],
)
def test_a_rank_killed_while_writing_leaves_the_checkpoint_before(
    tmp_path: Path, rank: int, stage: str
) -> None:
    payload = {"folder": str(tmp_path / "c"), "rank": rank, "stage": stage}
    with pytest.raises(RankFailedError, match=f"Rank {rank} was killed by SIGKILL"):
        launch(
            2,
            "tests.runtime.checkpoints.checkpoint_worker:killed",
            payload,
            tmp_path / "logs",
            timeout_s=120,
        )
    launch(
        1,
        "tests.runtime.checkpoints.checkpoint_worker:opened",
        payload,
        tmp_path / "logs",
        timeout_s=120,
    )
    assert [path.name for path in (tmp_path / "c").iterdir()] == ["step-000001"]
    for own, other in zip(
        torch.load(tmp_path / "got"), engine_of(1).module.layers[0].parameters(), strict=True
    ):
        assert torch.equal(own, other)
