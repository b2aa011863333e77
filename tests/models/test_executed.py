"""Priced is what runs: every kind of layer, counted on the meta device and executed on a fake CUDA
device."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from disttrain_cli.api.presets import preset_text
from disttrain_cli.models.graph import build_layers, describe, layer_table
from disttrain_cli.models.group import Group
from disttrain_cli.models.operators import layer_operators
from disttrain_cli.models.probe import probe_batch, probe_work, state_at
from disttrain_cli.models.sharding import tp_degrees
from disttrain_cli.models.tensor_parallel import join
from disttrain_cli.profiling.rows import input_bytes
from disttrain_cli.spec.runfile import read_run
from disttrain_cli.spec.work import Work
from tests.models.executed import executed
from tests.runtime.dryrun.on_fake_cuda import on_fake_cuda

#: Of presets whose layers others have too, those of other widths.
PRESETS: dict[str, str | tuple[str, ...]] = {
    "mllm-9b": "",
    "qwen-vl-8b": "",
    "qwen2.5-vl-7b": ("image_encoder.merger", "llm.block.0"),
    "qwen3-vl-8b": (
        "image_encoder.embed",
        "image_encoder.block.0",
        "image_encoder.deepstack.0",
        "image_encoder.merger",
        "llm.block.0",
        "llm.block.3",
    ),
    "tiny-two-generators": "",
    "mllm-72b": (
        "image_encoder.block.0",
        "llm.block.0",
        "image_generator.vae_encoder",
        "image_generator.up.3",
    ),
    "mllm-130b": ("llm.embed", "llm.block.0", "llm.head"),
    "mllm-audio-10b": ("audio_encoder.embed", "audio_encoder.block.0", "audio_encoder.projector"),
}
IMAGE = {
    "hidden_size": 1152,
    "num_hidden_layers": 2,
    "num_attention_heads": 16,
    "intermediate_size": 4304,
    "image_size": 384,
    "patch_size": 14,
}
TEXT = {
    "vocab_size": 152064,
    "hidden_size": 2048,
    "num_hidden_layers": 2,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "intermediate_size": 6144,
}
SDXL = {
    "in_channels": 4,
    "out_channels": 4,
    "sample_size": 64,
    "layers_per_block": 2,
    "block_out_channels": [320, 640, 1280],
    "down_block_types": ["DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"],
    "up_block_types": ["CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"],
    "cross_attention_dim": 2048,
    "attention_head_dim": [5, 10, 20],
    "transformer_layers_per_block": [1, 2, 2],
    "use_linear_projection": True,
    "addition_embed_type": "text_time",
    "addition_time_embed_dim": 256,
    "projection_class_embeddings_input_dim": 2816,
}
PIXART = {
    "num_attention_heads": 16,
    "attention_head_dim": 72,
    "in_channels": 4,
    "out_channels": 8,
    "num_layers": 2,
    "sample_size": 64,
    "patch_size": 2,
    "cross_attention_dim": 1152,
    "caption_channels": 4096,
    "use_additional_conditions": False,
}
SD35 = {
    "num_attention_heads": 24,
    "attention_head_dim": 64,
    "num_layers": 3,
    "pos_embed_max_size": 384,
    "caption_projection_dim": 1536,
    "joint_attention_dim": 4096,
    "pooled_projection_dim": 2048,
    "dual_attention_layers": [0],
    "qk_norm": "rms_norm",
}
VAE = {
    "in_channels": 3,
    "out_channels": 3,
    "latent_channels": 4,
    "block_out_channels": [128, 256, 512, 512],
    "down_block_types": ["DownEncoderBlock2D"] * 4,
    "up_block_types": ["UpDecoderBlock2D"] * 4,
}
#: Classes of models that no preset has, and adapters.
OTHERS: dict[str, dict[str, Any]] = {
    "adapters": {
        "eye": {
            "kind": "encoder",
            "architecture": "clip_vision_model",
            "config": IMAGE,
            "lora": {"r": 16, "target_modules": ["q_proj", "v_proj", "fc2"]},
        },
        "llm": {
            "kind": "llm",
            "architecture": "llama",
            "config": TEXT,
            "lora": {"r": 64, "target_modules": "all-linear"},
        },
    },
    "adapters with dropout, and parts that are trained whole": {
        "eye": {
            "kind": "encoder",
            "architecture": "clip_vision_model",
            "config": IMAGE,
            "lora": {"r": 16, "lora_dropout": 0.1, "target_modules": ["q_proj", "fc2"]},
        },
        "llm": {
            "kind": "llm",
            "architecture": "llama",
            "config": TEXT,
            "lora": {
                "r": 64,
                "lora_dropout": 0.05,
                "target_modules": ["q_proj", "v_proj", "down_proj"],
                "modules_to_save": ["embed_tokens", "lm_head", "gate_proj"],
            },
        },
    },
    "internvl": {
        "eye": {
            "kind": "encoder",
            "architecture": "internvl_vision",
            "merge": 2,
            "projector": "norm_mlp",
            "config": IMAGE
            | {"norm_type": "rms_norm", "use_qk_norm": True, "image_size": 448, "patch_size": 14},
        },
        "llm": {"kind": "llm", "architecture": "qwen2", "config": TEXT},
    },
    "idefics3": {
        "eye": {
            "kind": "encoder",
            "architecture": "idefics3_vision",
            "merge": 3,
            "projector": "linear",
            "config": IMAGE,
        },
        "llm": {"kind": "llm", "architecture": "llama", "config": TEXT},
    },
    "siglip, mistral, pixart": {
        "eye": {"kind": "encoder", "architecture": "siglip_vision_model", "config": IMAGE},
        "llm": {
            "kind": "llm",
            "architecture": "mistral",
            "config": TEXT | {"sliding_window": 1024},
        },
        "brush": {
            "kind": "generator",
            "architecture": "pixart",
            "image_size": 512,
            "context_tokens": 120,
            "cached_latents": True,
            "config": PIXART,
            "vae": VAE,
        },
    },
    "siglip, llama, sd3.5": {
        "eye": {"kind": "encoder", "architecture": "siglip_vision_model", "config": IMAGE},
        "llm": {"kind": "llm", "architecture": "llama", "config": TEXT},
        "brush": {
            "kind": "generator",
            "architecture": "sd3",
            "image_size": 512,
            "context_tokens": 120,
            "cached_latents": True,
            "noise": {"density": "logit_normal", "shift": 3.0},
            "config": SD35,
            "vae": VAE | {"latent_channels": 16},
        },
    },
    "clip, llama, flux": {
        "eye": {"kind": "encoder", "architecture": "clip_vision_model", "config": IMAGE},
        "llm": {"kind": "llm", "architecture": "llama", "config": TEXT},
        "brush": {
            "kind": "generator",
            "architecture": "flux",
            "image_size": 512,
            "context_tokens": 120,
            "cached_latents": True,
            "config": {"num_layers": 1, "num_single_layers": 1, "guidance_embeds": True},
            "vae": VAE | {"latent_channels": 16},
        },
    },
    "clip, llama, lumina2": {
        "eye": {"kind": "encoder", "architecture": "clip_vision_model", "config": IMAGE},
        "llm": {"kind": "llm", "architecture": "llama", "config": TEXT},
        "brush": {
            "kind": "generator",
            "architecture": "lumina2",
            "image_size": 512,
            "context_tokens": 120,
            "cached_latents": True,
            "config": {"num_layers": 1, "num_refiner_layers": 1, "cap_feat_dim": 2304},
            "vae": VAE | {"latent_channels": 16},
        },
    },
    "clip, qwen3, sdxl": {
        "eye": {"kind": "encoder", "architecture": "clip_vision_model", "config": IMAGE},
        "llm": {"kind": "llm", "architecture": "qwen3", "config": TEXT | {"head_dim": 128}},
        "brush": {
            "kind": "generator",
            "architecture": "unet2d_condition",
            "image_size": 512,
            "context_tokens": 77,
            "cached_latents": True,
            "config": SDXL,
            "vae": VAE,
        },
    },
}
SIZES: dict[str, dict[str, Any]] = {"audio": {"audio": 4}, "target": {"target": 4}}
#: The most that priced and executed may be apart, and bytes that no share is asked of.
MOST, FEW = 0.03, 1 << 16
FIGURES = (
    "kept",
    "recomputed_kept",
    "forward_kernels",
    "backward_kernels",
    "forward_flops",
    "backward_flops",
)


def run_file(folder: Path, name: str) -> Path:
    path = folder / f"{name}.yaml"
    if name in OTHERS:
        text = yaml.safe_dump(
            {
                "name": "t",
                "model": {"modules": OTHERS[name]},
                "cluster": {"nodes": 1, "gpus_per_node": 8},
                "data": {
                    "distribution": {
                        "images_per_sequence": 2,
                        "generated_per_sequence": 2,
                        "sequences": 300,
                    },
                    "sequence_length": 4096,
                    "max_image_pixels": 1 << 20,
                },
                "train": {"global_batch_size": 8, "steps": 1, "precision": "bf16"},
            }
        )
    else:
        text = preset_text(name)
    path.write_text(text)
    return path


def cases_of(path: Path) -> list[list[Any]]:
    """Every kind of layer of a run's model at TP 1 and, where it can be divided, 4."""
    run = read_run(path)
    inputs, seen, found = describe(run), set(), []
    for place, info in enumerate(layer_table(run)):
        if (info.module, info.kind) in seen:
            continue
        seen.add((info.module, info.kind))
        item, length = inputs.item(info.module), inputs.sequence_length
        sizes = SIZES.get(item) or {
            "documents": [[length // 2, length // 4, length // 4]],
            "length": length,
        }
        if item == "image" or info.kind == "block.deepstack":
            m = inputs.images[0].period * inputs.images[0].merge
            side = -(-24 // m) * m
            images = {"image": [(side, side - m), (side, side - m), (side, 2 * side)]}
            sizes = images if item == "image" else sizes | images
        found += [
            [str(path), place, tp, sizes] for tp in (1, 4) if tp in tp_degrees(run, info.module, 8)
        ]
    return found


def priced(path: str, place: int, tp: int, sizes: dict[str, Any]) -> dict[str, float]:
    run = read_run(Path(path))
    dtype = torch.bfloat16 if run.file.train.precision == "bf16" else torch.float32
    table, inputs = layer_table(run), describe(run)
    info = table[place]
    layer = build_layers(run, place, place + 1, "meta", dtype, tp=tp)[0]
    join(layer, Group(None, tp, 0) if tp > 1 else None)
    layer.ask_for_gradients()
    batch = probe_batch(inputs, device="meta", **sizes)
    found = layer_operators(
        layer, state_at(table, place, inputs, batch, "meta", dtype, tp=tp), batch
    )
    fixed = {name: value for name, value in sizes.items() if name != "length"}
    works = {
        name: probe_work(inputs, name, **fixed) if info.kind == "block.deepstack" else Work()
        for name in run.file.model.order
    }
    amount = input_bytes(info, table, inputs, works, dtype.itemsize, tp=tp)
    tokens = works[info.module].tokens or sum(
        rows * columns for rows, columns in sizes.get("image", [])
    )
    items = next(len(value) if isinstance(value, list) else value for value in sizes.values())
    forward, backward = found.forward, found.backward
    return {
        "kept": found.saved_bytes,
        "recomputed_kept": amount(Work(items, tokens, 0.0)),
        "forward_kernels": forward.kernels,
        "backward_kernels": backward.kernels,
        "forward_flops": sum(forward[:3]),
        "backward_flops": sum(backward[:3]),
    }


def compared(folder: Path, wanted: Mapping[str, str | tuple[str, ...]]) -> list[dict[str, Any]]:
    """Both, of the layers of some models by the ends of their names; an empty end is that of
    all."""
    rows: list[dict[str, Any]] = []
    cases: list[list[Any]] = []
    for name, ends in wanted.items():
        path = run_file(folder, name)
        table = layer_table(read_run(path))
        for case in cases_of(path):
            if table[case[1]].name.endswith(ends):
                cases.append(case)
                rows.append(
                    {
                        "model": name,
                        "layer": table[case[1]].name,
                        "tp": case[2],
                        "priced": priced(*case),
                    }
                )
    for row, ran in zip(rows, on_fake_cuda(executed, cases), strict=True):
        row["ran"] = ran
    return rows


def off(row: dict[str, Any], figure: str) -> float:
    """How far the priced figure is from the executed one, as a share of the latter."""
    ran, price = row["ran"][figure], row["priced"][figure]
    if "kept" in figure and max(ran, price) <= FEW:
        return 0.0
    return abs(price - ran) / ran if ran else float(price > 0)


def check(rows: list[dict[str, Any]]) -> None:
    apart = {
        (row["model"], row["layer"], row["tp"], figure): (row["priced"][figure], row["ran"][figure])
        for row in rows
        for figure in FIGURES
        if off(row, figure) > MOST
    }
    assert not apart


@pytest.mark.slow
def test_what_layers_keep_and_run_is_what_they_are_priced_at(tmp_path: Path) -> None:
    check(
        compared(
            tmp_path,
            {
                "tiny": (
                    "image_encoder.block.0",
                    "llm.block.0",
                    "llm.head",
                    "image_generator.down.0",
                ),
                "adapters": ("llm.block.0",),
            },
        )
    )


@pytest.mark.slow
def test_every_layer_keeps_and_runs_what_it_is_priced_at(tmp_path: Path) -> None:
    rows = compared(tmp_path, PRESETS | dict.fromkeys(OTHERS, ""))
    assert len(rows) > 100 and {row["tp"] for row in rows} == {1, 4}
    check(rows)
