"""The published models as blocks of a run file: described, counted and divided without memory for
weights."""

import pytest
import yaml

from disttrain_cli.models.flops import count_flops
from disttrain_cli.models.graph import build_layers, describe, layer_table
from disttrain_cli.models.sharding import tp_degrees
from disttrain_cli.spec.runfile import Run, RunFile
from disttrain_cli.spec.work import Work

VIT_HUGE = """
kind: encoder
architecture: vit
merge: 2
config: {hidden_size: 1280, num_hidden_layers: 32, num_attention_heads: 16, intermediate_size: 5120,
         image_size: 224, patch_size: 14}
"""
LLAMA = """
kind: llm
architecture: llama
config: {vocab_size: 32000, hidden_size: %d, num_hidden_layers: %d, num_attention_heads: %d,
         num_key_value_heads: %d, intermediate_size: %d, tie_word_embeddings: false}
"""
STABLE_DIFFUSION = """
kind: generator
architecture: unet2d_condition
image_size: %d
context_tokens: 77
config:
  in_channels: 4
  out_channels: 4
  layers_per_block: 2
  block_out_channels: [320, 640, 1280, 1280]
  down_block_types: [CrossAttnDownBlock2D, CrossAttnDownBlock2D, CrossAttnDownBlock2D, DownBlock2D]
  up_block_types: [UpBlock2D, CrossAttnUpBlock2D, CrossAttnUpBlock2D, CrossAttnUpBlock2D]
  cross_attention_dim: 1024
  attention_head_dim: [5, 10, 20, 20]
  use_linear_projection: true
vae:
  block_out_channels: [128, 256, 512, 512]
  layers_per_block: 2
  latent_channels: 4
  down_block_types: [DownEncoderBlock2D, DownEncoderBlock2D, DownEncoderBlock2D, DownEncoderBlock2D]
  up_block_types: [UpDecoderBlock2D, UpDecoderBlock2D, UpDecoderBlock2D, UpDecoderBlock2D]
  scaling_factor: 0.18215
"""


def published(tmp_path, llama, image_size):
    modules = {
        "image_encoder": VIT_HUGE,
        "llm": LLAMA % llama,
        "image_generator": STABLE_DIFFUSION % image_size,
    }
    file = RunFile.model_validate(
        {
            "name": "published",
            "model": {"modules": {name: yaml.safe_load(text) for name, text in modules.items()}},
            "data": {"distribution": {}, "tokenizer": "folder"},
            "train": {"global_batch_size": 1920, "steps": 1},
        }
    )
    return Run(path=tmp_path / "disttrain.yaml", file=file)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("llama", "image_size", "parameters_b", "image_tflop"),
    [
        ((4096, 32, 32, 32, 11008), 512, (0.63, 6.74, 0.87), 0.804 + 1.117),
        ((5120, 40, 40, 40, 13824), 512, (0.63, 13.02, 0.87), 0.804 + 1.117),
        ((8192, 80, 64, 8, 28672), 1024, (0.63, 68.98, 0.87), 4.675 + 4.879),
    ],
)
def test_published_models_are_described_and_counted(
    tmp_path, llama, image_size, parameters_b, image_tflop
):
    run = published(tmp_path, llama, image_size)
    table, target = layer_table(run), describe(run).target
    assert (target.size_px, target.latent_pixels) == (image_size, (image_size // 8) ** 2)
    for name, expected in zip(
        ("image_encoder", "llm", "image_generator"), parameters_b, strict=True
    ):
        own = [
            layer
            for layer in table
            if layer.module == name and layer.kind != "projector" and not layer.frozen
        ]
        assert sum(layer.parameters for layer in own) / 1e9 == pytest.approx(expected, abs=0.005)
    flops = count_flops(run)["image_generator"]
    forward = (
        sum(costs.forward(Work(1.0)) for kind, costs in flops.items() if kind != "projector") / 1e12
    )
    assert forward == pytest.approx(image_tflop, abs=1e-3)
    degrees = {module: tp_degrees(run, module, 8) for module in run.file.model.order}
    assert degrees == {"image_encoder": [1, 2, 4, 8], "llm": [1, 2, 4, 8], "image_generator": [1]}


def test_a_shard_is_built_without_the_whole_layer(tmp_path, monkeypatch):
    run = published(tmp_path, (8192, 80, 64, 8, 28672), 512)
    made = []
    monkeypatch.setattr(
        "disttrain_cli.models.library_decoder.LibraryDecoder.initialise",
        lambda decoder, layer: made.append(sum(p.numel() for p in layer.parameters())),
    )
    block = next(i for i, info in enumerate(layer_table(run)) if info.name == "llm.block.0")
    layer = build_layers(run, block, block + 1, tp=8)[0]
    norms = 2 * 8192
    assert (
        made == [(855654400 - norms) // 8 + norms] == [sum(p.numel() for p in layer.parameters())]
    )
