"""A tiny model of three modules, and run files made from it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from disttrain_cli.spec.runfile import Run, RunFile

VIT = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "image_size": 32,
    "patch_size": 4,
}
LLAMA = {
    "vocab_size": 261,
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
}
#: Of heads that are 12 wide.
MROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 2, 2]}}
UNET = {
    "in_channels": 3,
    "out_channels": 3,
    "block_out_channels": [16, 32],
    "layers_per_block": 1,
    "down_block_types": ["CrossAttnDownBlock2D", "DownBlock2D"],
    "up_block_types": ["UpBlock2D", "CrossAttnUpBlock2D"],
    "cross_attention_dim": 24,
    "attention_head_dim": 4,
    "norm_num_groups": 8,
}
AUDIO: dict[str, Any] = {
    "kind": "encoder",
    "architecture": "whisper",
    "merge": 3,
    "config": {
        "d_model": 32,
        "encoder_layers": 2,
        "encoder_attention_heads": 4,
        "encoder_ffn_dim": 64,
        "num_mel_bins": 5,
        "max_source_positions": 12,
    },
}
MODULES: dict[str, dict[str, Any]] = {
    "image_encoder": {"kind": "encoder", "architecture": "vit", "merge": 2, "config": VIT},
    "llm": {"kind": "llm", "architecture": "llama", "config": LLAMA},
    "image_generator": {
        "kind": "generator",
        "architecture": "unet2d_condition",
        "image_size": 16,
        "context_tokens": 4,
        "config": UNET,
    },
}


@pytest.fixture
def make_run(tmp_path: Path) -> Callable[..., Run]:
    """Builds a run; keyword arguments replace keys of a module by the module's name, None removes
    it.

    `audio_encoder={}` adds an audio encoder, which the model has not otherwise.
    """

    def make(seed: int = 0, **changes: dict[str, Any] | None) -> Run:
        modules = {}
        for name, module in (
            MODULES | {"audio_encoder": AUDIO} if "audio_encoder" in changes else MODULES
        ).items():
            change = changes.get(name, {})
            if change is not None:
                config = {**module["config"], **change.get("config", {})}
                modules[name] = {
                    k: v for k, v in {**module, **change, "config": config}.items() if v is not None
                }
        file = RunFile.model_validate(
            {
                "name": "tiny",
                "model": {"modules": modules, "loss_weights": {"text": 0.5, "image": 2.0}},
                "data": {
                    "sources": [{"path": "data"}],
                    "sequence_length": 48,
                    "max_image_pixels": 4096,
                },
                "train": {"global_batch_size": 4, "steps": 1, "precision": "fp32", "seed": seed},
            }
        )
        return Run(path=tmp_path / "disttrain.yaml", file=file)

    return make
