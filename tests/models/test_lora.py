"""Adapters against peft's own on the same models of transformers, and what is refused."""

import copy
import re
from dataclasses import replace
from functools import partial
from itertools import pairwise

import pytest
import torch

from disttrain_cli.errors import SpecError
from disttrain_cli.models.adapters import stored_name
from disttrain_cli.models.architectures import read_configs
from disttrain_cli.models.division import piece, shard_of
from disttrain_cli.models.flops import count_flops
from disttrain_cli.models.footprint import footprint
from disttrain_cli.models.graph import build_layers, describe, layer_table
from disttrain_cli.models.layer import is_adapter
from disttrain_cli.models.lora import adapters, merged
from disttrain_cli.models.probe import probe_batch, state_at
from disttrain_cli.models.published import published_class
from disttrain_cli.models.weight_parts import split
from disttrain_cli.spec.layer_costs import Polynomial
from tests.batches import through
from tests.cases import first_fast
from tests.models.any_decoder import fields_of
from tests.models.test_towers import ASKED_TO_INTERPOLATE, GRIDS, tower

__all__ = ["tower"]  # a fixture

LLM = {"r": 4, "lora_alpha": 6, "target_modules": "all-linear"}
CASES = {
    "llama": ("llama", LLM),
    "some, rank-stabilized": (
        "llama",
        {"r": 3, "use_rslora": True, "target_modules": ["q_proj", "mlp.down_proj"]},
    ),
    "llama, the norm and the head whole": (
        "llama",
        {"r": 2, "target_modules": ["v_proj"], "modules_to_save": ["model.norm", "lm_head"]},
    ),
    "qwen3, by a regular expression": ("qwen3", {"target_modules": r".*\.(v|o)_proj"}),
}


def with_adapters(run, module, layers):
    """peft's model around transformers' own, with the weights and adapters of our layers."""
    from peft import LoraConfig, get_peft_model

    known, spec = read_configs(run)[module], run.file.model.modules[module].lora
    config = copy.deepcopy(known.config)
    config._attn_implementation = "sdpa"
    whole = published_class(known.architecture)(config).eval()
    own = {
        name: tensor
        for layer in layers
        for name, tensor in layer.to_published(dict(layer.named_parameters())).items()
    }
    missing, unknown = whole.load_state_dict(own, strict=False)
    assert not unknown and all(name.startswith(("head.", "pooler.")) for name in missing), missing
    model = get_peft_model(whole, LoraConfig(**spec.model_dump(exclude_none=True)))
    theirs = {
        name.replace("modules_to_save.", "").replace(".default.", "."): tensor
        for name, tensor in model.named_parameters()
        if "lora_" in name or "modules_to_save" in name
    }
    ours = {
        stored_name(layer, path): parameter
        for layer in layers
        for path, parameter in layer.named_parameters()
        if layer.trains(path) and layer.published_path(path)
    }
    assert ours.keys() == theirs.keys() and len(ours)
    with torch.no_grad():
        for name, parameter in theirs.items():
            parameter.copy_(ours[name])
    return model.eval(), ours, theirs


def randomised(layers):
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for layer in layers:
            for parameter in layer.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.15)
    return layers


def assert_same_gradients(ours, theirs):
    for name, parameter in ours.items():
        expected = theirs[name].grad
        # sums in fp32 differ from processor to processor by 2e-5 of the tensor's scale
        within = 5e-5 * max(1.0, float(expected.abs().max()))
        torch.testing.assert_close(parameter.grad, expected, rtol=1e-5, atol=within)
        assert parameter.grad.abs().max() > 0, name


@pytest.mark.parametrize("name", CASES)
def test_an_llm_equals_pefts(make_run, name):
    architecture, lora = CASES[name]
    run = make_run(
        image_encoder=None,
        image_generator=None,
        llm={"architecture": architecture, "lora": lora},
    )
    layers = randomised(build_layers(run, 0, len(layer_table(run))))
    batch = probe_batch(describe(run), documents=[[48]], length=48)
    model, ours, theirs = with_adapters(run, "llm", layers)
    state = through(layers[:-1], batch)
    found = layers[-1].lm_head(layers[-1].norm(state["hidden"]))
    expected = model(input_ids=batch.token_ids).logits[0]
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    weight = torch.randn(found.shape, generator=torch.Generator().manual_seed(1)) / len(found)
    (found * weight).sum().backward()
    (expected * weight).sum().backward()
    assert_same_gradients(ours, theirs)
    assert all(
        (p.grad is None) != la.trains(path) for la in layers for path, p in la.named_parameters()
    )


TOWER = {
    "vit": ["q_proj", "fc1", "fc2"],
    "clip_vision_model": "all-linear",
    "siglip_vision_model": ["self_attn.out_proj", "v_proj"],
    "internvl_vision": "all-linear",
    "idefics3_vision": ["q_proj", "out_proj"],
    "qwen2_5_vl_vision": "all-linear",
}


@pytest.mark.parametrize("architecture", first_fast(TOWER, 2))
def test_a_tower_equals_pefts(tower, architecture):
    """Also of queries, keys and values in one linear; its projector is trained as ever."""
    run = tower(architecture, lora={"r": 3, "target_modules": TOWER[architecture]})
    table = layer_table(run)
    layers = randomised(build_layers(run, 0, sum(info.module == "eye" for info in table)))
    model, ours, theirs = with_adapters(run, "eye", layers)
    batch = probe_batch(describe(run), image=GRIDS)
    state = through(layers, batch)
    if architecture == "qwen2_5_vl_vision":
        found = state["image_merged"]
        expected = model(*_patches(batch)).pooler_output
    else:
        found = layers[-1].norm(state["image_hidden"])
        asked = architecture in ASKED_TO_INTERPOLATE
        how = {"interpolate_pos_encoding": True} if asked else {}
        made = [model(pixels, **how).last_hidden_state for pixels in batch.of("image").values[0]]
        if architecture == "clip_vision_model":
            made = [model.base_model.model.post_layernorm(one) for one in made]
        expected = torch.cat([one.flatten(0, 1) for one in made])
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=2e-5)
    weight = torch.randn(found.shape, generator=torch.Generator().manual_seed(1)) / len(found)
    (found * weight).sum().backward(retain_graph=True)
    (expected * weight).sum().backward()
    assert_same_gradients(ours, theirs)
    state["image_embeds"].sum().backward()
    assert all(p.grad is not None for p in layers[-1].parameters() if p.requires_grad)


def _patches(batch):
    grids, patches = [], []
    for image in (image for pixels in batch.of("image").values[0] for image in pixels):
        rows, columns = image.shape[1] // 4, image.shape[2] // 4
        cut = image.unflatten(1, (rows // 2, 2, 4)).unflatten(4, (columns // 2, 2, 4))
        blocks = cut.permute(1, 4, 2, 5, 0, 3, 6)
        patches.append(
            blocks.unsqueeze(5).expand(-1, -1, -1, -1, -1, 2, -1, -1).flatten(4).flatten(0, 3)
        )
        grids.append([1, rows, columns])
    return torch.cat(patches), torch.tensor(grids)


@pytest.mark.slow
def test_adapters_start_the_same_over_any_group_and_leave_the_rest_as_it_was(make_run):
    lora = {"target_modules": "all-linear"}
    vocabulary = {"config": {"vocab_size": 264}}
    run = make_run(
        llm={"lora": lora, **vocabulary},
        image_encoder={"lora": lora},
        image_generator={"lora": lora},
    )
    layers = build_layers(run, 0, len(layer_table(run)))
    plain = build_layers(make_run(llm=vocabulary), 0, len(layers))
    shards = [build_layers(run, 0, len(layers), tp=2, tp_rank=rank) for rank in range(2)]
    kinds = set()
    for number, (layer, before) in enumerate(zip(layers, plain, strict=True)):
        base = dict(before.named_parameters())
        for path, whole in layer.named_parameters():
            if is_adapter(path):
                assert (whole.abs().max() == 0) == ("lora_B" in path), path
                bound = whole.shape[1] ** -0.5
                assert whole.abs().max() <= bound
                assert "lora_B" in path or whole.abs().max() > 0.8 * bound
            else:
                assert torch.equal(whole, base.pop(path)), path
            for shard in (one[number].get_parameter(path) for one in shards):
                assert torch.equal(piece(whole, shard_of(shard)), shard)
                kinds.add((is_adapter(path), shard_of(shard) is None))
        assert not base
    assert len(kinds) == 4
    drawn = [one.lora_A.weight for layer in layers for one in adapters(layer).values()]
    assert not any(torch.equal(a, b) for a, b in pairwise(drawn))


def test_merged_weights_compute_what_adapters_add(make_run):
    run = make_run(image_encoder=None, image_generator=None, llm={"lora": LLM})
    layers = randomised(build_layers(run, 0, 4))
    batch = probe_batch(describe(run), documents=[[48]], length=48)
    expected = through(layers, batch)
    plain = build_layers(make_run(image_encoder=None, image_generator=None), 0, 4)
    with torch.no_grad():
        for layer, one in zip(layers, plain, strict=True):
            one.load_state_dict(
                merged(layer, read_configs(run)["llm"].lora, dict(layer.named_parameters()))
            )
    torch.testing.assert_close(through(plain, batch), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("lora", "told"),
    [
        ({"target_modules": ["q_prj"]}, "no layer is called q_prj.*q_proj, k_proj"),
        (
            {"target_modules": ["model.language_model.layers.0.self_attn.q_proj"]},
            r"names with dots are those inside llm, as model\.layers\.0\.self_attn\.q_proj, not",
        ),
        ({"target_modules": ["lm_head"]}, "lm_head cannot have an adapter"),
        ({"target_modules": ["embed_tokens"]}, "embed_tokens cannot have an adapter"),
        ({"target_modules": "(q"}, "no regular expression"),
        (
            {"target_modules": ["q_proj"], "modules_to_save": ["score"]},
            "modules_to_save: nothing is called score",
        ),
        (
            {"target_modules": ["q_proj"], "modules_to_save": ["self_attn"]},
            "no layer is called q_proj.*beside modules_to_save: gate_proj, up_proj, down_proj",
        ),
        ({"target_modules": r"model\.layers\.1\..*q_proj"}, "llm.block.1 has other adapters"),
    ],
)
def test_targets_that_fit_no_layer_are_refused(make_run, lora, told):
    with pytest.raises(SpecError) as caught:
        layer_table(make_run(llm={"lora": lora}))
    assert re.search(told, str(caught.value), re.DOTALL), caught.value


def test_adapters_inside_recurrent_mixers(make_run):
    """Mamba's fused kernel multiplies by the output projection itself, without its adapter."""
    fields = {"vocab_size": 272, "num_hidden_layers": 1}
    falcon = {"architecture": "falcon_h1", "config": fields_of("falcon_h1") | fields}
    make_run = partial(make_run, image_encoder=None, image_generator=None)
    run = make_run(llm=falcon | {"lora": {"target_modules": "all-linear"}})
    layers = build_layers(run, 0, len(layer_table(run)), "meta")
    paths = {path for layer in layers if layer.module == "llm" for path in adapters(layer)}
    assert "layer.mamba.in_proj" in paths and "layer.mamba.out_proj" not in paths
    with pytest.raises(SpecError, match=r"mamba\.out_proj cannot have an adapter"):
        layer_table(make_run(llm=falcon | {"lora": {"target_modules": ["out_proj"]}}))
    lora = {"target_modules": "all-linear", "lora_dropout": 0.1}
    with pytest.raises(SpecError, match="adapters inside recurrent mixers have no dropout"):
        layer_table(make_run(llm=falcon | {"lora": lora}))


def test_what_is_saved_whole_is_not_adapted_too(make_run):
    lora = {"target_modules": "all-linear", "modules_to_save": ["self_attn", "embed_tokens"]}
    run = make_run(llm={"lora": lora})
    layers = [la for la in build_layers(run, 0, len(layer_table(run))) if la.module == "llm"]
    assert {path.rpartition(".")[2] for la in layers for path in adapters(la)} == {
        *("gate_proj", "up_proj", "down_proj")
    }
    trained = {path for la in layers for path, p in la.named_parameters() if p.requires_grad}
    assert {"embedding.weight", "layer.self_attn.q_proj.weight"} < trained
    assert not {"norm.weight", "layer.input_layernorm.weight"} & trained


@pytest.mark.parametrize(
    ("saved", "expected"),
    [
        (["norm"], {"norm", "input_layernorm", "post_attention_layernorm"}),
        (["model.norm"], {"norm"}),
    ],
)
def test_what_is_saved_whole_is_named_as_in_peft(make_run, saved, expected):
    run = make_run(llm={"lora": {"target_modules": ["q_proj"], "modules_to_save": saved}})
    layers = [la for la in build_layers(run, 0, len(layer_table(run))) if la.module == "llm"]
    assert {path.split(".")[-2] for la in layers for path in la.saved} == expected


def test_a_tied_weight_is_not_saved_whole(make_run):
    """peft would train a copy of it apart from the other."""
    lora = {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]}
    run = make_run(llm={"config": {"tie_word_embeddings": True}, "lora": lora})
    with pytest.raises(SpecError, match="embedding and head are one weight"):
        layer_table(run)


def test_a_module_without_targets_is_refused(make_run):
    with pytest.raises(ValueError, match="set target_modules"):
        make_run(llm={"lora": {"r": 4}})


def test_adapters_are_part_of_the_fingerprint(make_run):
    run = make_run(llm={"lora": {"target_modules": ["q_proj"]}})
    assert run.file.model_fingerprint() != make_run().file.model_fingerprint()


@pytest.mark.parametrize("name", ["llm", "tower"])
def test_dropout_equals_pefts_with_the_same_masks(make_run, tower, name):
    """An adapter drops what it reads, and its linear does not."""
    lora = {"r": 3, "lora_dropout": 0.4, "target_modules": "all-linear"}
    if name == "llm":
        run = make_run(image_encoder=None, image_generator=None, llm={"lora": lora})
        layers = randomised(build_layers(run, 0, len(layer_table(run))))
        batch = probe_batch(describe(run), documents=[[20, 11, 9]], length=48)
        batch = replace(batch, positions=torch.arange(48)[None], sample_lengths=[48])
        batch = replace(batch, sample_seeds=torch.tensor([5]))
    else:
        run = tower("qwen2_5_vl_vision", lora=lora)
        table = layer_table(run)
        layers = randomised(build_layers(run, 0, sum(info.module == "eye" for info in table)))
        batch = probe_batch(describe(run), image=GRIDS)
    model, ours, theirs = with_adapters(run, {"tower": "eye"}.get(name, name), layers)
    model.train()
    state = through(layers, batch)
    wrapped = dict(model.named_modules())
    for layer in layers:
        assert "dropout" in layer.needs or not adapters(layer)
        for path, linear in adapters(layer).items():
            place = f"base_model.model.{layer.published_path(path)}"
            linear.lora_dropout.calls = 0
            wrapped[place].lora_dropout["default"] = linear.lora_dropout
    if name == "llm":
        found = layers[-1].lm_head(layers[-1].norm(state["hidden"]))
        expected = model(input_ids=batch.token_ids).logits[0]
    else:
        found, expected = state["image_merged"], model(*_patches(batch)).pooler_output
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=2e-5)
    weight = torch.randn(found.shape, generator=torch.Generator().manual_seed(1)) / len(found)
    (found * weight).sum().backward()
    (expected * weight).sum().backward()
    assert_same_gradients(ours, theirs)
    for layer in layers:
        layer.eval()
    plain = through(layers, batch)["image_merged" if name == "tower" else "hidden"]
    dropped = state["image_merged" if name == "tower" else "hidden"]
    assert (plain - dropped).abs().max() > 1e-3


@pytest.mark.slow
def test_gradients_of_adapters_are_not_put_off(make_run):
    """Their products are small, what they would keep is not."""
    plain, run = make_run(), make_run(llm={"lora": LLM})
    whole, adapted = (count_flops(one)["llm"]["block"] for one in (plain, run))
    assert whole.weights.per_token > 0 and adapted.weights == Polynomial()
    size = {"documents": [[48]], "length": 48}
    place = [info.name for info in layer_table(run)].index("llm.block.0")
    kept = []
    for one in (plain, run):
        (layer,) = build_layers(one, place, place + 1, "meta")
        batch = probe_batch(describe(one), device="meta", **size)
        split(layer)
        state = state_at(layer_table(one), place, describe(one), batch, "meta")
        kept.append(footprint(layer, state, batch, deferring=True).deferred_bytes)
    assert kept[0] > 0 and kept[1] == 0
