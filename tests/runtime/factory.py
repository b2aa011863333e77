"""Small runs and hand-made plans for the runtime's tests."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from disttrain_cli.data.indexing.building import build_index
from disttrain_cli.models.graph import describe, layer_table
from disttrain_cli.runtime.hooks import Step
from disttrain_cli.spec.plan import Layout, Plan, Search, UnitPlan
from disttrain_cli.spec.prediction import Prediction
from disttrain_cli.spec.profile import Fingerprints, Profile
from disttrain_cli.spec.runfile import Run, read_run
from tests.commands.conftest import make_profile

MODEL: dict[str, Any] = {
    "modules": {
        "image_encoder": {
            "kind": "encoder",
            "architecture": "vit",
            "merge": 2,
            "config": {
                "hidden_size": 32,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "intermediate_size": 64,
                "image_size": 64,
                "patch_size": 8,
            },
        },
        "llm": {
            "kind": "llm",
            "architecture": "llama",
            "config": {
                "hidden_size": 48,
                "num_hidden_layers": 3,
                "num_attention_heads": 8,
                "num_key_value_heads": 4,
                "intermediate_size": 96,
                "vocab_size": 272,
                "max_position_embeddings": 512,
            },
        },
        "image_generator": {
            "kind": "generator",
            "architecture": "unet2d_condition",
            "image_size": 16,
            "context_tokens": 4,
            "config": {
                "block_out_channels": [16, 32],
                "layers_per_block": 1,
                "norm_num_groups": 8,
                "cross_attention_dim": 32,
                "attention_head_dim": 8,
                "in_channels": 3,
                "out_channels": 3,
                "sample_size": 16,
                "down_block_types": ["DownBlock2D", "CrossAttnDownBlock2D"],
                "up_block_types": ["CrossAttnUpBlock2D", "UpBlock2D"],
            },
        },
    },
    "loss_weights": {"text": 1.0, "image": 0.5},
}

#: A diffusion transformer in the latent space of a VAE, beside the tests' U-Net over pixels; of
#: another size.
REFINER: dict[str, Any] = {
    "kind": "generator",
    "architecture": "pixart",
    "image_size": 24,
    "context_tokens": 4,
    "config": {
        "num_attention_heads": 4,
        "attention_head_dim": 12,
        "in_channels": 4,
        "out_channels": 8,
        "num_layers": 2,
        "cross_attention_dim": 48,
        "caption_channels": 20,
        "use_additional_conditions": True,
        "dropout": 0.1,
    },
    "vae": {
        "block_out_channels": [8, 16],
        "layers_per_block": 1,
        "latent_channels": 4,
        "norm_num_groups": 4,
        "down_block_types": ["DownEncoderBlock2D", "DownEncoderBlock2D"],
        "up_block_types": ["UpDecoderBlock2D", "UpDecoderBlock2D"],
    },
}


#: A flow over joint attention in the latent space of the same VAE.
PAINTER: dict[str, Any] = REFINER | {
    "architecture": "sd3",
    "noise": {"density": "logit_normal", "shift": 3.0},
    "config": {
        "num_attention_heads": 4,
        "attention_head_dim": 12,
        "in_channels": 4,
        "out_channels": 4,
        "num_layers": 3,
        "joint_attention_dim": 20,
        "caption_projection_dim": 48,
        "pooled_projection_dim": 24,
        "pos_embed_max_size": 9,
        "qk_norm": "rms_norm",
        "dual_attention_layers": [0],
    },
    "vae": REFINER["vae"] | {"scaling_factor": 1.5, "shift_factor": 0.06},
}

#: One whose last blocks are of image and conditioning together, over pixels.
MURAL: dict[str, Any] = {
    "kind": "generator",
    "architecture": "flux",
    "image_size": 16,
    "context_tokens": 4,
    "config": {
        "num_attention_heads": 4,
        "attention_head_dim": 12,
        "in_channels": 12,
        "num_layers": 1,
        "num_single_layers": 2,
        "joint_attention_dim": 20,
        "pooled_projection_dim": 24,
        "axes_dims_rope": [2, 4, 6],
        "guidance_embeds": True,
    },
}

#: One that refines image and conditioning apart first, with fewer heads of keys and values.
FRESCO: dict[str, Any] = PAINTER | {
    "architecture": "lumina2",
    "config": {
        "hidden_size": 48,
        "num_attention_heads": 8,
        "num_kv_heads": 4,
        "in_channels": 4,
        "num_layers": 2,
        "num_refiner_layers": 1,
        "multiple_of": 16,
        "axes_dim_rope": [2, 2, 2],
        "axes_lens": [5, 6, 6],
        "cap_feat_dim": 20,
    },
}

#: Qwen-Image's, over pixels.
SCROLL: dict[str, Any] = MURAL | {
    "architecture": "qwen_image",
    "config": {
        "num_attention_heads": 4,
        "attention_head_dim": 12,
        "in_channels": 12,
        "out_channels": 3,
        "num_layers": 2,
        "joint_attention_dim": 20,
        "axes_dims_rope": [4, 4, 4],
    },
}

#: One that runs whole, in the latent space of a VAE that normalises them.
POSTER: dict[str, Any] = MURAL | {
    "architecture": "flux2",
    "config": {
        "num_attention_heads": 2,
        "attention_head_dim": 16,
        "in_channels": 16,
        "num_layers": 1,
        "num_single_layers": 1,
        "joint_attention_dim": 20,
        "timestep_guidance_channels": 8,
        "axes_dims_rope": [4, 4, 4, 4],
    },
    "vae": {
        "_class_name": "AutoencoderKLFlux2",
        "block_out_channels": [8, 16],
        "layers_per_block": 1,
        "norm_num_groups": 4,
        "latent_channels": 4,
        "down_block_types": ["DownEncoderBlock2D"] * 2,
        "up_block_types": ["UpDecoderBlock2D"] * 2,
    },
}


#: Adapters of every module, on all that can have some and on a few.
LORA: dict[str, dict[str, Any]] = {
    "image_encoder": {"r": 3, "lora_dropout": 0.2, "target_modules": ["q_proj", "o_proj", "fc1"]},
    "llm": {
        "r": 4,
        "lora_alpha": 16,
        "lora_dropout": 0.1,
        "target_modules": "all-linear",
        "modules_to_save": ["norm", "embed_tokens", "lm_head"],
    },
    "image_generator": {
        "r": 2,
        "use_rslora": True,
        "lora_dropout": 0.3,
        "target_modules": ["to_q", "to_out.0", "ff.net.0.proj", "ff.net.2", "time_emb_proj"],
    },
}


def write_run(
    folder: Path,
    data: Path,
    *,
    name: str = "test",
    modules: tuple[str, ...] = tuple(MODEL["modules"]),
    held_out: float = 0.0,
    tied: bool = False,
    lora: Mapping[str, dict[str, Any]] = {},
    **train: Any,
) -> Run:
    """A run file in `folder` over the sample data in `data`, with `lora` of modules; `train`
    overrides its training section."""
    known = MODEL["modules"] | {
        "refiner": REFINER,
        "painter": PAINTER,
        "mural": MURAL,
        "fresco": FRESCO,
        "scroll": SCROLL,
        "poster": POSTER,
    }
    if tied:
        llm = known["llm"]
        known = known | {"llm": llm | {"config": llm["config"] | {"tie_word_embeddings": True}}}
    adapted = {name: {"lora": spec} for name, spec in lora.items()}
    model = MODEL | {"modules": {key: known[key] | adapted.get(key, {}) for key in modules}}
    content = {
        "name": name,
        "model": model,
        "data": {
            "sources": [{"path": str(data / "interleaved")}, {"path": str(data / "captions")}],
            "sequence_length": 256,
            "max_image_pixels": 4096,
            "held_out": held_out,
        },
        "cluster": {"gpus_per_node": 6, "device": "cpu"},
        "train": {
            "global_batch_size": 6,
            "steps": 3,
            "precision": "fp32",
            "zero_stage": 0,
            "gradient_clipping": 0.5,
            "ordering": "none",
            "optimizer": {"lr": 1e-3, "eps": 1e-5, "weight_decay": 0.01},
        }
        | train,
    }
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "disttrain.yaml"
    path.write_text(yaml.safe_dump(content))
    return read_run(path)


def unit(name: str, modules: list[str], layers: list[int], dp: int = 1, tp: int = 1) -> UnitPlan:
    """A unit with one stage per entry of `layers`."""
    return UnitPlan(
        name=name,
        modules=modules,
        tp=tp,
        dp=dp,
        pp=len(layers),
        gpus=tp * dp * len(layers),
        layers_per_stage=layers,
    )


def plan_of(run: Run, units: list[UnitPlan], microbatch_size: int, overlap: bool = False) -> Plan:
    """A plan with these units and no prediction to speak of."""
    llm_dp = next(u.dp for u in units if "llm" in u.modules)
    batch = run.file.train.global_batch_size
    layout = Layout(
        global_batch_size=batch,
        microbatch_size=microbatch_size,
        microbatches=batch // (llm_dp * microbatch_size),
        gpus_used=sum(u.gpus for u in units),
        zero_stage=0 if run.file.train.zero_stage == 0 else 1,
        overlap=overlap,
        trained=run.file.model.trained,
        units=units,
    )
    layout.check_slots("llm")
    return Plan(
        fingerprints=Fingerprints(model="", data="", cluster=""),
        plan=layout,
        predicted=Prediction(
            iteration_s=1,
            sequences_per_s=1,
            mfu=0,
            warmup_s=0,
            steady_s=0,
            bubble_fraction=0,
            memory=[],
        ),
        search=Search(solve_s=0, candidates=1, exact=True),
    )


def make_job(folder: Path, data: Path, **changes: Any) -> tuple[Run, Plan, Profile]:
    """A run over three ranks, with a profile that claims a large machine."""
    run = write_run(folder, data, **changes)
    index = build_index(run, describe(run))
    modules = [info.module for info in layer_table(run)]
    plan = plan_of(
        run, [unit(name, [name], [modules.count(name)]) for name in dict.fromkeys(modules)], 3
    )
    profile = make_profile(run.file)
    device = profile.device.model_copy(update={"peak_tflops": 1000.0})
    fingerprints = profile.fingerprints.model_copy(update={"data": index.fingerprint})
    return (
        run,
        plan,
        profile.model_copy(
            update={"inputs": describe(run), "device": device, "fingerprints": fingerprints}
        ),
    )


def step_of(number: int, *, last: bool = False, **known: Any) -> Step:
    """A step as hooks see it, without an order."""
    order: Any = None
    return Step(number, order, last, updated=True, largest={}, start_ns=0, **known)
