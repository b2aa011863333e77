"""Text written by the layers: token by token what transformers' own generation writes."""

from dataclasses import replace

import torch

from disttrain_cli.models.graph import build_layers, describe, layer_table
from disttrain_cli.models.layer import Batch, Items
from disttrain_cli.models.writing import write
from tests.models.test_decoder import whole_model

WIDTH = 24


def batch_of(rows):
    ids = torch.tensor([row + [256] * (WIDTH - len(row)) for row in rows])
    none = torch.zeros(0, dtype=torch.int64)
    return Batch(
        {"image": Items([], {0: []}, rows=none), "target": Items([], rows=none)},
        token_ids=ids,
        positions=torch.arange(WIDTH).expand(len(rows), -1),
        sample_lengths=[WIDTH] * len(rows),
    )


def written(run, rows, layers, batch=None, **more):
    allowed = torch.ones(261, dtype=torch.bool)
    allowed[[256, 257, 259, 260]] = False
    return write(
        layers,
        batch or batch_of(rows),
        describe(run),
        [len(row) for row in rows],
        **{"most": WIDTH, "ends": {258}, "allowed": allowed} | more,
    )


def model(run):
    layers, draws = build_layers(run, 0, len(layer_table(run))), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for layer in layers:
            for parameter in layer.parameters():
                parameter.add_(torch.randn(parameter.shape, generator=draws), alpha=0.1)
    return layers


def test_greedy_text_is_that_of_transformers(make_run):
    run, rows = make_run(), [[257, 68, 114], [257, 72, 101, 108, 108, 111]]
    layers = model(run)
    whole = whole_model(run, [layer for layer in layers if layer.module == "llm"])
    for row, text in zip(rows, written(run, rows, layers), strict=True):
        found = whole.generate(
            torch.tensor([row]),
            max_new_tokens=WIDTH - len(row),
            do_sample=False,
            eos_token_id=258,
            pad_token_id=256,
            suppress_tokens=[256, 257, 259, 260],
        )[0, len(row) :].tolist()
        assert text == [token for token in found if token != 258] and len(set(text)) > 2


def test_the_end_token_ends_a_text_and_forbidden_ones_are_never_written(make_run):
    run, layers = make_run(), model(make_run())
    first = written(run, [[257, 68]], layers)[0]
    assert written(run, [[257, 68]], layers, ends={first[2]})[0] == first[: first.index(first[2])]
    only = torch.zeros(261, dtype=torch.bool)
    only[65] = True
    assert written(run, [[257, 68]], layers, allowed=only)[0] == [65] * (WIDTH - 2)
    assert written(run, [[257], [257, 68, 68]], layers, allowed=only, most=3) == [[65] * 3] * 2


def test_at_a_temperature_texts_are_drawn_from_the_seed(make_run):
    run, layers = make_run(), model(make_run())
    first = written(run, [[257, 68]] * 2, layers, temperature=2.0, seed=1)
    assert first == written(run, [[257, 68]] * 2, layers, temperature=2.0, seed=1)
    assert first[0] != first[1] and first != written(
        run, [[257, 68]] * 2, layers, temperature=2.0, seed=2
    )
    assert written(run, [[257, 68]], layers, temperature=1e-6) == written(run, [[257, 68]], layers)


def test_a_prompt_without_room_keeps_its_image_beside_shorter_ones(make_run):
    run, layers = make_run(), model(make_run())
    rows = [[257, 68, 114], [257] + [65] * (WIDTH - 1)]
    batch = batch_of(rows)
    image = Items([(2, 2)], {0: [torch.ones(1, 3, 8, 8)]}, rows=torch.tensor([2 * WIDTH - 1]))
    seen = replace(batch, items={**batch.items, "image": image})
    assert written(run, rows, layers, batch=seen)[0] == written(run, rows[:1], layers)[0]
