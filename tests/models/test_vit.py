import torch

from disttrain_cli.models.graph import build_layers, describe
from disttrain_cli.models.layer import Batch, Items
from disttrain_cli.models.probe import probe_batch
from tests.batches import through


def test_layers_equal_transformers_own_model(make_run):
    from transformers import ViTConfig, ViTModel

    run = make_run()
    config = ViTConfig(**run.file.model.modules["image_encoder"].config)
    whole = ViTModel(config, add_pooling_layer=False).eval()
    embed, *blocks, projector = build_layers(run, 0, 4)
    whole.embeddings.load_state_dict(embed.embeddings.state_dict())
    for mine, theirs in zip(blocks, whole.layers, strict=True):
        theirs.load_state_dict(mine.layer.state_dict())
    whole.layernorm.load_state_dict(projector.norm.state_dict())
    batch = probe_batch(describe(run), image=[(8, 8), (4, 6), (8, 8)])
    assert [tuple(p.shape) for p in batch.of("image").values[0]] == [(1, 3, 16, 24), (2, 3, 32, 32)]
    hidden = projector.norm(through([embed, *blocks], batch)["image_hidden"])
    expected = [
        whole(p, interpolate_pos_encoding=True).last_hidden_state.flatten(0, 1)
        for p in batch.of("image").values[0]
    ]
    torch.testing.assert_close(hidden, torch.cat(expected), rtol=0, atol=1e-6)
    plain = whole(batch.of("image").values[0][1]).last_hidden_state
    torch.testing.assert_close(hidden[25:], plain.flatten(0, 1), rtol=0, atol=1e-6)


def test_different_grids_together_equal_one_by_one(make_run):
    run = make_run()
    layers, inputs = build_layers(run, 0, 4), describe(run)
    batch = probe_batch(inputs, image=[(2, 4), (4, 4), (4, 4), (6, 2)])
    together = through(layers, batch)["image_embeds"]
    images = [image for pixels in batch.of("image").values[0] for image in pixels]
    alone = [
        through(layers, Batch({"image": Items([grid], {0: [image[None]]})}))["image_embeds"]
        for grid, image in zip(batch.of("image").grids, images, strict=True)
    ]
    assert [len(rows) for rows in alone] == [2, 4, 4, 3]
    torch.testing.assert_close(together, torch.cat(alone), rtol=0, atol=1e-6)


def test_merging_takes_neighbours_in_raster_order(make_run):
    """With an identity for the MLP and the norm, every output row is the four patches of one 2 × 2
    block."""
    projector = build_layers(make_run(), 3, 4)[0]
    projector.norm = projector.mlp = torch.nn.Identity()
    rows, columns = 4, 6
    patches = torch.arange(rows * columns, dtype=torch.float32)[:, None]
    state = {"image_hidden": torch.cat([torch.tensor([[-1.0]]), patches])}
    batch = probe_batch(describe(make_run()), image=[(rows, columns)])
    merged = projector(state, batch)["image_embeds"]
    assert merged.tolist()[:2] == [[0, 1, 6, 7], [2, 3, 8, 9]]
    assert merged.tolist()[3] == [12, 13, 18, 19] and merged.shape == (6, 4)
