"""A head that is the embedding: what transformers' own tied model learns, ours learns."""

import copy

import pytest
import torch

from disttrain_cli.models.architectures import read_configs
from disttrain_cli.models.graph import build_layers, describe, layer_table
from disttrain_cli.models.probe import probe_batch
from disttrain_cli.models.published import published_class
from disttrain_cli.models.tying import copy_of, stored_name, tie, tied_layers
from disttrain_cli.runtime.engine.optimizer import make_optimizer, parameter_groups
from disttrain_cli.spec.runfile.train import OptimizerSpec

STEPS = 6


@pytest.fixture
def run(make_run):
    config = {"tie_word_embeddings": True}
    return make_run(llm={"config": config}, image_encoder=None, image_generator=None)


@pytest.mark.parametrize("clipping", [0.0, 0.1])
def test_losses_and_weights_are_those_of_transformers_own_tied_model(run, clipping):
    table = layer_table(run)
    layers = build_layers(run, 0, len(table))
    tie(layers, table)
    spec = OptimizerSpec(lr=1e-3, eps=1e-5, weight_decay=0.05)
    ours = make_optimizer(layers, spec)
    config = copy.deepcopy(read_configs(run)["llm"].config)
    config._attn_implementation = "sdpa"
    whole = published_class("llama")(config)
    assert whole.lm_head.weight is whole.model.embed_tokens.weight
    own = {
        name: parameter
        for layer in layers
        for name, parameter in layer.to_published(dict(layer.named_parameters())).items()
    }
    whole.load_state_dict(own)
    matrices = [p for p in whole.parameters() if p.ndim > 1]
    vectors = [p for p in whole.parameters() if p.ndim == 1]
    theirs = torch.optim.AdamW(
        [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}],
        lr=spec.lr,
        betas=spec.betas,
        eps=spec.eps,
        weight_decay=spec.weight_decay,
    )
    for step in range(STEPS):
        torch.manual_seed(step)
        batch = probe_batch(describe(run), documents=[[48], [48]])
        batch.token_ids.random_(5, 200)
        state = {}
        for layer in layers:
            state.update(layer(state, batch))
        logits = whole(batch.token_ids).logits.flatten(0, 1)
        loss = torch.nn.functional.cross_entropy(logits, batch.labels.flatten(), reduction="sum")
        loss = 0.5 * loss / batch.label_tokens
        torch.testing.assert_close(state["loss/text"], loss, rtol=1e-5, atol=0)
        state["loss/text"].backward()
        loss.backward()
        if clipping:
            parameters = {p for layer in layers for p in layer.parameters()}
            norms = [
                torch.nn.utils.clip_grad_norm_(weights, clipping)
                for weights in (parameters, whole.parameters())
            ]
            torch.testing.assert_close(norms[0], norms[1], rtol=1e-5, atol=0)
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
        for name, expected in whole.state_dict().items():
            torch.testing.assert_close(own[name].detach(), expected, rtol=1e-5, atol=1e-5)


def test_a_stage_knows_what_is_tied(run):
    table = layer_table(run)
    assert tied_layers(table) == (0, len(table) - 1)
    embed, *_, head = layers = build_layers(run, 0, len(table))
    tie(layers, table)
    assert head.lm_head.weight is embed.embedding.weight and copy_of(head.lm_head.weight) is None
    assert stored_name(head, "lm_head.weight") == "llm.embed/embedding.weight"
    assert stored_name(head, "norm.weight") == "llm.head/norm.weight"
    (first,) = build_layers(run, 0, 1)
    (last,) = build_layers(run, len(table) - 1, len(table))
    for layer, path, place in (
        (first, "embedding.weight", "first"),
        (last, "lm_head.weight", "second"),
    ):
        tie([layer], table)
        assert copy_of(layer.get_parameter(path)) == place
        (group,) = [
            g for g in parameter_groups([layer], OptimizerSpec(weight_decay=0.1)) if g["copy"]
        ]
        assert group["params"] == [layer.get_parameter(path)] and group["copy"] == place
        assert group["weight_decay"] > 0.0 and group["module"] == "llm"
    assert torch.equal(first.embedding.weight, last.lm_head.weight)


def test_a_tied_weight_is_counted_and_trained_once(run, make_run):
    separate = make_run(image_encoder=None, image_generator=None)
    tied, apart = (sum(info.parameters for info in layer_table(one)) for one in (run, separate))
    table = layer_table(run)
    layers = build_layers(run, 0, len(table))
    tie(layers, table)
    numbers = layers[0].embedding.weight.numel()
    groups = parameter_groups(layers, OptimizerSpec())
    assert apart - tied == numbers
    assert sum(p.numel() for group in groups for p in group["params"]) == tied
    assert tied_layers(layer_table(separate)) is None
