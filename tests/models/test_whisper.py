import pytest
import torch

from disttrain_cli.errors import SpecError
from disttrain_cli.models.graph import (
    build_layers,
    describe,
    layer_table,
    live_tensors,
    parallel_layers,
)
from disttrain_cli.models.group import Group
from disttrain_cli.models.layer import Items
from disttrain_cli.models.probe import probe_batch
from tests.batches import changed, through

DOCUMENTS = [[20, 20], [41]]


def audio_layers(run):
    """The audio encoder's layers, which come after the image encoder's four."""
    layers = build_layers(run, 4, 8)
    assert [layer.name for layer in layers] == [
        f"audio_encoder.{name}" for name in ("embed", "block.0", "block.1", "projector")
    ]
    return layers


def test_layers_equal_transformers_own_encoder(make_run):
    from transformers import WhisperConfig
    from transformers.models.whisper.modeling_whisper import WhisperEncoder

    run = make_run(audio_encoder={})
    whole = WhisperEncoder(WhisperConfig(**run.file.model.modules["audio_encoder"].config)).eval()
    embed, *blocks, projector = audio_layers(run)
    whole.conv1.load_state_dict(embed.conv1.state_dict())
    whole.conv2.load_state_dict(embed.conv2.state_dict())
    for mine, theirs in zip(blocks, whole.layers, strict=True):
        theirs.load_state_dict(mine.layer.state_dict())
    whole.layer_norm.load_state_dict(projector.norm.state_dict())
    batch = probe_batch(describe(run), audio=3)
    assert batch.of("audio").values[0][0].shape == (3, 5, 24)
    hidden = projector.norm(through([embed, *blocks], batch)["audio_hidden"])
    expected = whole(batch.of("audio").values[0][0]).last_hidden_state.flatten(0, 1)
    torch.testing.assert_close(hidden, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("clips", [1, 3])
@pytest.mark.parametrize("size", [2, 3, 5, 7, 40])
def test_ranks_of_a_group_make_their_own_positions(make_run, size, clips):
    """Runs of rows end anywhere in a clip; with 40 ranks some have none."""
    run = make_run(audio_encoder={})
    batch = probe_batch(describe(run), audio=clips)
    embed = audio_layers(run)[0]
    whole = embed({}, batch)["audio_hidden"]
    numbers = torch.randn(whole.shape, generator=torch.Generator().manual_seed(0))
    (whole * numbers).sum().backward()
    expected = [parameter.grad.clone() for parameter in embed.parameters()]
    embed.zero_grad()
    parts = []
    for rank in range(size):
        embed.cp = Group(None, size, rank)
        parts.append(embed({}, batch)["audio_hidden"])
        assert parts[-1].requires_grad
    made = torch.cat(parts)
    torch.testing.assert_close(made, whole, rtol=0, atol=1e-6)
    (made * numbers).sum().backward()
    for parameter, gradient in zip(embed.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-5, atol=1e-5)


def test_clips_together_equal_one_by_one(make_run):
    run = make_run(audio_encoder={})
    layers, batch = audio_layers(run), probe_batch(describe(run), audio=3)
    together = through(layers, batch)["audio_embeds"]
    alone = [
        through(layers, type(batch)({"audio": Items([(1, 1)], {0: [clip[None]]})}))["audio_embeds"]
        for clip in batch.of("audio").values[0][0]
    ]
    assert [tuple(rows.shape) for rows in alone] == [(4, 48)] * 3
    torch.testing.assert_close(together, torch.cat(alone), rtol=0, atol=1e-6)


def test_dropout_follows_the_clips_seeds(make_run):
    run = make_run(audio_encoder={"config": {"dropout": 0.5, "activation_dropout": 0.5}})
    layers, batch = audio_layers(run)[:-1], probe_batch(describe(run), audio=3)
    assert [len(layer.dropouts) for layer in layers] == [1, 2, 2]
    seeds = torch.tensor([5, 6, 7])
    plain = through(layers, batch)["audio_hidden"]
    dropped = through(layers, changed(batch, "audio", seeds=seeds))["audio_hidden"]
    assert not torch.equal(dropped, plain)
    (features,) = batch.of("audio").values[0]
    some = changed(batch, "audio", grids=[(1, 1)] * 2, values={0: [features[1:]]}, seeds=seeds[1:])
    torch.testing.assert_close(
        through(layers, some)["audio_hidden"], dropped[12:], rtol=0, atol=1e-6
    )


def test_merging_takes_neighbours(make_run):
    projector = audio_layers(make_run(audio_encoder={}))[-1]
    projector.norm = projector.mlp = torch.nn.Identity()
    positions = torch.arange(24.0)[:, None]
    merged = projector(
        {"audio_hidden": positions}, probe_batch(describe(make_run(audio_encoder={})), audio=2)
    )
    assert merged["audio_embeds"].tolist()[3:5] == [[9, 10, 11], [12, 13, 14]]


def test_the_llm_puts_images_and_clips_in_their_places(make_run):
    run = make_run(audio_encoder={})
    batch = probe_batch(describe(run), image=[(2, 4)], audio=1, documents=DOCUMENTS)
    embed = build_layers(run, 8, 9)[0]
    assert embed.reads == ("image_embeds", "audio_embeds")
    images, audio = torch.randn(2, 48), torch.randn(4, 48)
    hidden = embed({"image_embeds": images, "audio_embeds": audio}, batch)["hidden"]
    assert torch.equal(hidden[batch.of("image").rows], images) and torch.equal(
        hidden[batch.of("audio").rows], audio
    )
    assert not set(batch.of("image").rows.tolist()) & set(batch.of("audio").rows.tolist())
    rest = torch.ones(len(hidden), dtype=torch.bool)
    rest[batch.of("image").rows] = rest[batch.of("audio").rows] = False
    assert torch.equal(hidden[rest], embed.embedding(batch.token_ids.flatten())[rest])


@pytest.mark.parametrize("clips", [0, 2])
def test_the_whole_model_trains_the_audio_encoder(make_run, clips):
    run = make_run(audio_encoder={}, image_encoder=None)
    layers = build_layers(run, 0, len(layer_table(run)))
    batch = probe_batch(describe(run), audio=clips, documents=DOCUMENTS, target=1)
    state = through(layers, batch)
    (state["loss/text"] + state["loss/image"]).backward()
    own = [parameter.grad for layer in layers[:4] for parameter in layer.parameters()]
    assert all(
        (gradient is not None and gradient.abs().max() > 0) == bool(clips) for gradient in own
    )


def test_encoders_stand_side_by_side(make_run):
    """Nothing that one encoder made passes through the other, in either order; the LLM gets
    both."""
    run = make_run(audio_encoder={})
    table, inputs = layer_table(run), describe(run)
    assert inputs.encoders == ["image_encoder", "audio_encoder"]
    for module, made in (("image_encoder", "image"), ("audio_encoder", "audio")):
        apart = parallel_layers(table, inputs.llm, module)
        crossing = [
            [spec.name for spec in live_tensors(table, index + 1, apart)]
            for index, layer in enumerate(table)
            if layer.module == module
        ]
        assert crossing == [[f"{made}_hidden"]] * 3 + [[f"{made}_embeds"]]
    assert not any(
        parallel_layers(table, inputs.llm, module) for module in ("llm", "image_generator")
    )
    assert {spec.name for spec in live_tensors(table, 8)} == {"image_embeds", "audio_embeds"}


def test_only_live_tensors_need_to_cross_a_cut(make_run):
    run = make_run(audio_encoder={})
    table, inputs = layer_table(run), describe(run)
    layers = build_layers(run, 0, len(table))

    def losses(cut=None):
        batch = probe_batch(inputs, image=[(4, 4), (2, 2)], audio=2, documents=DOCUMENTS, target=2)
        state = through(layers[:cut], batch)
        found = {name: value for name, value in state.items() if name.startswith("loss/")}
        if cut is not None:
            batch.cache.clear()
            kept = {spec.name: state[spec.name] for spec in live_tensors(table, cut)}
            found |= through(layers[cut:], batch, kept)
        return [float(found[name].detach()) for name in ("loss/text", "loss/image")]

    assert all(losses(cut) == losses() for cut in range(3, 10))


def test_described(make_run):
    inputs = describe(make_run(audio_encoder={}))
    (audio,) = inputs.of("audio")
    assert (audio.module, audio.mel_bins, audio.frames) == ("audio_encoder", 5, 24)
    assert (audio.positions, audio.tokens) == (12, 4)
    assert audio.work(2) == (2, 24, 288)
    assert [
        inputs.item(name) for name in ("image_encoder", "audio_encoder", "llm", "image_generator")
    ] == ["image", "audio", "sequence", "target"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"merge": 5}, ("merge", "divisor of 12")),
        ({"config": {"d_model": 30}}, ("d_model", "multiple of encoder_attention_heads")),
        ({"config": {"encoder_ffn_dim": 0}}, ("encoder_ffn_dim", "1 or more")),
        ({"config": {"encoder_layerdrop": 0.1}}, ("encoder_layerdrop", "dropout")),
        ({"config": {"activation_function": "no-such"}}, ("activation_function", "gelu")),
        ({"config": {"d_model": 3, "encoder_attention_heads": 1}}, ("d_model", "even")),
        ({"config": {"encoder_layer": 2}}, ("encoder_layer", "encoder_layers")),
    ],
)
def test_wrong_configurations_are_named(make_run, change, words):
    with pytest.raises(SpecError) as error:
        layer_table(make_run(audio_encoder=change))
    assert all(word in str(error.value) for word in words), str(error.value)
