"""Masks follow the sample, whatever the layout: other items beside it, parts of the features, or a
second forward."""

import pytest
import torch
from torch import nn

from disttrain_cli.models.dropout import SeededDropout, begin, row_hashes, seeded
from disttrain_cli.models.flops import count_flops
from disttrain_cli.models.graph import build_layers, describe, layer_table
from disttrain_cli.models.layer import PipelineLayer
from disttrain_cli.models.probe import probe_batch, state_at
from tests.batches import changed
from tests.cases import first_fast

P = 0.25


def _dropout(
    seeds: list[int], counts: list[int], tp: int = 1, rank: int = 0, key: int = 7
) -> SeededDropout:
    made = SeededDropout(P, key, divided=int(tp > 1))
    made.begin(row_hashes(torch.tensor(seeds), counts), tp=tp, tp_rank=rank)
    return made


def test_about_the_given_share_is_dropped_and_the_rest_scaled() -> None:
    kept = _dropout(list(range(64)), [16] * 64)(torch.ones(64 * 16, 40))
    assert kept.unique().tolist() == [0.0, pytest.approx(1 / (1 - P))]
    assert float((kept == 0).float().mean()) == pytest.approx(P, abs=0.01)
    assert float(((kept == 0).float().mean(0) - P).abs().max()) < 0.06
    assert float(((kept == 0).float().mean(1) - P).abs().mean()) < 0.08


@pytest.mark.parametrize("p", [0.05, 0.5])
def test_rows_and_features_drop_independently(p: float) -> None:
    """Of all pairs of rows, and of features, none drops together more often than chance has it:
    correlations in deviations, which grow to about 5 among so many pairs."""
    made = SeededDropout(p, 7, divided=0)
    made.begin(row_hashes(torch.tensor([3, 4]), [512, 512]))
    dropped = ((made(torch.ones(1024, 512)) == 0).float() - p) / (p * (1 - p)) ** 0.5
    for rows in (dropped, dropped.T):
        together = rows @ rows.T / rows.shape[1] ** 0.5
        together.fill_diagonal_(0)
        assert float(together.abs().max()) < 8
        assert float(together.std()) == pytest.approx(1, abs=0.02)


def test_an_items_mask_does_not_depend_on_the_items_beside_it() -> None:
    together = _dropout([11, 22, 33], [2, 5, 3])(torch.ones(10, 8))
    alone = _dropout([22], [5])(torch.ones(5, 8))
    assert torch.equal(together[2:7], alone)
    assert not torch.equal(together[:2], alone[:2])


def test_calls_and_layers_have_masks_of_their_own() -> None:
    dropout, ones = _dropout([5], [6]), torch.ones(6, 16)
    first, second = dropout(ones), dropout(ones)
    assert not torch.equal(first, second)
    assert not torch.equal(first, _dropout([5], [6], key=8)(ones))
    dropout.begin(row_hashes(torch.tensor([5]), [6]))
    assert torch.equal(dropout(ones), first)


def test_parts_of_the_features_have_parts_of_the_mask() -> None:
    whole = _dropout([1, 2], [3, 4])(torch.ones(7, 5, 12))
    parts = [_dropout([1, 2], [3, 4], 3, rank)(torch.ones(7, 5, 4)) for rank in range(3)]
    assert torch.equal(torch.cat(parts, dim=-1), whole)


def test_parts_side_by_side_that_are_divided_alike_have_their_parts_of_the_mask() -> None:
    """As an attention's features and an FFN's four in Flux's single blocks."""
    rows = row_hashes(torch.tensor([3, 8]), [1, 1])
    made = []
    for tp, rank in ((1, 0), (2, 0), (2, 1)):
        dropout = SeededDropout(P, 7, divided=5)
        dropout.begin(rows, tp=tp, tp_rank=rank)
        made.append(dropout(torch.ones(2, 3, 40 // tp)))
    whole, *halves = made
    joined = torch.stack([half.unflatten(2, (5, 4)) for half in halves], dim=3)
    assert torch.equal(joined.flatten(2), whole)


def test_nothing_is_dropped_without_training() -> None:
    dropout, ones = _dropout([1], [3]), torch.ones(3, 4)
    dropout.eval()
    assert torch.equal(dropout(ones), ones)
    dropout.train()
    dropout.begin(None)
    assert torch.equal(dropout(ones), ones)


def test_layers_that_drop_ask_for_seeds_and_frozen_ones_drop_nothing() -> None:
    class Layer(PipelineLayer):
        def __init__(self, p: float) -> None:
            super().__init__()
            self.name, self.inner = "layer", nn.Sequential(nn.Linear(4, 4), nn.Dropout(p))
            seeded(self)

        def seeded_rows(self, batch):
            return torch.tensor([1]), [3]

    assert Layer(0.0).needs == () and not Layer(0.0).dropouts
    layer = Layer(0.5)
    assert layer.needs == ("dropout",) and isinstance(layer.inner[1], SeededDropout)
    layer.trained = False
    begin(layer, ({}, None))
    assert layer.dropouts[0].rows is None


def test_a_vits_block_drops_the_same_of_an_image_alone_and_among_others(make_run) -> None:
    run = make_run(image_encoder={"config": {"hidden_dropout_prob": 0.5}})
    table, inputs = layer_table(run), describe(run)
    place = next(i for i, layer in enumerate(table) if layer.kind == "block")
    assert table[place].needs == ("dropout",)
    (block,) = build_layers(run, place, place + 1)
    merge = inputs.image.merge
    both = probe_batch(inputs, image=[(merge, merge), (merge, 2 * merge)])
    state = state_at(table, place, inputs, both, "cpu")
    rows = merge * merge + 1
    images = both.of("image")
    second = changed(both, "image", grids=images.grids[1:], seeds=images.seeds[1:])
    whole = block(state, both)["image_hidden"]
    alone = block({"image_hidden": state["image_hidden"][rows:]}, second)["image_hidden"]
    torch.testing.assert_close(whole[rows:], alone)
    assert not torch.allclose(block.eval()(state, both)["image_hidden"], whole)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "change"),
    first_fast(
        [
            ("image_encoder", {"config": {"hidden_dropout_prob": 0.5}}),
            ("audio_encoder", {"config": {"dropout": 0.3, "activation_dropout": 0.2}}),
            ("image_generator", {"config": {"dropout": 0.4}}),
        ]
    ),
)
def test_layers_that_drop_are_counted_like_those_that_do_not(make_run, module, change) -> None:
    kept = {"config": dict.fromkeys(change["config"], 0.0)}
    alone = {name: None for name in ("image_encoder", "image_generator") if name != module}
    counted = [count_flops(make_run(**alone, **{module: own}))[module] for own in (change, kept)]
    assert counted[0] == counted[1]
