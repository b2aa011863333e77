"""Decoder families of transformers through the runtime.

Over eight ranks, with documents packed, loss and gradients are those of the library's own model,
one document at a time (fp32): the loss to 1e-5, each gradient to 1e-5 of its largest value, or to
ten times the library's own rounding where that is larger. After the step the exported folder, read
by transformers, computes what the library's model computes after the same step.
"""

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import yaml
from transformers import CONFIG_MAPPING

from disttrain_cli.data.index.sample_index import read_index
from disttrain_cli.data.indexing.building import build_index
from disttrain_cli.data.sample_data import write_sample_data
from disttrain_cli.models.architectures import read_configs
from disttrain_cli.models.configs.decoders import published_class_of
from disttrain_cli.models.graph import build_layers, describe, layer_table
from disttrain_cli.models.tensor_parallel import pieces
from disttrain_cli.runtime.checkpoints import checkpoint
from disttrain_cli.runtime.checkpoints.folder import latest
from disttrain_cli.runtime.outputs.export import export
from disttrain_cli.spec.plan import Plan, UnitPlan
from disttrain_cli.spec.progress import silent
from disttrain_cli.spec.runfile import Run, read_run
from tests.models.any_decoder import FAMILIES, fields_of, library_model, reference
from tests.runtime.equivalence_worker import check_equals
from tests.runtime.equivalence_worker import reference as one_process
from tests.runtime.factory import MODEL, plan_of, unit
from tests.runtime.layouts import train
from tests.runtime.test_whole_conversations import loaded_batch

EYE, LLM, LENGTH, BATCH, VOCABULARY = "image_encoder", "llm", 48, 4, 272
#: Decoders of whole models: with no class with a head to save, or with one that has towers.
PARTS = (
    *("glm4v_text", "muse_glimmer_text", "muse_spark_text", "phi4_multimodal"),
    *("qwen2_5_vl_text", "qwen3_vl_text"),
)
LORA = {"r": 4, "lora_alpha": 16, "target_modules": "all-linear"}


class Way(NamedTuple):
    """A layout of eight ranks in two stages."""

    layers: tuple[int, int] = (3, 3)
    tp: int = 2  # 1 if a layer's parts have no half
    cp: str = ""  # `cp_comm_type` of a CP of 2, if any
    how: Mapping[str, Any] = MappingProxyType({})  # further fields of the unit
    zero_stage: int = 0
    overlap: bool = False


#: One family of each kind of difference: recurrent mixers; keys and values of earlier layers; a
#: mixture of experts; soft caps; sinks; scales.
KINDS = ("qwen3_5_text", "gemma4_text", "qwen3_moe", "gemma2", "gpt_oss", "granite")
WAYS = {
    "recomputed": Way((1, 5), how={"checkpointing": True}),
    "split backward": Way((4, 2), how={"weight_delay": [1, 0]}, zero_stage=1, overlap=True),
    "cp a2a": Way(tp=1, cp="a2a", zero_stage=1),
    "cp gathered": Way((2, 4), 1, "all_gather", {"weight_delay": [1, 1]}),
}
#: Trained by the slow tests; one by one, families take seconds on eight ranks.
TRAINED = (
    *KINDS,
    *("cohere", "deepseek_v3", "glm4v_text", "lfm2", "llama", "llama4_text", "olmo2", "phi3"),
)
#: Not compared over eight ranks: sums of one layer cancel to 3e-4 of the library's in fp32; the
#: library zeroes the row of the padding id, which the folder has, when it loads the folder.
APART = ("qwen3_next", "youtu")
OTHERS = [name for name in FAMILIES if name not in (*TRAINED, *APART)]
#: Those whose gradients in fp32 are 1e-4 from fp64, which a step of Adam makes 1e-3 of the logits.
ROUNDING = ("qwen3_5_text", "gemma4_text")
#: Kinds that train for further steps.
STEADY = ("qwen3_moe", "gemma2", "gpt_oss")
#: Families of `KINDS` in which ranks cannot share the rows of a sample.
WITHOUT_CP = ("qwen3_5_text", "gemma4_text")
PAIRS = [
    (name, way)
    for number, name in enumerate(KINDS)
    for way in (WAYS if name == "gpt_oss" else list(WAYS)[(number + 1) % 2 :: 2])
    if not (WAYS[way].cp and name in WITHOUT_CP)
]


def write_texts(folder: Path) -> None:
    """Texts of few bytes: several documents in every sequence."""
    folder.mkdir()
    draws = np.random.default_rng(0)
    texts = [bytes(draws.integers(97, 123, n).tolist()).decode() for n in draws.integers(1, 25, 80)]
    (folder / "texts.jsonl").write_text("\n".join(json.dumps({"text": one}) for one in texts))


def write_published(folder: Path, family: str) -> dict[str, Any]:
    """Write a family's tiny model, with weights unlike initial ones; return its module."""
    fields = fields_of(family) | {"vocab_size": VOCABULARY}
    fields |= dict.fromkeys(fields.keys() & {"vocab_size_per_layer_input"}, VOCABULARY)
    if family in PARTS:
        return {"kind": "llm", "architecture": family, "config": fields}
    config = CONFIG_MAPPING[family](**fields)
    model = published_class_of(type(config))(config)
    draws = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=draws) * 0.08)
    model.save_pretrained(folder / "published")
    return {"kind": "llm", "folder": "published"}


def write_run(folder: Path, data: Path, family: str, **changes: Any) -> Run:
    """Write a run of a family; `changes` are of its training, its LoRA, and its other modules."""
    folder.mkdir(parents=True)
    module = write_published(folder, family) | changes.pop("module", {})
    modules = changes.pop("modules", {}) | {LLM: module}
    content = {
        "name": "test",
        "model": {"modules": modules, "trained": changes.pop("trained", None)},
        "data": {
            "sources": [{"path": str(data)}],
            "sequence_length": changes.pop("length", LENGTH),
            "max_image_pixels": 4096,
        },
        "cluster": {"gpus_per_node": 8, "device": "cpu"},
        "train": {
            "global_batch_size": BATCH,
            "steps": 4,
            "precision": "fp32",
            "zero_stage": 0,
            "gradient_clipping": 1e6,
            "ordering": "none",
            "optimizer": {"lr": 1e-3, "eps": 1e-5, "weight_decay": 0.0},
        }
        | changes,
    }
    path = folder / "disttrain.yaml"
    path.write_text(yaml.safe_dump(content))
    run = read_run(path)
    build_index(run, describe(run), silent)
    return run


def plan(run: Run, way: Way) -> Plan:
    """Return a plan of PP 2 × TP × CP × DP = 8 ranks."""
    layers = build_layers(run, 0, len(layer_table(run)), "meta")
    tp = 1 if any(count % way.tp for layer in layers for count in pieces(layer)) else way.tp
    cp = {"cp": 2, "cp_comm_type": way.cp} if way.cp else {}
    dp = 4 // tp // (2 if cp else 1)
    one = unit("all", run.file.model.order, list(way.layers), dp, tp)
    one = UnitPlan.model_validate(one.model_dump() | cp | {"gpus": 8} | dict(way.how))
    made = plan_of(run, [one], 1, way.overlap)
    layout = made.plan.model_copy(update={"zero_stage": way.zero_stage})
    return made.model_copy(update={"plan": layout})


class LibraryStep(NamedTuple):
    """What the library's own model computes of a run's first step."""

    loss: float
    gradients: dict[str, torch.Tensor]
    model: Any  # after the step
    ids: torch.Tensor


@cache
def library_step(path: Path, dtype: torch.dtype = torch.float32) -> LibraryStep:
    """Train the library's model of a run file for a step, one document at a time."""
    run = read_run(path)
    layers = build_layers(run, 0, len(layer_table(run)))
    batch = loaded_batch(run, read_index(run, describe(run)), layers, BATCH)
    config, folder, head = read_configs(run)[LLM].config, path.parent / "published", None
    if folder.exists():
        classes = published_class_of(type(config))
        model = classes.from_pretrained(folder, attn_implementation="eager").eval()
    else:
        model, head = library_model(config, layers)
    model.config._experts_implementation = "eager"  # others compute nothing in fp64
    for part in filter(None, (model, head)):
        part.to(dtype)
    labels, ids = batch.labels.flatten(), batch.token_ids.flatten()
    labels = labels.where(labels >= 0, -100)
    loss = reference(model, ids, labels, batch.sample_lengths, head)
    parameters = dict(model.named_parameters()) | ({"lm_head.weight": head.weight} if head else {})
    parameters = {name: p for name, p in parameters.items() if p.grad is not None}
    for parameter in parameters.values():
        parameter.grad /= batch.label_tokens
    torch.optim.AdamW(parameters.values(), lr=1e-3, eps=1e-5, weight_decay=0.0).step()
    gradients = {name: p.grad for name, p in parameters.items()}
    return LibraryStep(float(loss / batch.label_tokens), gradients, model, ids)


def error_of(gradient: torch.Tensor, wanted: torch.Tensor) -> float:
    """Return the largest error relative to the largest value."""
    return float((gradient - wanted).abs().max() / (wanted.abs().max() + 1e-6))


def check_gradients(run: Run, out: Path) -> None:
    """Loss and gradients (Adam's first moment after a step) are the library's."""
    of_library = library_step(run.path)
    (loss, _), *_ = json.loads((out / "history.json").read_text())
    assert loss == pytest.approx(of_library.loss, rel=1e-5)
    newest, gradients = latest(out / "checkpoints"), dict(of_library.gradients)
    assert newest is not None
    moments = checkpoint.read_tensors(newest, groups=("exp_avg",))
    for layer in build_layers(run, 0, len(layer_table(run)), "meta"):
        prefix = f"exp_avg/{layer.name}/"
        of_layer = {
            key.removeprefix(prefix): 10 * moment
            for key, moment in moments.items()
            if key.startswith(prefix)
        }
        for path, gradient in layer.to_published(of_layer).items():
            path = path if path in gradients else path.removeprefix("model.")
            wanted = gradients.pop(path, None)
            if wanted is None:
                assert not gradient.any(), path
            elif (error := error_of(gradient, wanted)) > 1e-5:
                exact = library_step(run.path, torch.float64).gradients[path]
                assert error < 10 * error_of(wanted, exact), path
    assert not gradients, list(gradients)


def check_export(run: Run, out: Path) -> None:
    """The exported folder is read by transformers and computes what the library's model does."""
    run.dir.checkpoints.symlink_to(out / "checkpoints")
    export(run, to := out / "export")
    of_library = library_step(run.path)
    model = type(of_library.model).from_pretrained(to / LLM, attn_implementation="eager").eval()
    with torch.no_grad():
        found, wanted = (
            one(input_ids=of_library.ids[None, :LENGTH], use_cache=False).logits
            for one in (model, of_library.model)
        )
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4 * float(wanted.abs().max()))


def check_adapters(run: Run, out: Path) -> None:
    """peft reads the exported adapters, which compute what the merged export does."""
    from peft import PeftModel

    run.dir.checkpoints.symlink_to(out / "checkpoints")
    export(run, out / "apart")
    export(run, out / "merged", merge=True)
    classes = published_class_of(type(read_configs(run)[LLM].config))
    base, merged = (
        classes.from_pretrained(folder, attn_implementation="eager").eval()
        for folder in (run.path.parent / "published", out / "merged" / LLM)
    )
    ids = torch.arange(20)[None] + 97
    with torch.no_grad():
        before, wanted = (one(input_ids=ids, use_cache=False).logits for one in (base, merged))
        adapted = PeftModel.from_pretrained(base, out / "apart" / LLM).eval()
        after = adapted(input_ids=ids, use_cache=False).logits
    for name, parameter in adapted.named_parameters():
        assert "lora_B" not in name or parameter.any(), f"{name} was not trained"
    assert not torch.allclose(before, wanted, atol=1e-3)
    torch.testing.assert_close(after, wanted, rtol=1e-4, atol=1e-4)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Run], Path]:
    """Eight ranks train these families, and those of each kind in every way, in turn."""
    folder = tmp_path_factory.mktemp("families")
    write_texts(folder / "data")
    found = {name: write_run(folder / "runs" / name, folder / "data", name) for name in TRAINED}
    cases = [(name, run, plan(run, Way())) for name, run in found.items()]
    cases += [(f"{name}, {way}", found[name], plan(found[name], WAYS[way])) for name, way in PAIRS]
    return found, train(cases, 1, folder)


@pytest.mark.benchmark
@pytest.mark.parametrize("first", range(0, len(OTHERS), 8))
def test_loss_and_gradients_of_all_other_families(first: int, tmp_path: Path) -> None:
    """Eight at a time, as a start of the ranks takes longer than a family."""
    write_texts(tmp_path / "data")
    found = {
        name: write_run(tmp_path / "runs" / name, tmp_path / "data", name)
        for name in OTHERS[first : first + 8]
    }
    out = train([(name, run, plan(run, Way())) for name, run in found.items()], 1, tmp_path)
    for name, run in found.items():
        check_gradients(run, out / name)
        library_step.cache_clear()


@pytest.mark.slow
@pytest.mark.parametrize("name", TRAINED)
def test_loss_gradients_and_export_are_the_librarys_own(runs: Any, name: str) -> None:
    found, out = runs
    check_gradients(found[name], out / name)
    if name not in (*PARTS, *ROUNDING):
        check_export(found[name], out / name)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "way"), PAIRS)
def test_ways_of_training_change_no_gradient(runs: Any, name: str, way: str) -> None:
    found, out = runs
    check_gradients(found[name], out / f"{name}, {way}")


class Steps(NamedTuple):
    """Runs whose steps one process trains, too, by name, and what the ranks left of them."""

    runs: dict[str, Run]
    out: Path


@pytest.fixture(scope="module")
def steps(tmp_path_factory: pytest.TempPathFactory) -> Steps:
    """Two steps of each steady kind: adapters, an encoder before it, one layout after another."""
    folder = tmp_path_factory.mktemp("kinds")
    write_texts(folder / "data")
    write_sample_data(folder / "pictures")
    found: dict[str, Run] = {}
    cases, after = [], {}
    eye = {EYE: MODEL["modules"][EYE]}
    for kind in STEADY:

        def run(how: str, data: str = "data", kind: str = kind, **changes: Any) -> Run:
            name = f"{kind}, {how}"
            found[name] = write_run(folder / name, folder / data, kind, **changes)
            return found[name]

        lora = run("lora", module={"lora": LORA})
        frozen = run("frozen", "pictures/captions", modules=eye, trained=[EYE], length=256)
        plain = run("resharded")
        cases += [
            (f"{kind}, lora", lora, plan(lora, Way(zero_stage=1))),
            (f"{kind}, frozen", frozen, plan(frozen, Way((5, 5)))),
            (f"{kind}, before", plain, plan(plain, Way(zero_stage=1))),
            (f"{kind}, resharded", plain, plan(plain, Way((1, 5), tp=1))),
        ]
        after[f"{kind}, resharded"] = f"{kind}, before"
    return Steps(found, train(cases, 2, folder, after=after))


@pytest.mark.slow
@pytest.mark.parametrize("kind", STEADY)
def test_adapters_train_alike_and_are_exported(steps: Steps, kind: str) -> None:
    name = f"{kind}, lora"
    check_equals(steps.out / name, *one_process(steps.runs[name], 2)[:2])
    check_adapters(steps.runs[name], steps.out / name)


@pytest.mark.slow
@pytest.mark.parametrize("kind", STEADY)
def test_gradients_pass_a_frozen_decoder(steps: Steps, kind: str) -> None:
    name = f"{kind}, frozen"
    check_equals(steps.out / name, *one_process(steps.runs[name], 2)[:2])


@pytest.mark.slow
@pytest.mark.parametrize("kind", STEADY)
def test_another_layout_resumes(steps: Steps, kind: str) -> None:
    name = f"{kind}, resharded"
    history, parameters, _ = one_process(steps.runs[name], 4)
    check_equals(steps.out / name, history[2:], parameters)
