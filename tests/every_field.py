"""Run files drawn from the schema: every documented field gets a value, valid together and small
enough for a CPU.

Values come from a field's type and bounds. `RANGES` narrows what would be too large, or means
something only together with other fields; a new field of the run file needs nothing here unless it
is such a one.
"""

import random
import typing
from collections.abc import Collection, Iterable, Iterator
from types import UnionType
from typing import Any

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from disttrain_cli.models.architectures import architectures
from disttrain_cli.models.configs.noise import FLOWS as FLOW_MODELS
from disttrain_cli.spec.runfile import RunFile
from disttrain_cli.spec.runfile.model import NoiseSpec
from disttrain_cli.spec.runfile.train import ModuleOptimizerSpec
from tests.models.conftest import LLAMA, MROPE, UNET
from tests.models.test_towers import TOWERS
from tests.models.test_weights import FLUX, LUMINA2, SD3

PIXART = {
    "num_attention_heads": 2,
    "attention_head_dim": 12,
    "in_channels": 3,
    "out_channels": 6,
    "num_layers": 1,
    "cross_attention_dim": 24,
    "caption_channels": 20,
}
VAE = {
    "block_out_channels": [8, 8],
    "down_block_types": ["DownEncoderBlock2D"] * 2,
    "up_block_types": ["UpDecoderBlock2D"] * 2,
    "norm_num_groups": 4,
    "latent_channels": 3,
}
SMALL = {
    "num_hidden_layers": 1,
    "depth": 2,
    "out_hidden_size": 48,
    "deepstack_visual_indexes": [0],
}
EXTRA = {"qwen2_5_vl_text": MROPE, "qwen3_vl_text": MROPE | {"head_dim": 12}}
LORA = {
    "r": 3,
    "lora_alpha": 6,
    "use_rslora": True,
    "target_modules": ["v_proj", "mlp.up_proj"],
    "modules_to_save": ["norm"],
    "lora_dropout": 0.1,
}
#: Small configurations of classes, with every kind of dropout that they have.
CONFIGS: dict[str, dict[str, dict[str, Any]]] = {
    "encoder": {
        name: tower["config"]
        | {k: v for k, v in SMALL.items() if k in tower["config"]}
        | ({"hidden_dropout_prob": 0.1} if name == "vit" else {})
        for name, tower in TOWERS.items()
    },
    "llm": {
        name: LLAMA | {"num_hidden_layers": 1} | EXTRA.get(name, {})
        for name in ("llama", "mistral", "qwen2", "qwen3", "qwen2_5_vl_text", "qwen3_vl_text")
    },
    "generator": {
        "unet2d_condition": UNET | {"dropout": 0.1},
        "pixart": PIXART | {"dropout": 0.2},
        "sd3": SD3 | {"num_layers": 1},
        "flux": FLUX,
        "lumina2": LUMINA2,
    },
}
#: Fields of a flow's noise.
FLOWS = ("density", "logit_mean", "logit_std", "mode_scale", "shift")
NAMES = {"encoder": "eye", "llm": "llm", "generator": "hand"}

#: Field → values to choose from, or a function of (random, what is drawn of the run file so far).
RANGES: dict[str, Any] = {
    "model.folder": lambda draw, file: None,
    "model.adapter": lambda draw, file: None,
    "name": ["drawn", "d.1_x-y"],
    "model.modules": lambda draw, file: {
        name: draw_module(draw, kind) for kind, name in NAMES.items()
    },
    "model.modules.*.noise.beta_start": [1e-4, None],
    "model.modules.*.noise.beta_end": [0.03, 0.2],
    "model.modules.*.noise.timesteps": [50, 4],
    "model.modules.*.noise.shift": [3.0, "resolution", None],
    "model.projector_hidden": [None, 20],
    "model.loss_weights.modules": [{"hand": 0.25}, {}],
    "model.trained": [["projectors", "hand"], ["eye", "llm"], None],
    "data.sources.*.path": ["data/interleaved"],
    "data.sources.*.images": [None],
    "data.sources.*.text": lambda draw, file: None,
    "data.sources.*.name": ["shown"],
    "data.curriculum.*.step": [1],
    "data.curriculum.*.weights": [{"shown": 2.5}, {"shown": 0.5}],
    "data.tokenizer": ["bytes"],
    "data.sequence_length": [160, 192],
    "data.max_image_pixels": [2048, 4096],
    "data.max_bad_fraction": [0.5, 0.6],
    "data.held_out": [0.2, 0.3],
    "data.deduplicate": [True],
    "data.distribution": [None],
    "cluster.nodes": [1],
    "cluster.ranks_per_gpu": lambda draw, file: 1,
    "cluster.flash_attention": lambda draw, file: "auto",
    "cluster.gpus_per_node": [2],
    "cluster.device": ["cpu"],
    "cluster.memory_gib": [4.0, None],
    "cluster.memory_margin_gib": lambda draw, file: 0.25,
    "cluster.peak_tflops": [0.05, None],
    "cluster.node_cores": [64, None],
    "cluster.cpu_node_cores": [4, 64],
    "cluster.cpu_nodes": [0],
    "cluster.price_per_gpu_hour": [0.5, {"cpu": 0.5}],
    "cluster.hostfile": [None],
    "cluster.kubernetes": lambda draw, file: {},
    "cluster.skypilot": lambda draw, file: {},
    "cluster.interface": [None, "lo"],
    "cluster.port": [23456, 29501],
    "cluster.slurm.partition": ["gpu"],
    "cluster.slurm.cpu_partition": ["cpu"],
    "cluster.slurm.account": ["me"],
    "cluster.slurm.qos": ["high"],
    "cluster.slurm.time": ["1-02:00:00", "30"],
    "cluster.slurm.setup": [None],
    "cluster.slurm.mem": lambda draw, file: "500G",
    "cluster.slurm.options": [["--exclusive"], []],
    "train.optimizer.lr": [1e-3, 1e-2],
    "train.optimizer.modules.*.lr": [0.0, 2e-3],
    "train.global_batch_size": [2, 4],
    "train.steps": [2],
    "train.epochs": lambda draw, file: None,
    "train.optimizer.betas": [[0.8, 0.99], [0.9, 0.999]],
    "train.precision": lambda draw, file: draw.choice(["fp32", "fp32", "bf16"]),
    "train.zero_stage": lambda draw, file: draw.choice(
        [1, "auto"] + [0] * (file["train"]["precision"] == "fp32")
    ),
    "train.optimizer.modules": lambda draw, file: {
        name: draw_section(draw, ModuleOptimizerSpec, "train.optimizer.modules.*.", {}, file)
        for name in ("projectors", "llm")
    },
    "train.ema.modules": [["hand"], ["hand", "llm"]],
    "train.evaluation.every_steps": [1, 2],
    "train.evaluation.sequences": [2, 3],
    "train.evaluation.keep_best": lambda draw, file: True,
    "train.evaluation.stop_after": lambda draw, file: 2,
    "train.timeout_s": [120.0],
    "train.hang_s": [100.0],
    "train.seed": [7, 2**31],
    "train.track": [[], ["tensorboard"]],
    "train.restarts": [1, 2],
    "train.on_straggler": lambda draw, file: "tell",  # `--emit` refuses the other
    "preprocess.workers": [2, 1],
    "preprocess.prefetch_slots": [1, 3],
    "preprocess.addresses": [[]],
    "preprocess.tls_ca": [None],
    "preprocess.token_file": [None],
    "preprocess.tls_cert": [None],
    "preprocess.tls_key": [None],
    "samples.images": [1, 2],
    "samples.denoising_steps": [2, 3],
    "samples.prompts": [["Draw a seven.", "Draw a two."], []],
    "samples.read": [1, 2],
    "samples.answers": [1, 2],
    "samples.during": lambda draw, file: 0,
    "samples.metrics": lambda draw, file: ["exact_match"],
    "samples.judge": lambda draw, file: (
        draw.choice(["digits"]) if draw.choice([True, False]) else None
    ),
    "rehearse.steps": [1, 2],
    "rehearse.time_scale": [0.5, "auto"],
    "rehearse.gpus_per_process": [1, "auto"],
    "rehearse.faults": lambda draw, file: [],
    "rehearse.lost": lambda draw, file: [],
    "data.video": lambda draw, file: None,
    "rehearse.distribution": [None],
}
#: What a run on one machine without other services cannot use; where it is tried.
ELSEWHERE = {
    "model.modules.*.buckets": "tests/runtime/test_buckets.py",
    "data.distribution": "tests/commands/test_plan.py",
    "data.sources.*.images": "tests/data/sources/test_llava.py",
    "data.sources.*.text": "tests/data/test_turn_forms.py",
    "data.tokenizer": "tests/data/test_tokenizer.py",
    "data.video": "tests/test_video_chain.py",
    "cluster.nodes": "tests/runtime/launching/test_emit.py",
    "cluster.ranks_per_gpu": "tests/runtime/launching/test_devices.py",
    "cluster.flash_attention": "tests/models/test_flash4.py",
    "cluster.device": "tests/commands/test_profile.py",
    "cluster.cpu_nodes": "tests/runtime/launching/test_emit.py",
    "cluster.hostfile": "tests/runtime/launching/test_emit.py",
    "cluster.kubernetes": "tests/runtime/launching/test_containers.py",
    "cluster.skypilot": "tests/runtime/launching/test_containers.py",
    "cluster.slurm.setup": "tests/runtime/launching/test_emit.py",
    "preprocess.addresses": "tests/runtime/test_data_service.py",
    "preprocess.tls_ca": "tests/runtime/test_data_service.py",
    "preprocess.token_file": "tests/runtime/test_data_service.py",
    "preprocess.tls_cert": "tests/runtime/launching/test_emit.py",
    "preprocess.tls_key": "tests/runtime/launching/test_emit.py",
    "train.epochs": "tests/commands/test_profile.py",
    "train.on_straggler": "tests/mitigation/test_replanning.py",
    "samples.during": "tests/runtime/outputs/test_during.py",
    "rehearse.faults": "tests/runtime/rehearsal/test_rehearse.py",
    "rehearse.lost": "tests/mitigation/test_replanning.py",
    "rehearse.distribution": "tests/runtime/rehearsal/test_rehearse.py",
    "model.folder": "tests/models/test_whole.py",
    "model.adapter": "tests/runtime/outputs/test_adapters.py",
    "model.modules.*.folder": "tests/models/test_weights.py",
    "model.modules.*.vae_folder": "tests/models/test_vae.py",
    "model.modules.*.lora.folder": "tests/runtime/outputs/test_adapters.py",
    "model.modules.*.cached_latents": "tests/runtime/test_latents.py",
    "version": "it has one value",
}


def spec_of(annotation: Any) -> type[BaseModel] | None:
    """The section that a field holds: itself, in a list, as values of a mapping, or None."""
    for one in (annotation, *typing.get_args(annotation)):
        if isinstance(one, type) and issubclass(one, BaseModel):
            return one
    return None


def fields(spec: type[BaseModel] = RunFile, path: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Every field of the run file by its path, sections too; `*` stands for a name or a place in a
    list."""
    for name, field in spec.model_fields.items():
        own = f"{path}{name}"
        yield own, field
        inner = spec_of(field.annotation)
        if inner is not None:
            many = typing.get_origin(field.annotation) in (list, dict)
            yield from fields(inner, f"{own}.{'*.' if many else ''}")


def draw_run_file(seed: int, absent: Collection[str] = ()) -> dict[str, Any]:
    """A run file; the sections in `absent`, which must be optional, are left out."""
    file: dict[str, Any] = {}
    draw_section(random.Random(seed), RunFile, "", file, file, absent)
    return file


def draw_section(
    draw: random.Random,
    spec: type[BaseModel],
    path: str,
    section: dict[str, Any],
    file: dict[str, Any],
    absent: Collection[str] = (),
) -> dict[str, Any]:
    """Fill a section of a run file, of which `file` is drawn so far, field by field."""
    for name, field in spec.model_fields.items():
        own, inner = f"{path}{name}", spec_of(field.annotation)
        if own in absent:
            section[name] = None
        elif own in RANGES:
            section[name] = (
                RANGES[own](draw, file) if callable(RANGES[own]) else draw.choice(RANGES[own])
            )
        elif inner is None:
            section[name] = draw_plain(draw, field.annotation, field.metadata)
        elif typing.get_origin(field.annotation) is list:
            section[name] = [draw_section(draw, inner, f"{own}.*.", {}, file, absent)]
        else:
            section[name] = {}
            draw_section(draw, inner, f"{own}.", section[name], file, absent)
    return section


def draw_module(draw: random.Random, kind: str) -> dict[str, Any]:
    """A module of a kind, of any class; fields that go together only in some ways, field by
    field."""
    architecture = draw.choice(sorted(CONFIGS[kind]))
    module: dict[str, Any] = {
        "kind": kind,
        "architecture": architecture,
        "config": dict(CONFIGS[kind][architecture]),
        "pretrained": draw.random() < 0.5,
    }
    if kind == "encoder":
        module |= {"projector": draw.choice(architectures()[architecture].projectors)}
    if kind == "encoder" and "_vl_" not in architecture:
        module |= {"merge": 2, "feature_layer": draw.choice([None, -1])}
    if architecture.startswith("qwen") and kind == "llm":
        module["lora"] = dict(LORA)
    if kind == "generator":
        noise = draw_section(draw, NoiseSpec, "model.modules.*.noise.", {}, {})
        noise["prediction"] = "flow" if architecture in FLOW_MODELS else noise["prediction"]
        own = {"logit_normal": ("logit_mean", "logit_std"), "mode": ("mode_scale",)}
        flows = ("density", "shift", *own.get(noise["density"], ()))
        kept = flows if noise["prediction"] == "flow" else ()
        noise |= dict.fromkeys({*FLOWS} - {*kept})
        module |= {
            "image_size": 16,
            "context_tokens": draw.choice([2, 4]),
            "noise": noise,
            "vae": draw.choice([None, dict(VAE)]),
        }
    return module


def draw_plain(draw: random.Random, annotation: Any, metadata: Iterable[Any]) -> Any:
    """A value of a type within bounds, of moderate size."""
    if typing.get_origin(annotation) in (typing.Union, UnionType):
        return draw_plain(draw, draw.choice(typing.get_args(annotation)), metadata)
    if typing.get_origin(annotation) is typing.Literal:
        return draw.choice(typing.get_args(annotation))
    if annotation is type(None):
        return None
    if annotation is bool:
        return draw.random() < 0.5
    assert annotation in (int, float), f"RANGES must say what to draw of {annotation}"
    low = next(
        (
            getattr(one, "ge", None) or getattr(one, "gt", 0)
            for one in metadata
            if isinstance(one, Ge | Gt)
        ),
        0,
    )
    high = next(
        (
            getattr(one, "le", None) or getattr(one, "lt", 0)
            for one in metadata
            if isinstance(one, Le | Lt)
        ),
        low + 2,
    )
    high = min(high, low + 2)
    return (
        draw.randint(int(low), int(high))
        if annotation is int
        else low + (high - low) * draw.uniform(0.1, 0.9)
    )
