import torch

from disttrain_cli.models.graph import build_layers, describe
from disttrain_cli.models.llama import block_causal_mask
from disttrain_cli.models.probe import probe_batch


def llm(run):
    return build_layers(run, 4, 8)


def through(layers, batch, state=None):
    state = dict(state or {})
    for layer in layers:
        state.update(layer(state, batch))
    return state


def whole_model(run, layers):
    from transformers import LlamaConfig, LlamaForCausalLM

    whole = LlamaForCausalLM(LlamaConfig(**run.file.model.modules["llm"].config)).eval()
    embed, *blocks, head = layers
    whole.model.embed_tokens.load_state_dict(embed.embedding.state_dict())
    for mine, theirs in zip(blocks, whole.model.layers, strict=True):
        theirs.load_state_dict(mine.layer.state_dict())
    whole.model.norm.load_state_dict(head.norm.state_dict())
    whole.lm_head.load_state_dict(head.lm_head.state_dict())
    return whole


def test_packed_samples_equal_transformers_own_model_one_sample_at_a_time(make_run):
    run = make_run()
    layers = llm(run)
    whole = whole_model(run, layers)
    batch = probe_batch(describe(run), documents=[[20, 9, 12], [33]])
    state = through(layers, batch)
    hidden = layers[-1].norm(state["hidden"]).unflatten(0, (2, 48))
    total = torch.zeros(())
    for row, start, length in ((0, 0, 20), (0, 20, 9), (0, 29, 12), (1, 0, 33)):
        ids = batch.token_ids[row, start : start + length][None]
        expected = whole.model(ids).last_hidden_state[0]
        torch.testing.assert_close(hidden[row, start : start + length], expected, rtol=0, atol=2e-6)
        labels = batch.labels[row, start : start + length]
        total = total + torch.nn.functional.cross_entropy(whole(ids).logits[0], labels, reduction="sum")
    torch.testing.assert_close(state["loss/text"], 0.5 * total / (20 + 9 + 12 + 33), rtol=1e-6, atol=0)


def test_image_rows_take_the_encoders_place_and_its_gradient(make_run):
    run = make_run()
    layers = llm(run)
    batch = probe_batch(describe(run), grids=[(2, 4), (4, 4)], documents=[[40], [20, 20]])
    batch.image_rows.copy_(torch.tensor([5, 6, 60, 61, 62, 63]))
    images = torch.randn(6, 48, requires_grad=True)
    hidden = layers[0]({"image_embeds": images}, batch)["hidden"]
    assert torch.equal(hidden[batch.image_rows], images)
    others = torch.ones(96, dtype=torch.bool).index_fill(0, batch.image_rows, False)
    assert torch.equal(hidden[others], layers[0].embedding(batch.token_ids.flatten())[others])
    through(layers, batch, {"image_embeds": images})["loss/text"].backward()
    assert (images.grad.abs().sum(1) > 0).all()


def test_context_is_the_normed_hidden_rows(make_run):
    run = make_run()
    layers = llm(run)
    batch = probe_batch(describe(run), documents=[[40], [30]], targets=2)
    batch.context_rows.copy_(torch.tensor([70, 71, 72, 73, 4, 5, 6, 7]))
    state = through(layers, batch)
    assert torch.equal(state["context"], layers[-1].norm(state["hidden"])[batch.context_rows])


def test_mask_is_block_causal_and_has_no_empty_row():
    mask = block_causal_mask(torch.tensor([[0, 0, 1, 1, -1, -1]]))[0, 0]
    assert mask.int().tolist() == [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [0, 0, 1, 0, 0, 0],
        [0, 0, 1, 1, 0, 0],
        [0, 0, 0, 0, 1, 0],
        [0, 0, 0, 0, 0, 1],
    ]


def test_padding_gives_no_nan_and_untrained_slots_a_connected_zero(make_run):
    run = make_run()
    layers = llm(run)
    batch = probe_batch(describe(run), documents=[[3], []])
    batch.labels.fill_(-100)
    state = through(layers, batch)
    assert state["hidden"].isfinite().all() and float(state["loss/text"].detach()) == 0
    state["loss/text"].backward()
    for layer in layers:
        assert all(p.grad is not None and p.grad.isfinite().all() and not p.grad.any() for p in layer.parameters())


def test_mask_and_rotary_are_made_once_per_stage(make_run):
    layers = llm(make_run())
    batch = probe_batch(describe(make_run()), documents=[[40]])
    state = through(layers[:2], batch)
    kept = {name: value.data_ptr() for name, value in batch.cache.items()}
    assert set(kept) == {"mask", "cos", "sin"}
    through(layers[2:], batch, state)
    assert {name: value.data_ptr() for name, value in batch.cache.items()} == kept
