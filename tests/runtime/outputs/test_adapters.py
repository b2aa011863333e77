"""Adapters out and in: folders that peft loads, merged weights, and runs that start from either."""

import json
import shutil
from types import SimpleNamespace

import pytest
import torch
import yaml

from disttrain_cli.errors import MismatchError, SpecError
from disttrain_cli.models.adapters import check_adapters, load_adapters
from disttrain_cli.models.architectures import read_configs
from disttrain_cli.models.graph import build_layers, describe, layer_table
from disttrain_cli.models.layer import is_adapter
from disttrain_cli.models.probe import probe_batch
from disttrain_cli.models.published import published_class
from disttrain_cli.models.weights import load_into
from disttrain_cli.runtime.checkpoints.folder import check_belongs, model_of
from disttrain_cli.runtime.checkpoints.origin import check, start_from, starts
from disttrain_cli.runtime.engine.gradients import gradient_flow
from disttrain_cli.runtime.outputs.export import export
from disttrain_cli.spec.runfile import read_run
from tests.cases import first_fast
from tests.runtime.checkpoints.checkpoint_parts import alone
from tests.runtime.outputs.test_export import check_equal, trained, written_run
from tests.whole_models import IMAGE, run_of, write_llava, write_qwen

LORA = {
    "image_encoder": {"r": 2, "target_modules": ["q_proj", "fc1"]},
    "llm": {"r": 4, "lora_alpha": 12, "target_modules": "all-linear"},
    "image_generator": {"r": 3, "use_rslora": True, "target_modules": "all-linear"},
}


def adapted(folder, changes=None, **train):
    """A run with adapters of all modules but one."""
    folder.mkdir(exist_ok=True)
    of = changes or {}
    return written_run(
        folder,
        changes={name: {"lora": lora} | of.get(name, {}) for name, lora in LORA.items()},
        **train,
    )


def changed(run, change):
    content = yaml.safe_load(run.path.read_text())
    change(content["model"]["modules"])
    run.path.write_text(yaml.safe_dump(content))
    return read_run(run.path)


def outputs(run, layers, models, projectors):
    batch = probe_batch(
        describe(run), image=[(4, 4), (4, 4)], audio=2, documents=[[40], [48]], target=2
    )
    with torch.no_grad():
        check_equal(run, {layer.name: layer for layer in layers}, models, projectors, batch)


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """A trained run with adapters, and both kinds of export."""
    folder = tmp_path_factory.mktemp("adapted")
    run = adapted(folder)
    layers = trained(run)
    said = export(run, folder / "out"), export(run, folder / "merged", merge=True)
    return SimpleNamespace(folder=folder, run=run, layers=layers, said=said)


@pytest.mark.slow
def test_the_folders_load_with_peft_and_give_the_same(exported, monkeypatch):
    from safetensors.torch import load_file

    out = exported.folder / "out"
    assert {path.name for path in out.iterdir()} == {
        *("image_encoder", "image_encoder_base", "llm", "llm_base", "audio_encoder"),
        *("image_generator", "image_generator_base", "image_generator_vae"),
        *("projectors.safetensors", "model.json", "README.md"),
    }
    config = json.loads((out / "llm" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(out / "llm_base")
    assert config["task_type"] == "CAUSAL_LM" and "q_proj" in config["target_modules"]
    projectors = load_file(out / "projectors.safetensors")
    assert not any("lora" in name for name in projectors)
    monkeypatch.chdir(out)
    made = {}
    text = (out / "README.md").read_text()
    exec(text.split("```python")[1].split("```")[0], made)
    models = {name: made[name].eval() for name in exported.said[0].modules}
    assert {type(models[name]).__name__ for name in LORA} == {"PeftModel", "PeftModelForCausalLM"}
    outputs(exported.run, exported.layers, models, projectors)


@pytest.mark.slow
def test_what_peft_has_no_name_for_is_merged_only(tmp_path):
    """`embeddings` of a ViT is the end of `patch_embeddings` inside it, too."""
    lora = LORA["image_encoder"] | {"modules_to_save": ["embeddings"]}
    run = adapted(tmp_path, {"image_encoder": {"lora": lora}})
    trained(run)
    with pytest.raises(SpecError, match="no unambiguous name in peft") as caught:
        export(run, tmp_path / "out")
    assert "would also be embeddings.patch_embeddings" in str(caught.value)
    assert not (tmp_path / "out").exists()
    export(run, tmp_path / "merged", merge=True)


def test_merged_folders_give_the_same_without_peft(exported):
    from safetensors.torch import load_file

    merged, configs = exported.folder / "merged", read_configs(exported.run)
    models = {
        name: published_class(
            "AutoencoderKL" if name.endswith("_vae") else configs[name].architecture
        ).from_pretrained(merged / name)
        for name in exported.said[1].modules
    }
    assert not list(merged.glob("*/adapter*")) and not list(merged.glob("*_base"))
    outputs(
        exported.run,
        exported.layers,
        {name: model.eval() for name, model in models.items()},
        load_file(merged / "projectors.safetensors"),
    )


def started(run, origin, folder):
    layers = build_layers(run, 0, len(layer_table(run)))
    with alone(folder):
        start_from(origin, SimpleNamespace(module=SimpleNamespace(layers=layers)), run)
    return layers


def weights(layers):
    return {f"{layer.name}/{path}": p for layer in layers for path, p in layer.named_parameters()}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["checkpoint", "export"])
def test_another_phase_starts_from_both(exported, tmp_path, kind):
    origin = (
        exported.folder / "out"
        if kind == "export"
        else exported.run.dir.checkpoints / "step-000001"
    )
    run = adapted(tmp_path, seed=1)
    said = starts(run, origin, resume=False)
    assert sum("adapters" in note for note in said) == (3 if kind == "export" else 0)
    found, expected = weights(started(run, origin, tmp_path)), weights(exported.layers)
    assert all(torch.equal(found[name], values) for name, values in expected.items())


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["checkpoint", "export"])
def test_adapters_come_to_a_model_that_had_none(exported, tmp_path, kind):
    """Projectors first, then adapters: the usual recipe."""
    (tmp_path / "before").mkdir()
    before = written_run(tmp_path / "before")
    layers = trained(before)
    origin = before.dir.checkpoints / "step-000001"
    if kind == "export":
        export(before, tmp_path / "out")
        origin = tmp_path / "out"
    run = adapted(tmp_path / "after", seed=1)
    assert "llm: its adapters start at random, its own weights stay." in starts(
        run, origin, resume=False
    )
    found, fresh = weights(started(run, origin, tmp_path)), build_layers(run, 0, len(layers))
    expected = weights(layers)
    for name, values in weights(fresh).items():
        assert torch.equal(found[name], values if is_adapter(name) else expected[name]), name


@pytest.mark.slow
@pytest.mark.parametrize("kind", first_fast(["checkpoint", "export"]))
def test_adapters_are_not_lost_or_exchanged_unseen(exported, tmp_path, kind):
    origin = (
        exported.folder / "out"
        if kind == "export"
        else exported.run.dir.checkpoints / "step-000001"
    )
    with pytest.raises(SpecError, match=r"has adapters of .*, which has none here") as caught:
        (tmp_path / "none").mkdir()
        check(written_run(tmp_path / "none"), origin)
    assert "merge=True" in caught.value.next_step
    run = adapted(
        tmp_path / "fewer", {"llm": {"lora": LORA["llm"] | {"target_modules": ["q_proj"]}}}
    )
    with pytest.raises(SpecError, match=r"adapters of layers that have none here|another model"):
        check(run, origin)
    run = adapted(tmp_path / "rank", {"llm": {"lora": LORA["llm"] | {"r": 5}}})
    with pytest.raises(
        SpecError, match=r"r: 4 there, 5 in the run file|\[4, 48\] there, \[5, 48\]"
    ):
        check(run, origin)


def on_folder(exported, tmp_path, **lora):
    """A run whose LLM starts from a published folder, with adapters."""
    base = exported.folder / "merged" / "llm"
    run = adapted(tmp_path, {"llm": {"lora": lora or LORA["llm"]}})

    def change(modules):
        del modules["llm"]["architecture"], modules["llm"]["config"]
        modules["llm"]["folder"] = str(base)

    return changed(run, change), base


@pytest.mark.slow
def test_an_adapter_of_an_unchanged_folder_names_it(exported, tmp_path):
    run, base = on_folder(exported, tmp_path)
    layers = trained(run, start=lambda layers: load_into(layers, run))
    said = export(run, tmp_path / "out")
    assert said.modules["llm"].base == str(base) and not (tmp_path / "out" / "llm_base").exists()
    config = json.loads((tmp_path / "out" / "llm" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(base)
    found = weights(started(run, tmp_path / "out", tmp_path))
    assert all(torch.equal(found[name], p) for name, p in weights(layers).items())

    # the same adapter, named in the run file
    again, _ = on_folder(exported, tmp_path / "again", folder=str(tmp_path / "out" / "llm"))
    assert again.file.model_fingerprint() != run.file.model_fingerprint()
    assert read_configs(again)["llm"].lora.scale == 3.0
    assert any("adapters of llm start from" in note for note in check_adapters(again, ["llm"]))
    others = build_layers(again, 0, len(layer_table(again)))
    load_into(others, again)
    assert load_adapters(others, again) == [f"llm: adapters from {tmp_path / 'out' / 'llm'}."]
    expected = weights(layers)
    for name, values in weights(others).items():
        assert not name.startswith("llm") or torch.equal(values, expected[name]), name


@pytest.mark.slow
def test_an_adapter_of_another_model_is_refused_by_name(exported, tmp_path):
    adapter = exported.folder / "out" / "llm"
    with pytest.raises(SpecError, match="is of another model than llm") as caught:
        check_adapters(on_folder(exported, tmp_path, folder=str(adapter))[0], ["llm"])
    assert "base_model_name_or_path" in str(caught.value)

    def narrower(modules):
        modules["llm"]["config"] |= {"intermediate_size": 48}

    run = changed(adapted(tmp_path, {"llm": {"lora": {"folder": str(adapter)}}}), narrower)
    with pytest.raises(
        SpecError, match=r"gate_proj.lora_B.weight: \[96, 4\] there, \[48, 4\] here"
    ):
        check_adapters(run, ["llm"])
    run = adapted(tmp_path, {"llm": {"lora": {"folder": str(adapter), "r": 5}}})
    with pytest.raises(SpecError, match="given: 5, there: 4"):
        layer_table(run)
    other = tmp_path / "other"
    other.mkdir()
    known = json.loads((adapter / "adapter_config.json").read_text())
    for field, value in (("use_dora", True), ("init_lora_weights", "pissa"), ("bias", "all")):
        (other / "adapter_config.json").write_text(json.dumps(known | {field: value}))
        run = adapted(tmp_path, {"llm": {"lora": {"folder": str(other)}}})
        with pytest.raises(SpecError, match=rf"(?s)this kind are not supported.*{field}"):
            layer_table(run)
    (other / "adapter_config.json").write_text(json.dumps(known | {"r": 0}))
    with pytest.raises(SpecError, match=r"r \(at least 1\)"):
        layer_table(adapted(tmp_path, {"llm": {"lora": {"folder": str(other)}}}))
    (other / "adapter_config.json").write_text(json.dumps(known))
    with pytest.raises(SpecError, match=r"adapter_model.safetensors is missing"):
        check_adapters(adapted(tmp_path, {"llm": {"lora": {"folder": str(other)}}}), ["llm"])
    (other / "adapter_model.safetensors").write_bytes(b"none")
    with pytest.raises(SpecError, match=r"adapter_model.safetensors is damaged"):
        check_adapters(adapted(tmp_path, {"llm": {"lora": {"folder": str(other)}}}), ["llm"])


def whole_run(folder, given=None, **model):
    """A run of a whole LLaVA with adapters of two ranks, and what else of its LLM is trained."""
    of_llm = {"r": 2, "target_modules": "all-linear", "modules_to_save": ["model.norm"]}
    given = given or {
        "modules": {
            "llm": {"lora": of_llm},
            "vision": {"lora": {"r": 3, "lora_alpha": 9, "target_modules": ["q_proj"]}},
        }
    }
    return run_of(folder, given | model)


def logits(model):
    """Of a question about two images."""
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(4, 260, (1, 24), generator=generator)
    ids[0, 3:19] = IMAGE
    pixels = torch.randn(1, 3, 32, 32, generator=generator)
    with torch.no_grad():
        return model.eval()(input_ids=ids, pixel_values=pixels).logits


@pytest.mark.slow
def test_adapters_of_a_whole_published_folder_are_one(tmp_path):
    """One folder, over the published one itself, with the projector among `modules_to_save`; the
    same from a run that starts from it, and merged."""
    from peft import PeftModel
    from transformers import AutoModelForImageTextToText as Model

    given = write_llava(tmp_path / "llava")
    run = whole_run(tmp_path / "llava")
    layers = trained(run, by=0.1, start=lambda layers: load_into(layers, run))
    said = export(run, tmp_path / "out")
    assert said.modules["llava"].base == str(tmp_path / "llava")
    config = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(tmp_path / "llava")
    assert config["r"] == 3 and set(config["rank_pattern"].values()) == {2}
    assert config["modules_to_save"] == [
        "model.language_model.norm",
        "model.multi_modal_projector.linear_1",
        "model.multi_modal_projector.linear_2",
    ]
    found = logits(PeftModel.from_pretrained(Model.from_pretrained(tmp_path / "llava"), said.path))
    export(run, tmp_path / "merged", merge=True)
    expected = logits(Model.from_pretrained(tmp_path / "merged"))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert (expected - logits(given)).abs().max() > 0.1

    again = whole_run(tmp_path / "llava", {"adapter": "out"})
    assert all("start from" in note for note in check_adapters(again, ["vision", "llm"]))
    others = build_layers(again, 0, len(layer_table(again)))
    load_into(others, again)
    assert len(load_adapters(others, again)) == 2
    expected = weights(layers)
    for name, values in weights(others).items():
        assert torch.equal(values, expected[name]), name


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_adapters_of_whole_qwen_models_are_one(tmp_path, family):
    """Of towers with queries, keys and values in one linear, and of tied embeddings."""
    from peft import PeftModel
    from transformers import AutoModelForImageTextToText as Model

    write_qwen(tmp_path / "qwen", family, tie_word_embeddings=family == "qwen3_vl")
    lora = {"r": 2, "lora_alpha": 6, "target_modules": "all-linear"}
    modules = {"llm": {"lora": lora}, "vision": {"lora": lora | {"target_modules": ["qkv"]}}}
    run = whole_run(tmp_path / "qwen", {"modules": modules})
    trained(run, by=0.1, start=lambda layers: load_into(layers, run))
    said = export(run, tmp_path / "out")
    assert said.modules[family].base == str(tmp_path / "qwen")
    export(run, tmp_path / "merged", merge=True)
    over = PeftModel.from_pretrained(Model.from_pretrained(tmp_path / "qwen"), said.path)
    found = over.merge_and_unload().state_dict()
    expected = Model.from_pretrained(tmp_path / "merged").state_dict()
    before = Model.from_pretrained(tmp_path / "qwen").state_dict()
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        torch.testing.assert_close(found[name], values, rtol=1e-5, atol=1e-6)
    moved = {name for name in expected if not torch.equal(expected[name], before[name])}
    assert any("visual" in name for name in moved) and any("q_proj" in name for name in moved)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_mergers_trained_beside_adapters_of_the_llm_belong_to_them(tmp_path, family):
    """As LLaVA's projector does: among `modules_to_save`, over the published folder itself."""
    from peft import PeftModel
    from transformers import AutoModelForImageTextToText as Model

    write_qwen(tmp_path / "qwen", family)
    lora = {"r": 2, "lora_alpha": 6, "target_modules": "all-linear"}
    names = {"trained": ["llm", "projectors"]}
    run = whole_run(tmp_path / "qwen", {"modules": {"llm": {"lora": lora}}}, **names)

    def start(layers):
        load_into(layers, run)
        gradient_flow(layer_table(run), names["trained"]).mark(layers, 0)

    layers = trained(run, by=0.1, start=start)
    said = export(run, tmp_path / "out")
    assert said.modules[family].base == str(tmp_path / "qwen")
    config = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert all("merger" in name for name in config["modules_to_save"])
    export(run, tmp_path / "merged", merge=True)
    over = PeftModel.from_pretrained(Model.from_pretrained(tmp_path / "qwen"), said.path)
    found, expected, before = (
        model.state_dict()
        for model in (
            over.merge_and_unload(),
            *(Model.from_pretrained(tmp_path / name) for name in ("merged", "qwen")),
        )
    )
    for name, values in expected.items():
        torch.testing.assert_close(found[name], values, rtol=1e-5, atol=1e-6)
        if "visual" in name:
            assert torch.equal(values, before[name]) != ("merger" in name), name

    again = whole_run(tmp_path / "qwen", {"adapter": "out"}, **names)
    assert read_configs(again)["vision"].lora is None
    starts(again, None, resume=False)
    others = build_layers(again, 0, len(layer_table(again)))
    load_into(others, again)
    load_adapters(others, again)
    expected = weights(layers)
    for name, values in weights(others).items():
        assert torch.equal(values, expected[name]), name


@pytest.mark.slow
@pytest.mark.parametrize(
    ("given", "adapted", "beyond"),
    [
        (
            {
                "target_modules": ["v_proj", "up_proj"],
                "modules_to_save": ["multi_modal_projector", "lm_head"],
                "rank_pattern": {"up_proj": 2},
            },
            {"vision", "llm"},
            2,
        ),
        (  # a module of which something is trained whole, and nothing has an adapter
            {
                "target_modules": ".*language_model.*q_proj",
                "modules_to_save": ["patch_embedding", "post_layernorm"],
                "rank_pattern": {"q_proj": 2},
            },
            {"vision", "llm"},
            2,
        ),
        (
            {"target_modules": ".*language_model.*q_proj", "modules_to_save": ["lm_head"]},
            {"llm"},
            0,
        ),
        (
            {"target_modules": ".*language_model.*q_proj", "modules_to_save": ["norm"]},
            {"vision", "llm"},
            2,
        ),
        ({"target_modules": ["v_proj", "fc1"], "use_rslora": True}, {"vision", "llm"}, 4),
    ],
)
def test_what_peft_writes_over_a_whole_model_is_read(tmp_path, given, adapted, beyond):
    """With adapters of a block of the tower that nothing reads, which are written again."""
    from peft import PeftModel
    from safetensors.torch import load_file
    from transformers import AutoModelForImageTextToText as Model

    model = adapted_by_peft(tmp_path, given)
    run = whole_run(tmp_path / "llava", {"adapter": "adapter"})
    assert {name for name, one in read_configs(run).items() if one.lora} == adapted
    starts(run, None, resume=False)
    trained(run, by=0.0, start=lambda layers: (load_into(layers, run), load_adapters(layers, run)))
    export(run, tmp_path / "merged", merge=True)
    merged = Model.from_pretrained(tmp_path / "merged")
    torch.testing.assert_close(logits(merged), logits(model), rtol=1e-4, atol=1e-5)
    export(run, tmp_path / "out")
    given, found = (
        load_file(tmp_path / name / "adapter_model.safetensors") for name in ("adapter", "out")
    )
    unread = {name for name in given if "encoder.layers.2." in name or "post_layernorm" in name}
    assert len(unread) == beyond
    assert all(torch.equal(found[name], tensor) for name, tensor in given.items())
    assert not any("encoder.layers.2." in name for name in found.keys() - given.keys())
    again = PeftModel.from_pretrained(Model.from_pretrained(tmp_path / "llava"), tmp_path / "out")
    expected = model.merge_and_unload().state_dict()
    for one in (again.merge_and_unload().state_dict(), merged.state_dict()):
        for name, tensor in expected.items():
            torch.testing.assert_close(one[name], tensor, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("targets", first_fast(["all-linear", ["q_proj", "linear_1"]]))
def test_adapters_of_a_projector_are_refused_by_name(tmp_path, targets):
    adapted_by_peft(tmp_path, {"target_modules": targets})
    run = whole_run(tmp_path / "llava", {"adapter": "adapter"})
    with pytest.raises(SpecError, match=r"multi_modal_projector.linear_1.lora_A") as caught:
        starts(run, None, resume=False)
    assert "Adapters of projectors are not computed" in str(caught.value)


def adapted_by_peft(folder, given):
    """A whole model as peft has it, its adapter saved beside it."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForImageTextToText as Model

    write_llava(folder / "llava")
    model = get_peft_model(
        Model.from_pretrained(folder / "llava"),
        LoraConfig(r=2, lora_alpha=6, init_lora_weights=False, **given),
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "modules_to_save" in name:
                parameter.mul_(1.5)
    model.save_pretrained(folder / "adapter")
    return model


@pytest.mark.slow
def test_an_adapter_of_another_whole_model_is_refused_by_name(exported, tmp_path):
    write_llava(tmp_path / "llava")
    run = whole_run(tmp_path / "llava")
    trained(run, start=lambda layers: load_into(layers, run))
    export(run, tmp_path / "out")
    with pytest.raises(SpecError, match=r"belongs to another model than model.folder"):
        whole_run(tmp_path / "llava", {"adapter": str(exported.folder / "out" / "llm")})
    write_llava(tmp_path / "other", text={"intermediate_size": 48})
    with pytest.raises(SpecError, match=r"model.adapter: .* is of another model than vision"):
        starts(whole_run(tmp_path / "other", {"adapter": "out"}), None, resume=False)
    with pytest.raises(SpecError, match="adapter needs folder"):
        changed_model(exported.run, tmp_path, adapter=str(tmp_path / "out"))
    with pytest.raises(SpecError, match="one over a whole model as"):
        of_llm = {"modules": {"llm": {"lora": {"folder": "out"}}}}
        starts(whole_run(tmp_path / "llava", of_llm), None, resume=False)


def changed_model(run, folder, **fields):
    content = yaml.safe_load(run.path.read_text())
    content["model"] |= fields
    (folder / "changed.yaml").write_text(yaml.safe_dump(content))
    return read_run(folder / "changed.yaml")


@pytest.mark.slow
def test_a_checkpoint_knows_what_no_tensor_says(exported, tmp_path):
    """An adapter's folder may say another lora_alpha than it said when training began."""
    adapter = tmp_path / "adapter"
    shutil.copytree(exported.folder / "out" / "llm", adapter)
    run = adapted(tmp_path / "run", {"llm": {"lora": {"folder": str(adapter)}}})
    trained(run)
    newest = run.dir.checkpoints / "step-000001"
    check_belongs(newest, model_of(run))
    config = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps(config | {"lora_alpha": 24}))
    with pytest.raises(MismatchError, match=r"other adapters[^$]*'lora_alpha': 12[^$]*24"):
        check_belongs(newest, model_of(run))
    with pytest.raises(MismatchError, match="other adapters"):
        export(run, tmp_path / "out")
    other = adapted(tmp_path / "other", {"llm": {"lora": LORA["llm"] | {"lora_alpha": 24}}})
    with pytest.raises(SpecError, match="lora_alpha: 12 there, 24 in the run file"):
        check(other, newest)


@pytest.mark.slow
def test_what_peft_writes_is_read(exported, tmp_path):
    from peft import LoraConfig, get_peft_model

    base = exported.folder / "merged" / "llm"
    model = get_peft_model(
        published_class("llama").from_pretrained(base),
        LoraConfig(
            r=2, lora_alpha=6, target_modules=["v_proj", "up_proj"], init_lora_weights=False
        ),
    )
    model.save_pretrained(tmp_path / "adapter")
    run, _ = on_folder(exported, tmp_path / "run", folder=str(tmp_path / "adapter"))
    assert read_configs(run)["llm"].lora.r == 2
    check_adapters(run, ["llm"])
    layers = build_layers(run, 0, len(layer_table(run)))
    load_into(layers, run)
    load_adapters(layers, run)
    batch = probe_batch(describe(run), documents=[[48]], length=48)
    state = {}
    with torch.no_grad():
        for layer in layers:
            if layer.module == "llm":
                state.update(layer(state, batch))
        head = layers[[layer.name for layer in layers].index("llm.head")]
        found = head.lm_head(head.norm(state["hidden"]))
        expected = model.eval()(input_ids=batch.token_ids).logits[0]
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
