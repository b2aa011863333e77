"""`disttrain export`: folders that the libraries load, with outputs equal to the trained
model's."""

import hashlib
import json
from dataclasses import replace

import pytest
import torch
import yaml
from safetensors import SafetensorError
from safetensors.torch import load_file

from disttrain_cli.errors import MismatchError, SpecError
from disttrain_cli.models.architectures import read_configs
from disttrain_cli.models.graph import build_layers, describe, layer_table
from disttrain_cli.models.posterior import draw
from disttrain_cli.models.probe import probe_batch
from disttrain_cli.models.published import published_class
from disttrain_cli.models.tying import tie
from disttrain_cli.runtime.checkpoints.folder import (
    DESCRIPTION,
    TENSORS,
    VERSION,
    latest,
    model_of,
    remove,
    sealed,
)
from disttrain_cli.runtime.checkpoints.origin import starts
from disttrain_cli.runtime.checkpoints.storage import DTYPES, _box_name, write_tensors
from disttrain_cli.runtime.outputs.export import export
from disttrain_cli.runtime.outputs.trained import load_trained
from disttrain_cli.spec.runfile import read_run
from tests.batches import through
from tests.cases import first_fast
from tests.models.conftest import AUDIO, MODULES
from tests.models.test_vae import GENERATOR
from tests.models.test_weights import LUMINA2, PIXART, SD3

SAVE_FILE = "safetensors.torch.save_file"
UNET = MODULES["image_generator"]["config"]
GENERATORS = {
    "unet2d_condition": {"config": UNET | GENERATOR["config"], "vae": GENERATOR["vae"]},
    "pixart": {"config": PIXART | {"in_channels": 4, "out_channels": 8}, "vae": GENERATOR["vae"]},
    "sd3": {"config": SD3 | {"in_channels": 4, "out_channels": 4}, "vae": GENERATOR["vae"]},
    "lumina2": {"config": LUMINA2 | {"in_channels": 4}, "vae": GENERATOR["vae"]},
}


def written_run(folder, architecture="unet2d_condition", tied=False, changes=None, **train):
    """A run of every kind of module; `changes` are fields of modules by name."""
    generator = {
        **MODULES["image_generator"],
        "architecture": architecture,
        **GENERATORS[architecture],
    }
    modules = MODULES | {"audio_encoder": AUDIO, "image_generator": generator}
    if tied:
        config = modules["llm"]["config"] | {"tie_word_embeddings": True}
        modules["llm"] = modules["llm"] | {"config": config}
    modules |= {name: modules[name] | change for name, change in (changes or {}).items()}
    content = {
        "name": "tiny",
        "model": {"modules": modules},
        "data": {"sources": [{"path": "data"}], "sequence_length": 48, "max_image_pixels": 4096},
        "train": {"global_batch_size": 4, "steps": 1, "precision": "fp32"} | train,
    }
    path = folder / "disttrain.yaml"
    path.write_text(yaml.safe_dump(content))
    return read_run(path)


def trained(run, step=1, averaged=(), ties=True, by=0.02, start=lambda layers: None):
    """A checkpoint of weights that differ from the initial ones, and the layers that have them.

    Without `ties` as before tie_word_embeddings tied anything.
    """
    layers = build_layers(run, 0, len(layer_table(run)))
    if ties:
        tie(layers, layer_table(run))
    for layer in layers:
        layer.tied = layer.tied if ties else {}
    start(layers)
    generator, tensors = torch.Generator().manual_seed(step), {}
    with torch.no_grad():
        for layer in layers:
            for path, parameter in layer.named_parameters():
                if path in layer.tied:
                    continue
                if parameter.requires_grad:
                    parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=by)
                tensors[f"weight/{layer.name}/{path}"] = parameter.detach()
                if layer.module in averaged:
                    tensors[f"ema/{layer.name}/{path}"] = parameter.detach() * 0.5
    folder = run.dir.checkpoints / f"step-{step:06d}"
    folder.mkdir(parents=True)
    one = write_tensors(
        folder / "rank-00000.safetensors",
        {_box_name(key, (0,) * value.ndim): value for key, value in tensors.items()},
    )
    described = json.dumps(
        {
            "files": [one.name],
            "tensors": {
                key: {
                    "dtype": DTYPES[value.dtype],
                    "shape": list(value.shape),
                    "boxes": [[0, [0] * value.ndim, list(value.shape)]],
                }
                for key, value in tensors.items()
            },
        }
    ).encode()
    (folder / TENSORS).write_bytes(described)
    (folder / DESCRIPTION).write_text(
        json.dumps(
            sealed(
                {
                    "version": VERSION,
                    "step": step,
                    **model_of(run),
                    "skipped_steps": 0,
                    "updates": {},
                    "files": {
                        one.name: {"bytes": one.size_bytes, "sha256": one.sha256},
                        TENSORS: {
                            "bytes": len(described),
                            "sha256": hashlib.sha256(described).hexdigest(),
                        },
                    },
                }
            )
        )
    )
    return layers


@pytest.mark.parametrize(
    "architecture",
    [
        "unet2d_condition",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("pixart", "sd3", "lumina2")),
    ],
)
def test_outputs_of_the_loaded_classes_equal_the_trained_models(
    tmp_path, architecture, monkeypatch
):
    run = written_run(tmp_path, architecture)
    layers = trained(run)
    said = export(run, tmp_path / "out")
    assert said.step == 1 and set(said.modules) == {
        "image_encoder",
        "audio_encoder",
        "llm",
        "image_generator",
        "image_generator_vae",
    }
    configs, models = read_configs(run), {}
    for name in said.modules:
        vae = name.endswith("_vae")
        kind = configs["image_generator"].vae["_class_name"] if vae else configs[name].architecture
        models[name] = published_class(kind).from_pretrained(tmp_path / "out" / name).eval()
        assert said.modules[name].loads_with.endswith(type(models[name]).__name__)
    projectors = load_file(tmp_path / "out" / "projectors.safetensors")
    by_name = {layer.name: layer for layer in layers}
    batch = probe_batch(
        describe(run), image=[(4, 4), (4, 4)], audio=2, documents=[[40], [48]], target=2
    )
    with torch.no_grad():
        check_equal(run, by_name, models, projectors, batch)
    joints = json.loads((tmp_path / "out" / "model.json").read_text())["joints"]
    assert {f"{layer}.{name}" for layer, own in joints.items() for name in own["weights"]} == set(
        projectors
    )
    generation = models["llm"].generation_config
    assert (generation.bos_token_id, generation.eos_token_id) == (257, 258)  # of the byte tokenizer
    text = (tmp_path / "out" / "README.md").read_text()
    assert "begins with token 257 and ends with token 258" in text
    monkeypatch.chdir(tmp_path / "out")
    made = {}
    exec(text.split("```python")[1].split("```")[0], made)
    assert all(type(made[name]) is type(model) for name, model in models.items())


def of_llm(run, layers, folder):
    """The exported LLM, whose logits equal those of our layers."""
    model = published_class("llama").from_pretrained(folder).eval()
    batch = probe_batch(describe(run), documents=[[48], [48]])
    own = [layer for layer in layers if layer.module == "llm"]
    with torch.no_grad():
        hidden = through(own[:-1], batch)["hidden"]
        logits = own[-1].logits(hidden).unflatten(0, batch.token_ids.shape)
        torch.testing.assert_close(model(batch.token_ids).logits, logits, rtol=1e-5, atol=1e-5)
    return model, batch


@pytest.mark.slow
def test_a_tied_llm_is_written_as_one_tensor_and_generates_the_same(tmp_path):
    run = written_run(tmp_path, tied=True)
    layers = trained(run, averaged=("llm",))
    said = export(run, tmp_path / "out")
    folder = tmp_path / "out" / "llm"
    model, batch = of_llm(run, layers, folder)
    assert json.loads((folder / "config.json").read_text())["tie_word_embeddings"] is True
    assert "lm_head.weight" not in load_file(folder / "model.safetensors")
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert said.modules["llm"].parameters == sum(p.numel() for p in model.parameters())
    again = load_trained(run, run.dir.checkpoints / "step-000001", torch.device("cpu")).layers
    embed, *_, head = [layer for layer in again if layer.module == "llm"]
    assert head.lm_head.weight is embed.embedding.weight
    assert torch.equal(embed.embedding.weight, model.lm_head.weight * 0.5)  # the average
    ids = batch.token_ids[:1, :5]
    written = model.generate(ids, max_new_tokens=6, do_sample=False, eos_token_id=None)
    own = [layer for layer in layers if layer.module == "llm"]
    with torch.no_grad():
        for _ in range(6):
            row = replace(
                batch,
                token_ids=ids,
                positions=torch.arange(ids.shape[1])[None],
                sample_lengths=[ids.shape[1]],
                labels=None,
                cache={},
                items={},
            )
            hidden = through(own[:-1], row)["hidden"]
            ids = torch.cat([ids, own[-1].logits(hidden[-1:]).argmax(-1)[None]], 1)
    assert torch.equal(written, ids)


@pytest.mark.slow
def test_a_checkpoint_whose_head_was_trained_apart_is_written_as_it_was(tmp_path):
    run = written_run(tmp_path, tied=True)
    layers = trained(run, ties=False)
    export(run, tmp_path / "out")
    folder = tmp_path / "out" / "llm"
    model, _ = of_llm(run, layers, folder)
    assert json.loads((folder / "config.json").read_text())["tie_word_embeddings"] is False
    assert not torch.equal(model.lm_head.weight, model.model.embed_tokens.weight)
    again = load_trained(run, run.dir.checkpoints / "step-000001", torch.device("cpu")).layers
    (head,) = [layer for layer in again if layer.name == "llm.head"]
    assert torch.equal(head.lm_head.weight, model.lm_head.weight)
    with pytest.raises(SpecError, match="trained apart from its embedding"):
        starts(run, None, resume=True)
    with pytest.raises(SpecError, match="trained apart from its embedding"):
        starts(run, run.dir.checkpoints / "step-000001", resume=False)


def check_equal(run, layers, models, projectors, batch):
    """Every module by itself, on what the modules before it gave."""
    close = {"rtol": 1e-5, "atol": 1e-5}
    config, state = read_configs(run), through(list(layers.values()), batch)
    patches = torch.cat(
        [
            models["image_encoder"](pixels, interpolate_pos_encoding=True).last_hidden_state
            for pixels in batch.of("image").values[0]
        ]
    )
    norm = layers["image_encoder.projector"].norm
    torch.testing.assert_close(norm(state["image_hidden"]), patches.flatten(0, 1), **close)
    heard = models["audio_encoder"](batch.of("audio").values[0][0]).last_hidden_state
    torch.testing.assert_close(
        layers["audio_encoder.projector"].norm(state["audio_hidden"]), heard.flatten(0, 1), **close
    )
    mlp = {
        name.removeprefix("audio_encoder.projector.mlp."): tensor
        for name, tensor in projectors.items()
        if name.startswith("audio_encoder.projector.mlp.")
    }
    hidden = torch.nn.functional.gelu(
        heard.flatten(0, 1).unflatten(0, (-1, 3)).flatten(1) @ mlp["0.weight"].T + mlp["0.bias"]
    )
    torch.testing.assert_close(
        hidden @ mlp["2.weight"].T + mlp["2.bias"], state["audio_embeds"], **close
    )
    tokens = batch.token_ids[1:]  # the second sequence is one sample without padding
    embeds = layers["llm.embed"](state, batch)["hidden"].unflatten(0, batch.token_ids.shape)[1:]
    found = models["llm"](inputs_embeds=embeds, output_hidden_states=True)
    own = state["hidden"].unflatten(0, batch.token_ids.shape)[1:]
    head = layers["llm.head"]
    torch.testing.assert_close(head.norm(own), found.hidden_states[-1], **close)
    torch.testing.assert_close(head.lm_head(head.norm(own)), found.logits, **close)
    assert tokens.shape == found.logits.shape[:2]
    vae = config["image_generator"].vae
    posterior = models["image_generator_vae"].encode(batch.of("target").values[0][0]).latent_dist
    expected = (posterior.mean + posterior.std * draw(batch, (4, 8, 8), 0)) * vae["scaling_factor"]
    torch.testing.assert_close(state["latents"], expected, **close)
    canvas = layers["image_generator.in"].canvas
    times, noise = canvas.draw(batch)
    context = state["context"]
    conditioning = layers["image_generator.projector"](state, batch)["conditioning"].unflatten(
        0, (2, -1)
    )
    assert len(context) == 8
    more = {"pooled_projections": state["pooled"]} if "pooled" in state else {}
    told, sign = canvas.noise.times(times), 1
    if config["image_generator"].architecture == "lumina2":  # as its pipeline calls it
        more["encoder_attention_mask"] = torch.ones(conditioning.shape[:2], dtype=torch.bool)
        told, sign = 1 - told / 1000, -1
    made = (
        sign
        * models["image_generator"](
            canvas.noise.mix(state["latents"], noise, times),
            timestep=told,
            encoder_hidden_states=conditioning,
            **more,
        ).sample
    )
    torch.testing.assert_close(
        layers["image_generator.out"].predict(state, batch), made[:, :4], **close
    )


@pytest.mark.slow
def test_averages_bf16_files_beside_and_an_older_checkpoint(tmp_path):
    run = written_run(tmp_path, precision="bf16")
    layers = trained(run, 1, averaged=("image_generator",))
    trained(run, 2)
    with pytest.raises(SpecError, match="no moving averages"):
        export(run, tmp_path / "out", ema=True)
    said = export(run, tmp_path / "out", step=1, ema=True)
    assert [name for name, module in said.modules.items() if module.averaged] == ["image_generator"]
    made = load_file(tmp_path / "out" / "image_generator" / "diffusion_pytorch_model.safetensors")
    out = next(layer for layer in layers if layer.name == "image_generator.out")
    assert torch.equal(made["conv_out.weight"], (out.conv_out.weight * 0.5).bfloat16())
    llm = load_file(tmp_path / "out" / "llm" / "model.safetensors")
    head = next(layer for layer in layers if layer.name == "llm.head")
    assert torch.equal(llm["lm_head.weight"], head.lm_head.weight.bfloat16())
    projectors = load_file(tmp_path / "out" / "projectors.safetensors")
    projector = next(layer for layer in layers if layer.name == "image_generator.projector")
    assert torch.equal(
        projectors["image_generator.projector.mlp.0.weight"],
        (projector.mlp[0].weight * 0.5).bfloat16(),
    )
    schedule = json.loads(
        (tmp_path / "out" / "image_generator" / "scheduler_config.json").read_text()
    )
    assert schedule["prediction_type"] == "epsilon" and schedule["clip_sample"] is False


@pytest.mark.slow
def test_an_export_starts_another_run_and_a_training_that_goes_on_removes_nothing_of_it(tmp_path):
    from disttrain_cli.models.weights import load_into

    run = written_run(tmp_path)
    layers, checkpoint = trained(run), latest(run.dir.checkpoints)

    def prune(doing, done, total):
        if doing.startswith("writing"):
            remove(checkpoint)

    export(run, tmp_path / "out", progress=prune)
    remove(checkpoint)
    assert not checkpoint.exists()
    (tmp_path / "out" / "llm" / "tokenizer.json").write_text("{}")
    content = yaml.safe_load(run.path.read_text())
    for name, spec in content["model"]["modules"].items():
        plain = {
            key: value
            for key, value in spec.items()
            if key not in ("architecture", "config", "vae")
        }
        content["model"]["modules"][name] = plain | {"folder": f"out/{name}"}
    content["model"]["modules"]["image_generator"]["vae_folder"] = "out/image_generator_vae"
    (tmp_path / "again").mkdir()
    run.path.write_text(yaml.safe_dump(content))
    again = read_run(run.path)
    assert again.file.model_fingerprint() != run.file.model_fingerprint()
    others = build_layers(again, 0, len(layer_table(again)))
    assert len(load_into(others, again)) == 5
    for own, other in zip(layers, others, strict=True):
        for (path, a), b in zip(own.named_parameters(), other.parameters(), strict=True):
            assert own.published_name(path) is None or torch.equal(a, b), path
    trained(again, 2)
    export(again, tmp_path / "more")
    assert not (tmp_path / "more" / "llm" / "tokenizer.json").exists()  # trained with `bytes`


def test_what_cannot_be_exported_leaves_nothing(tmp_path):
    run = written_run(tmp_path)
    with pytest.raises(SpecError, match="no checkpoint") as error:
        export(run, tmp_path / "out")
    assert "disttrain_cli.train" in str(error.value)
    trained(run)
    with pytest.raises(SpecError, match="step 7") as error:
        export(run, tmp_path / "out", step=7)
    assert "steps there: 1" in str(error.value)
    (tmp_path / "there").mkdir()
    with pytest.raises(SpecError, match="exists"):
        export(run, tmp_path / "there")
    content = yaml.safe_load(run.path.read_text())
    content["model"]["modules"]["llm"]["config"]["num_hidden_layers"] = 1
    other = tmp_path / "other.yaml"
    other.write_text(yaml.safe_dump(content))
    with pytest.raises(MismatchError, match="another model"):
        export(read_run(other), tmp_path / "out")
    file = run.dir.checkpoints / "step-000001" / "rank-00000.safetensors"
    damaged = bytearray(file.read_bytes())
    damaged[-5] ^= 1
    file.write_bytes(damaged)
    with pytest.raises(SpecError, match="damaged"):
        export(run, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "disttrain.yaml",
        "other.yaml",
        "runs",
        "there",
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    "failing", first_fast(["disttrain_cli.runtime.outputs.export.write_own", SAVE_FILE])
)
def test_a_failure_in_the_middle_leaves_nothing(tmp_path, monkeypatch, failing):
    run = written_run(tmp_path)
    trained(run)

    def full(*_, **__):
        if failing == SAVE_FILE:
            raise SafetensorError("I/O error: No space left on device (os error 28)")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(failing, full)
    with pytest.raises(SpecError, match="Cannot write") as error:
        export(run, tmp_path / "out")
    assert "No space left" in str(error.value)
    assert not (tmp_path / "out").exists() and not list(tmp_path.glob(".out*"))
