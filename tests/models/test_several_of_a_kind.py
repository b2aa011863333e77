"""Several generators, several image encoders: names of their own, draws of their own, and what does
not go together."""

import dataclasses

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
from disttrain_cli.models.noise import Noise, draw_noise
from disttrain_cli.models.probe import probe_batch
from disttrain_cli.spec.runfile.model import ModelSpec
from tests.batches import changed
from tests.models.changed_runs import with_modules
from tests.models.conftest import MODULES, UNET, VIT

SECOND = MODULES["image_generator"] | {
    "image_size": 8,
    "config": UNET | {"block_out_channels": [8, 16]},
}
OTHER_EYE = MODULES["image_encoder"] | {
    "architecture": "siglip_vision_model",
    "config": {name: value for name, value in VIT.items() if name != "hidden_size"}
    | {"hidden_size": 16},
}


@pytest.fixture
def several(make_run):
    """The tiny model with more modules."""

    def make(**more):
        return with_modules(make_run(), **more)

    return make


def test_every_generator_reads_the_llm_and_nothing_of_the_other(several):
    run = several(second=SECOND)
    table, inputs = layer_table(run), describe(run)
    assert inputs.generators == ["image_generator", "second"]
    assert [head.shape for head in inputs.targets] == [(3, 16, 16), (3, 8, 8)]
    assert [layer.loss for layer in table if layer.loss] == ["text", "image", "image/second"]
    for name in inputs.generators:
        apart = parallel_layers(table, inputs.llm, name)
        local = [index for index, layer in enumerate(table) if layer.module == name]
        assert [spec.name for spec in live_tensors(table, local[0], apart)] == ["context"]
        assert apart.isdisjoint(local) and apart | set(local) >= set(
            range(local[-1] + 1, len(table))
        )
    crossing = next(place for place, layer in enumerate(table) if layer.module == "second")
    # passed on in a line of both
    assert [spec.name for spec in live_tensors(table, crossing)] == ["context"]


def test_generators_draw_noise_of_their_own_and_a_first_one_as_if_it_were_alone(several):
    alone, both = (
        probe_batch(describe(run), target=3) for run in (several(), several(second=SECOND))
    )
    assert [tuple(tensor.shape) for tensor in both.of("target").values[1]] == [(3, 3, 8, 8)]
    both = changed(both, "target", noise_seeds=alone.of("target").noise_seeds)
    first, second = (draw_noise(both, (3, 8, 8), Noise(), place) for place in (0, 1))
    assert torch.equal(
        first[1], draw_noise(dataclasses.replace(alone, cache={}), (3, 8, 8), Noise())[1]
    )
    assert not torch.isclose(first[1], second[1]).any() and not torch.equal(first[0], second[0])


def test_the_llm_reads_the_sum_of_two_encoders(several):
    """Image tokens are as many as with one; their embeddings are both projectors' outputs added."""
    run = several(other_eye=OTHER_EYE)
    inputs, table = describe(run), layer_table(run)
    assert [head.extra_tokens for head in inputs.images] == [1, 0] and inputs.encoders == [
        "image_encoder",
        "other_eye",
    ]
    batch = probe_batch(inputs, image=[(4, 4), (4, 8)], documents=[[40]])
    state, made = {}, {}
    layers = build_layers(
        run, 0, next(place for place, layer in enumerate(table) if layer.module == "llm") + 1
    )
    for layer in layers[:-1]:
        state.update(layer(state, batch))
        made = {name: tensor for name, tensor in state.items() if name.startswith("image_embeds")}
    assert set(made) == {"image_embeds", "image_embeds.1"}
    hidden = layers[-1](state, batch)["hidden"]
    torch.testing.assert_close(
        hidden[batch.of("image").rows], made["image_embeds"] + made["image_embeds.1"]
    )
    values = batch.of("image").values
    zeros = [torch.zeros_like(pixels) for pixels in values[1]]
    blank = changed(batch, "image", values={0: values[0], 1: zeros})
    again = {}
    for layer in layers[:-1]:
        again.update(layer(again, blank))
    assert torch.equal(again["image_embeds"], made["image_embeds"])
    assert not torch.equal(again["image_embeds.1"], made["image_embeds.1"])


def test_encoders_of_other_patches_and_two_that_hear_are_refused(several):
    other = OTHER_EYE | {"config": OTHER_EYE["config"] | {"patch_size": 8}}
    with pytest.raises(SpecError, match="same patches"):
        describe(several(other_eye=other))
    ear = {
        "kind": "encoder",
        "architecture": "whisper",
        "merge": 3,
        "config": {
            "d_model": 32,
            "encoder_layers": 1,
            "encoder_attention_heads": 4,
            "encoder_ffn_dim": 64,
            "num_mel_bins": 5,
            "max_source_positions": 12,
        },
    }
    with pytest.raises(SpecError, match="both audio encoders"):
        describe(several(ear=ear, other_ear=ear))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (
            {"modules": {"second": {"context_tokens": 5}}},
            ["context_tokens", "image_generator 4, second 5"],
        ),
        (
            {"loss_weights": {"modules": {"llm": 2.0}}},
            ["loss_weights.modules", "llm", "image_generator, second"],
        ),
    ],
)
def test_what_generators_must_agree_on(change, named):
    modules = MODULES | {"second": SECOND | change.get("modules", {}).get("second", {})}
    with pytest.raises(ValueError, match="Value error") as refused:
        ModelSpec.model_validate(change | {"modules": modules})
    assert all(word in str(refused.value) for word in named)
