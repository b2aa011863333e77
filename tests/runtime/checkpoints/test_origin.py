"""Weights that a run starts from: found by what the user names, compared with the model, set bit
for bit."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml

from disttrain_cli.errors import SpecError
from disttrain_cli.models.graph import build_layers, layer_table
from disttrain_cli.models.tying import tie, tied_layers
from disttrain_cli.runtime.checkpoints.origin import check, find, start_from, starts, where
from disttrain_cli.runtime.outputs.export import export
from disttrain_cli.spec.runfile import Run, read_run
from tests.cases import first_fast
from tests.runtime.checkpoints.checkpoint_parts import alone
from tests.runtime.outputs.test_export import trained, written_run


@pytest.fixture(scope="module")
def before(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """A run with a checkpoint, and an export of it."""
    folder = tmp_path_factory.mktemp("before")
    run = written_run(folder)
    layers = trained(run, 3)
    export(run, folder / "export")
    return SimpleNamespace(
        run=run,
        layers=layers,
        checkpoint=run.dir.checkpoints / "step-000003",
        export=folder / "export",
    )


def _after(folder: Path, change: Any = lambda modules: None, **train: Any) -> Run:
    """Another run of the same model, which `change` may change."""
    run = written_run(folder, seed=1, **train)
    content = yaml.safe_load(run.path.read_text())
    change(content["model"]["modules"])
    run.path.write_text(yaml.safe_dump(content))
    return read_run(run.path)


def _started(
    folder: Path, run: Run, origin: Path, stage: tuple[int, int] | None = None
) -> dict[str, torch.Tensor]:
    layers = build_layers(run, *(stage or (0, len(layer_table(run)))))
    tie(layers, layer_table(run))
    with alone(folder):
        start_from(origin, SimpleNamespace(module=SimpleNamespace(layers=layers)), run)  # type: ignore[arg-type]
    return _weights(layers)


def _weights(layers: Any) -> dict[str, torch.Tensor]:
    return {f"{layer.name}/{path}": p for layer in layers for path, p in layer.named_parameters()}


@pytest.mark.slow
@pytest.mark.parametrize("kind", first_fast(["checkpoint", "export"]))
def test_tied_weights_start_both_ends_from_one_tensor(tmp_path: Path, kind: str) -> None:
    before = written_run(_made(tmp_path / "before"), tied=True)
    layers = trained(before, 3)
    export(before, tmp_path / "export")
    origin = before.dir.checkpoints / "step-000003" if kind == "checkpoint" else tmp_path / kind
    run = written_run(_made(tmp_path / "after"), tied=True, seed=1)
    check(run, origin)
    ends = tied_layers(layer_table(run))
    assert ends is not None
    started = _started(tmp_path, run, origin)
    for end in ends:
        started |= _started(tmp_path, run, origin, (end, end + 1))
    embedding = next(layer for layer in layers if layer.name == "llm.embed").embedding.weight
    assert torch.equal(started["llm.embed/embedding.weight"], embedding)
    assert torch.equal(started["llm.head/lm_head.weight"], embedding)


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder


@pytest.mark.parametrize("kind", first_fast(["checkpoint", "export"]))
def test_every_weight_is_the_origins_bit_for_bit(
    tmp_path: Path, before: SimpleNamespace, kind: str
) -> None:
    run, origin = _after(tmp_path), getattr(before, kind)
    found, expected = _started(tmp_path, run, origin), _weights(before.layers)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], values) for key, values in expected.items())
    part = "" if kind == "checkpoint" else "/llm"
    assert f"llm: weights from {origin}{part}." in check(run, origin)


@pytest.mark.parametrize("kind", ["checkpoint", "export"])
def test_modules_that_only_one_has_are_named_and_start_as_ever(
    tmp_path: Path, before: SimpleNamespace, kind: str
) -> None:
    def change(modules: Any) -> None:
        modules["ear"] = modules.pop("audio_encoder")
        del modules["image_generator"]

    run, origin = _after(tmp_path, change), getattr(before, kind)
    notes = starts(run, origin, resume=False)
    assert f"ear: not in {origin}; starts from random weights." in notes
    assert f"Not used of {origin}: audio_encoder, image_generator." in notes
    found, expected = _started(tmp_path, run, origin), _weights(before.layers)
    fresh = _weights(build_layers(run, 0, len(layer_table(run))))
    assert {key.split(".")[0] for key in found} == {"image_encoder", "ear", "llm"}
    for key, values in found.items():
        assert torch.equal(values, fresh[key] if key.startswith("ear.") else expected[key]), key


def _wider(modules: Any) -> None:
    modules["llm"]["config"]["intermediate_size"] = 112


def _renamed(modules: Any) -> None:
    for name in list(modules):
        modules[f"new_{name}"] = modules.pop(name)


@pytest.mark.parametrize(
    ("change", "kind", "told"),
    [
        (
            _wider,
            "checkpoint",
            r"llm.block.0/layer.mlp.gate_proj.weight: \[96, 48\] there, \[112, 48\] in the model",
        ),
        (_wider, "export", r"a tensor of .*llm has another shape"),
        (_renamed, "checkpoint", "has no weights of this model"),
        (_renamed, "export", "has no weights of this model"),
    ],
)
def test_another_model_is_refused_by_name(
    tmp_path: Path, before: SimpleNamespace, change: Any, kind: str, told: str
) -> None:
    with pytest.raises(SpecError, match=told) as caught:
        check(_after(tmp_path, change), getattr(before, kind))
    assert "name" in caught.value.next_step and "resume" not in caught.value.next_step


@pytest.mark.parametrize("kind", ["checkpoint", "export"])
def test_latents_of_random_weights_are_not_those_of_an_origin(
    tmp_path: Path, before: SimpleNamespace, kind: str
) -> None:
    def cached(modules: Any) -> None:
        modules["image_generator"]["cached_latents"] = True

    def with_folder(modules: Any) -> None:
        cached(modules)
        modules["image_generator"]["vae_folder"] = str(before.export / "image_generator_vae")
        del modules["image_generator"]["vae"]

    origin = getattr(before, kind)
    with pytest.raises(SpecError, match="latents of image_generator are not those") as caught:
        check(_after(tmp_path, cached), origin)
    assert "vae_folder" in caught.value.next_step
    assert check(_after(tmp_path, with_folder), origin)


def _copy(source: Path, to: Path, *without: str) -> Path:
    for path in (path for path in source.rglob("*") if path.is_file() and path.name not in without):
        (to / path.relative_to(source)).parent.mkdir(parents=True, exist_ok=True)
        (to / path.relative_to(source)).write_bytes(path.read_bytes())
    return to


@pytest.mark.parametrize(
    ("kind", "file", "told"),
    [
        ("checkpoint", "tensors.json", "There is no list of weights"),
        ("export", "projectors.safetensors", "14 tensors of the model are not in"),
        (
            "export",
            "diffusion_pytorch_model.safetensors",
            "There are no weights of image_generator_vae in",
        ),
    ],
)
def test_what_is_missing_is_told(
    tmp_path: Path, before: SimpleNamespace, kind: str, file: str, told: str
) -> None:
    with pytest.raises(SpecError, match=told):
        check(_after(tmp_path), _copy(getattr(before, kind), tmp_path / "copy", file))


@pytest.mark.parametrize("content", ["{}", "[]", '{"tensors": 3, "modules": []}', "no JSON"])
@pytest.mark.parametrize(
    ("kind", "file"), [("checkpoint", "tensors.json"), ("export", "model.json")]
)
def test_a_damaged_list_is_no_bug(
    tmp_path: Path, before: SimpleNamespace, kind: str, file: str, content: str
) -> None:
    copy = _copy(getattr(before, kind), tmp_path / "copy")
    (copy / file).write_text(content)
    with pytest.raises(SpecError):
        check(_after(tmp_path), copy)


def test_a_list_of_tensors_that_is_not_the_one_written_is_refused(
    tmp_path: Path, before: SimpleNamespace
) -> None:
    copy = _copy(before.checkpoint, tmp_path / "copy")
    listed = json.loads((copy / "tensors.json").read_text())
    (copy / "tensors.json").write_text(json.dumps(listed, indent=3))
    with pytest.raises(SpecError, match="is damaged"):
        check(_after(tmp_path), copy)


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (lambda file: file.unlink(), "is missing"),
        (lambda file: file.write_bytes(file.read_bytes()[:-1]), "bytes"),
        (lambda file: (file.unlink(), file.mkdir()), "is not a file"),
        (lambda file: (file.parent / "checkpoint.json").write_text("{}"), "lacks version"),
    ],
)
def test_a_partial_checkpoint_is_refused_before_anything_starts(
    tmp_path: Path, before: SimpleNamespace, damage: Any, told: str
) -> None:
    copy = _copy(before.checkpoint, tmp_path / "copy")
    damage(copy / "rank-00000.safetensors")
    with pytest.raises(SpecError, match=told) as caught:
        check(_after(tmp_path), copy)
    assert caught.value.next_step == f"Name another checkpoint or export than {copy}."


def test_damaged_tensors_are_refused_by_the_ranks(tmp_path: Path, before: SimpleNamespace) -> None:
    copy = _copy(before.checkpoint, tmp_path / "copy")
    file = copy / "rank-00000.safetensors"
    content = bytearray(file.read_bytes())
    content[-5] ^= 1
    file.write_bytes(content)
    with pytest.raises(SpecError, match="another checksum") as caught:
        _started(tmp_path, _after(tmp_path), copy)
    assert caught.value.next_step == f"Name another checkpoint or export than {copy}."


def test_a_run_is_found_by_its_folder_run_file_or_checkpoint(
    before: SimpleNamespace, tmp_path: Path
) -> None:
    for given in (
        before.run.path,
        before.run.path.parent,
        before.run.dir.root,
        before.checkpoint.parent,
        before.checkpoint,
    ):
        assert find(given) == before.checkpoint.resolve()
    assert find(before.export) == before.export.resolve()
    for given in (tmp_path, tmp_path / "nothing"):
        with pytest.raises(SpecError, match="There are no weights to start from"):
            find(given)


def test_a_checkpoint_that_a_fresh_start_moved_is_found_again(tmp_path: Path) -> None:
    moved = tmp_path / "earlier" / "001" / "checkpoints" / "step-000003"
    assert (
        where(tmp_path / "checkpoints" / moved.name, tmp_path)
        == tmp_path / "checkpoints" / moved.name
    )
    for folder in (moved, tmp_path / "earlier" / "000" / "checkpoints" / moved.name):
        folder.mkdir(parents=True)
    assert where(tmp_path / "checkpoints" / moved.name, tmp_path) == moved
    assert where(tmp_path, tmp_path) == tmp_path
