import copy

import numpy as np
import pytest
import torch

from disttrain_cli.errors import SpecError
from disttrain_cli.models.flops import count_flops
from disttrain_cli.models.graph import build_layers, describe, layer_table
from disttrain_cli.models.operators import layer_operators
from disttrain_cli.models.probe import probe_batch, state_at
from disttrain_cli.models.published import published_class
from disttrain_cli.models.sharding import tp_degrees
from disttrain_cli.runtime.feeding import in_tokens
from disttrain_cli.spec.places import Places
from tests.batches import changed, through
from tests.cases import first_fast


def llm(run):
    return build_layers(run, 4, 8)


def whole_model(run, layers):
    """transformers' model with the weights of our layers, under the names that they say are
    published."""
    from disttrain_cli.models.architectures import read_configs

    module = read_configs(run)["llm"]
    config = copy.deepcopy(module.config)
    config._attn_implementation = "sdpa"
    whole = published_class(module.architecture)(config).eval()
    weights = {
        name: tensor
        for layer in layers
        for name, tensor in layer.to_published(dict(layer.named_parameters())).items()
    }
    for layer in layers:
        for path, tensor in layer.from_published(weights.__getitem__):
            assert tensor is layer.get_parameter(path)
    whole.lm_head.weight = torch.nn.Parameter(whole.lm_head.weight.clone())  # nothing is tied
    whole.load_state_dict(weights)
    return whole


FAMILIES = {
    "llama": ("llama", {}),
    "llama 3": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 5e5,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 16,
            },
            "attention_bias": True,
            "mlp_bias": True,
            "head_dim": 16,
        },
    ),
    "mistral": ("mistral", {"sliding_window": 7, "head_dim": 16}),
    "mistral without windows": ("mistral", {"sliding_window": None}),
    "qwen2": ("qwen2", {}),
    "qwen2 with windows": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    ),
    "qwen2 with yarn": (
        "qwen2",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e6,
                "factor": 4.0,
                "original_max_position_embeddings": 16,
            }
        },
    ),
    "qwen2, dynamic": (
        "qwen2",
        {
            "max_position_embeddings": 48,
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e6, "factor": 2.0},
        },
    ),
    "qwen3": ("qwen3", {"head_dim": 8}),
    "qwen3 wide": (
        "qwen3",
        {
            "head_dim": 20,
            "num_attention_heads": 6,
            "num_key_value_heads": 3,
            "hidden_size": 40,
            "attention_bias": True,
            "tie_word_embeddings": True,
        },
    ),
}


def family(make_run, name, **others):
    architecture, config = FAMILIES[name]
    return make_run(llm={"architecture": architecture, "config": config}, **others)


@pytest.mark.parametrize("name", FAMILIES)
def test_packed_samples_equal_transformers_own_model_one_sample_at_a_time(make_run, name):
    run = family(make_run, name)
    layers = llm(run)
    torch.manual_seed(0)
    with torch.no_grad():
        for layer in layers:
            for parameter in layer.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.1)  # biases and norms too
    whole = whole_model(run, layers)
    batch = probe_batch(describe(run), documents=[[20, 9, 12], [33]])
    state = through(layers, batch)
    hidden = layers[-1].norm(state["hidden"]).unflatten(0, (2, 48))
    total = torch.zeros(())
    for row, start, length in ((0, 0, 20), (0, 20, 9), (0, 29, 12), (1, 0, 33)):
        ids = batch.token_ids[row, start : start + length][None]
        expected = whole.model(ids).last_hidden_state[0]
        torch.testing.assert_close(
            hidden[row, start : start + length], expected, rtol=1e-5, atol=1e-5
        )
        labels = batch.labels[row, start : start + length]
        total = total + torch.nn.functional.cross_entropy(
            whole(ids).logits[0], labels, reduction="sum"
        )
    torch.testing.assert_close(
        state["loss/text"], 0.5 * total / (20 + 9 + 12 + 33), rtol=1e-5, atol=0
    )


@pytest.mark.parametrize("name", first_fast(["mistral", "qwen2 with windows", "qwen3 wide"]))
def test_costs_are_counted_and_a_group_divides_it(make_run, name):
    run = family(make_run, name, image_encoder=None, image_generator=None)
    flops = count_flops(run)["llm"]
    assert set(flops) == {"embed", "block", "head"}
    assert flops["block"].forward.per_length_sq > 0
    table, inputs = layer_table(run), describe(run)
    place = next(i for i, info in enumerate(table) if info.name == "llm.block.1")
    batch = probe_batch(inputs, documents=[[48]], device="meta")
    layer = build_layers(run, place, place + 1, device="meta")[0]
    assert (
        layer_operators(layer, state_at(table, place, inputs, batch, "meta"), batch).saved_bytes > 0
    )
    degrees = tp_degrees(run, "llm", 6)
    heads = 3 if name == "qwen3 wide" else 2
    assert degrees == [tp for tp in (1, 3) if heads % tp == 0 and 261 % tp == 0]
    tp = heads
    part = build_layers(run, place, place + 1, tp=tp, tp_rank=1)[0]
    rows = {
        n: t.detach()
        for n, t in state_at(table, place, inputs, probe_batch(inputs, documents=[[48]])).items()
    }
    assert part(rows, probe_batch(inputs, documents=[[48]]))["hidden"].shape == rows["hidden"].shape
    assert (
        part.layer.self_attn.q_proj.out_features == layer.layer.self_attn.q_proj.out_features // tp
    )


def test_a_tied_head_starts_as_a_copy_of_the_embedding(make_run):
    embed, *_, head = llm(make_run(llm={"config": {"tie_word_embeddings": True}}))
    assert torch.equal(embed.embedding.weight, head.lm_head.weight)
    assert embed.embedding.weight.data_ptr() != head.lm_head.weight.data_ptr()
    embed, *_, head = llm(make_run())
    assert not torch.equal(embed.embedding.weight, head.lm_head.weight)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (
            {
                "rope_parameters": {"rope_type": "dynamic", "factor": 2.0},
                "max_position_embeddings": 40,
            },
            ("rope_type", "sequence_length of at most 40", "not 48"),
        ),
        (
            {
                "rope_parameters": {
                    "rope_type": "longrope",
                    "factor": 2.0,
                    "short_factor": [1.0] * 6,
                    "long_factor": [2.0] * 6,
                }
            },
            ("rope_type", "longest sample"),
        ),
        ({"layer_types": ["full_attention"]}, ("layer_types", "num_hidden_layers")),
        ({"layer_types": ["linear_attention", "full_attention"]}, ("linear_attention",)),
        (
            {"layer_types": ["full_attention", "sliding_attention"]},
            ("sliding_window", "layer_types"),
        ),
        ({"use_sliding_window": True, "sliding_window": 0}, ("sliding_window", "1 or more")),
        ({"head_dim": 7}, ("head_dim", "even")),
    ],
)
def test_wrong_configurations_are_named(make_run, config, words):
    with pytest.raises(SpecError) as error:
        layer_table(make_run(llm={"architecture": "qwen3", "config": config}))
    assert all(word in str(error.value) for word in words), str(error.value)


def test_image_rows_take_the_encoders_place_and_its_gradient(make_run):
    run = make_run()
    layers = llm(run)
    batch = probe_batch(describe(run), image=[(2, 4), (4, 4)], documents=[[40], [20, 20]])
    batch.of("image").rows.copy_(torch.tensor([5, 6, 60, 61, 62, 63]))
    images = torch.randn(6, 48, requires_grad=True)
    hidden = layers[0]({"image_embeds": images}, batch)["hidden"]
    assert torch.equal(hidden[batch.of("image").rows], images)
    others = torch.ones(96, dtype=torch.bool).index_fill(0, batch.of("image").rows, False)
    assert torch.equal(hidden[others], layers[0].embedding(batch.token_ids.flatten())[others])
    through(layers, batch, {"image_embeds": images})["loss/text"].backward()
    assert (images.grad.abs().sum(1) > 0).all()


def test_rows_without_a_place_are_not_seen_and_get_no_gradient(make_run):
    run = make_run()
    layers = llm(run)
    batch = probe_batch(describe(run), image=[(2, 4), (4, 4)], documents=[[40], [20, 20]])
    at = torch.tensor([-1, 95, 60, -1, 62, 63])
    alone = Places(at.numpy()[:, None], (at >= 0).float().numpy()[:, None])
    batch = changed(batch, "image", **in_tokens(alone, at.device))
    images = torch.randn(6, 48, requires_grad=True)
    hidden = layers[0]({"image_embeds": images}, batch)["hidden"]
    kept = at >= 0
    places = at[kept]
    assert batch.of("image").shares is None
    assert len(hidden) == 96 and torch.equal(hidden[places], images[kept])
    others = torch.ones(96, dtype=torch.bool).index_fill(0, places, False)
    assert torch.equal(hidden[others], layers[0].embedding(batch.token_ids.flatten())[others])
    hidden.square().sum().backward()
    assert ((images.grad.abs().sum(1) > 0) == kept).all()


def test_tokens_are_sums_of_shares_of_several_rows(make_run):
    run = make_run()
    layers = llm(run)
    batch = probe_batch(describe(run), image=[(2, 4), (4, 4)], documents=[[40], [20, 20]])
    at = np.array([[5, 6], [-1, -1], [6, -1], [60, 5], [61, -1], [60, 61]])
    shares = np.array([[0.5, 0.25], [0, 0], [0.75, 0], [1, 0.5], [0.25, 0], [0, 0.75]], np.float32)
    batch = changed(batch, "image", **in_tokens(Places(at, shares), torch.device("cpu")))
    images = torch.randn(6, 48, requires_grad=True)
    hidden = layers[0]({"image_embeds": images}, batch)["hidden"]
    dense = torch.zeros(96, 6)
    for row, column in np.argwhere(at >= 0):
        dense[at[row, column], row] += float(shares[row, column])
    seen = torch.tensor([5, 6, 60, 61])
    torch.testing.assert_close(hidden[seen], (dense @ images)[seen])
    others = torch.ones(96, dtype=torch.bool).index_fill(0, seen, False)
    assert torch.equal(hidden[others], layers[0].embedding(batch.token_ids.flatten())[others])
    gradient = torch.randn(96, 48)
    hidden.backward(gradient)
    torch.testing.assert_close(images.grad, dense.T @ gradient)


def test_context_is_the_normed_hidden_rows(make_run):
    run = make_run()
    layers = llm(run)
    batch = probe_batch(describe(run), documents=[[40], [30]], target=2)
    batch.of("target").rows.copy_(torch.tensor([70, 71, 72, 73, 4, 5, 6, 7]))
    state = through(layers, batch)
    assert torch.equal(state["context"], layers[-1].norm(state["hidden"])[batch.of("target").rows])


def test_padding_gives_no_nan_and_untrained_slots_a_connected_zero(make_run):
    run = make_run()
    layers = llm(run)
    batch = probe_batch(describe(run), documents=[[3], []])
    batch.labels.fill_(-100)
    state = through(layers, batch)
    assert state["hidden"].isfinite().all() and float(state["loss/text"].detach()) == 0
    state["loss/text"].backward()
    for layer in layers:
        assert all(
            p.grad is not None and p.grad.isfinite().all() and not p.grad.any()
            for p in layer.parameters()
        )


def test_segments_and_rotary_are_made_once_per_stage(make_run):
    layers = llm(make_run())
    batch = probe_batch(describe(make_run()), documents=[[40]])
    state = through(layers[:2], batch)
    kept = {name: id(value) for name, value in batch.cache.items()}
    assert set(kept) == {"samples", "llm"}
    through(layers[2:], batch, state)
    assert {name: id(value) for name, value in batch.cache.items()} == kept
