"""`trained: [projectors]` of whole models: exactly the tensors that join the tower to the LLM
change, and by what they change in the library's own model."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from disttrain_cli.api import profile
from disttrain_cli.costs.freezing import backwards
from disttrain_cli.errors import SpecError
from disttrain_cli.models.adapters import joint
from disttrain_cli.models.graph import build_layers, describe, layer_table
from disttrain_cli.models.weights import load_into
from disttrain_cli.profiling.assemble import _side_branches
from disttrain_cli.runtime.engine.gradients import gradient_flow
from disttrain_cli.runtime.engine.optimizer import make_optimizer
from disttrain_cli.spec.adapter import PREFIX
from tests.cases import first_fast
from tests.models.test_whole import FAMILIES, IMAGE, picture, sequences
from tests.planning import synthetic
from tests.whole_models import run_of, write_llava, write_qwen, write_tiled

#: By family how its folder is written, and the parts that are its projectors.
WRITE: dict[str, tuple[Any, tuple[str, ...]]] = {
    "llava": (write_llava, ("model.multi_modal_projector.",)),
    "llava_next": (
        partial(write_tiled, family="llava_next"),
        ("model.multi_modal_projector.", "model.image_newline"),
    ),
    "llava_onevision": (
        partial(write_tiled, family="llava_onevision"),
        ("model.multi_modal_projector.", "model.image_newline"),
    ),
    "internvl": (partial(write_tiled, family="internvl"), ("model.multi_modal_projector.",)),
    "idefics3": (partial(write_tiled, family="idefics3"), ("model.connector.",)),
    "smolvlm": (partial(write_tiled, family="smolvlm"), ("model.connector.",)),
    "qwen2_5_vl": (partial(write_qwen, family="qwen2_5_vl"), ("model.visual.merger.",)),
    "qwen3_vl": (
        partial(write_qwen, family="qwen3_vl"),
        ("model.visual.merger.", "model.visual.deepstack_merger_list."),
    ),
}
ALONE = {"trained": ["projectors"]}


@pytest.mark.parametrize("family", first_fast(WRITE, 3))
def test_the_projectors_of_a_family_are_what_joins_its_tower_to_its_llm(
    tmp_path: Path, family: str
) -> None:
    write, parts = WRITE[family]
    model = write(tmp_path / family)
    run = run_of(tmp_path / family, ALONE)
    layers = build_layers(run, 0, len(layer_table(run)), device="meta")
    assert run.published is not None
    own = [layer for layer in layers if layer.module == "vision"]
    found = {
        name.removeprefix(PREFIX) for name in joint(own, run.published.family.modules["vision"])
    }
    assert found == {name for name, _ in model.named_parameters() if name.startswith(parts)}
    assert {layer.module for layer in layers if not layer.saved} == {"vision", "llm"}
    flow = gradient_flow(layer_table(run), run.file.model.trained)
    trained = [layer for layer, trains in zip(layers, flow.trained, strict=True) if trains]
    assert {owner for layer in trained for owner in _owners(layer)} >= {"projectors"}


def _owners(layer: Any) -> set[str]:
    return {layer.owner_of(path) for path, _ in layer.named_parameters()}


@pytest.mark.slow
@pytest.mark.parametrize("family", ["clip and llama", "qwen2_5_vl", "qwen3_vl"])
@pytest.mark.parametrize("names", [["projectors"], ["llm", "projectors"], ["vision"]])
def test_they_change_as_in_the_librarys_model(
    tmp_path: Path, family: str, names: list[str]
) -> None:
    write, processor = FAMILIES[family]
    model = write(tmp_path / "whole")
    run = run_of(tmp_path / "whole", {"trained": names}, data={"sequence_length": 64})
    table = layer_table(run)
    layers = build_layers(run, 0, len(table))
    load_into(layers, run)
    flow = gradient_flow(table, names)
    flow.mark(layers, 0)
    files = [picture(50, 40), picture(33, 90, seed=1)]
    batch = sequences(describe(run), files)
    state: dict[str, Any] = {}
    for layer in layers:
        state.update(layer(state, batch))
    carrying = {name for name, tensor in state.items() if tensor.requires_grad}
    optimizer = make_optimizer(layers, run.file.train.optimizer)
    assert optimizer is not None
    state["loss/text"].backward()
    optimizer.step()
    if "llm" not in names:  # no gradient reaches the frozen tower's rows
        assert ("image_hidden" in carrying) == ("vision" in names)

    wanted = _of_names(model, names)
    before = {name: tensor.detach().clone() for name, tensor in model.named_parameters()}
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in wanted)
    _backward(model, processor, batch, files)
    theirs, ours = dict(model.named_parameters()), _by_whole_name(run, layers)
    assert {name for name in ours if not torch.equal(ours[name], before[name])} == wanted
    for name, parameter in ours.items():
        if name not in wanted:
            assert parameter.grad is None
            continue
        expected, found = theirs[name].grad, parameter.grad
        assert expected is not None and found is not None
        most = float(expected.abs().max())
        torch.testing.assert_close(found, expected, atol=1e-5 + 1e-4 * most, rtol=0)


def _of_names(model: Any, names: list[str]) -> set[str]:
    """Parameters of the library's model that names train."""
    joints = ("model.multi_modal_projector.", "model.visual.merger.", "model.visual.deepstack")
    unread = ("model.vision_tower.encoder.layers.2.", "model.vision_tower.post_layernorm.")

    def owner(name: str) -> str:
        if name.startswith(joints):
            return "projectors"
        return "vision" if name.startswith(("model.visual.", "model.vision_tower.")) else "llm"

    return {
        name
        for name, _ in model.named_parameters()
        if owner(name) in names and not name.startswith(unread)
    }


def _backward(model: Any, processor: Any, batch: Any, files: Any) -> None:
    """Gradients of the loss of the same sequences, by the library's forward."""
    total = torch.zeros(())
    for ids, labels, (_, image) in zip(batch.token_ids, batch.labels, files, strict=True):
        given = {"input_ids": ids[None], **processor([image], return_tensors="pt")}
        if "image_grid_thw" in given:
            given["mm_token_type_ids"] = (ids == IMAGE).int()[None]
        total = total + torch.nn.functional.cross_entropy(
            model(**given).logits[0], labels, reduction="sum"
        )
    (total / batch.label_tokens).backward()


def _by_whole_name(run: Any, layers: Any) -> dict[str, torch.nn.Parameter]:
    found = {}
    for layer in layers:
        part = run.published.family.modules[layer.module]
        for path, parameter in layer.named_parameters():
            name = layer.published_name(path)
            whole = part.joint_in_whole(path) if name is None else part.name_in_whole(name)
            found[whole] = parameter
    return found


def test_a_merger_with_adapters_is_the_modules(tmp_path: Path) -> None:
    """Of a module with lora nothing but adapters is trained, in its merger too."""
    write_qwen(tmp_path / "qwen", "qwen3_vl")
    lora = {"modules": {"vision": {"lora": {"target_modules": "all-linear"}}}}
    table = layer_table(run_of(tmp_path / "qwen", lora | {"trained": ["vision"]}))
    assert {owner for layer in table if layer.module == "vision" for owner in layer.owners} == {
        "vision"
    }
    with pytest.raises(SpecError, match=r"model\.trained: projectors has no weights"):
        layer_table(run_of(tmp_path / "qwen", lora | {"trained": ["llm", "projectors"]}))


def test_names_without_weights_are_refused(tmp_path: Path) -> None:
    write_llava(tmp_path / "llava")
    text = {
        "folder": None,
        "modules": {"llm": {"kind": "llm", "folder": "llava"}},
        "trained": ["llm", "projectors"],
    }
    with pytest.raises(SpecError) as refused:
        layer_table(run_of(tmp_path / "llava", text))
    assert refused.value.what.startswith("model.trained: projectors has no weights")
    assert refused.value.why == "names that have some: llm"
    with pytest.raises(SpecError, match=r"model\.trained: projectors"):
        profile(run_of(tmp_path / "llava", text))  # before it looks for data
    rates = {"lr": 1e-3, "modules": {"projectors": {"lr": 1e-4}}}
    with pytest.raises(SpecError, match=r"train\.optimizer\.modules: projectors"):
        layer_table(run_of(tmp_path / "llava", text | {"trained": None}, optimizer=rates))


def test_blocks_of_a_frozen_tower_have_no_backward_behind_its_mergers(tmp_path: Path) -> None:
    """DeepStack's mergers lead to the LLM, not to the tower's later blocks."""
    write_qwen(tmp_path / "qwen", "qwen3_vl")
    run = run_of(tmp_path / "qwen", ALONE)
    tower = [layer for layer in layer_table(run) if layer.module == "vision"]
    projectors = [at for at, layer in enumerate(tower) if "projectors" in layer.owners]
    assert projectors == [2, 5, 7] and _side_branches(tower) == [2, 5]
    costs = synthetic.tiny(synthetic.run_file())
    name, module = next(iter(costs.modules.items()))
    kind = module.layers[0]
    changed = module.model_copy(
        update={"layers": [kind] * 8, "projector": projectors, "side": _side_branches(tower)}
    )
    costs = costs.model_copy(update={"modules": costs.modules | {name: changed}})
    does = backwards(costs, ["projectors"])
    assert does[name] == ["trained" if at in projectors else "still" for at in range(8)]
    assert set(does["llm"]) == {"passes"}
    flow = gradient_flow(layer_table(run), ["projectors"])
    assert [*flow.trained[:8]] == [at in projectors for at in range(8)]
    assert not any(flow.passes[:8])
