"""What each part does."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from benchmarks.gpu import jobs, modules
from benchmarks.gpu import nccl as layouts
from benchmarks.gpu.collectives import collectives
from benchmarks.gpu.setting import Figures, Setting
from disttrain_cli.models.host import use_cuda


def block(setting: Setting, preset: str) -> None:
    """One LLM block on one packed sequence of three documents."""
    run = setting.run_of(preset)
    length = run.file.data.sequence_length
    documents = [[length // 2, length // 4, length // 4]]
    layers = modules.layers_of(setting, run, "llm", {"documents": documents}, "block")
    config: Any = run.file.model.modules["llm"].config
    setting.tell(
        "attention",
        modules.attention_kernel(setting, config["hidden_size"] // config["num_attention_heads"]),
    )
    setting.tell("documents", documents)
    modules.measured(setting, "packed", layers)
    layers = modules.layers_of(setting, run, "llm", {"documents": [[length]]}, "block")
    modules.measured(setting, "one_document", layers)
    setting.tell("kernels", modules.kernels(setting, layers))


def head(setting: Setting) -> None:
    """The LLM's last layer with its loss by chunks: its logits are never whole in fp32."""
    run = setting.run_of("mllm-9b")
    layers = modules.layers_of(
        setting, run, "llm", {"documents": [[run.file.data.sequence_length]]}, "head"
    )
    modules.measured(setting, "head", layers)


def vit(setting: Setting) -> None:
    """The image encoder on eight images; then on images of another shape, whose first call may cost
    more."""
    run = setting.run_of("mllm-9b")
    side = 4 if setting.small else 36  # 512 × 512 in patches of 14, merged by twos
    for name, grid in (("square", (side, side)), ("wide", (side // 2, 2 * side))):
        layers = modules.layers_of(setting, run, "image_encoder", {"image": [grid] * 8})
        modules.measured(setting, name, layers)
    setting.tell("kernels", modules.kernels(setting, layers))


def unet(setting: Setting) -> None:
    """The image generator and its VAE on eight images."""
    run = setting.run_of("mllm-9b")
    layers = modules.layers_of(
        setting, run, "image_generator", {"target": 2 if setting.small else 8}
    )
    modules.measured(setting, "generator", layers)
    setting.tell("kernels", modules.kernels(setting, layers))


def curve(setting: Setting) -> None:
    """What kernels reach of the device's peaks, in bursts and under full load: an entry for
    `curves` in templates/hardware.yaml."""
    from benchmarks import efficiency

    known = efficiency.lookup(
        "NVIDIA H100 80GB HBM3" if setting.small else torch.cuda.get_device_name()
    )
    found = efficiency.measure(setting.device, known, small=setting.small)
    setting.tell("curve", found)
    setting.tell("proposed", efficiency.entry(known.curve, found).splitlines())


PARTS: dict[str, Callable[[Setting], None]] = {
    "tests": jobs.pytest,
    "collectives": collectives,
    "nccl": layouts.nccl,
    "block_7b": partial(block, preset="mllm-9b"),
    "head": head,
    "vit": vit,
    "unet": unet,
    "chain": jobs.chain,
    "shared": jobs.shared,
    "large": jobs.large,
    "multimodal": jobs.multimodal,
    "block_70b": partial(block, preset="mllm-72b"),
    "curve": curve,
}


def run_part(name: str, setting: Setting) -> Figures:
    """Run one part in this process."""
    if setting.kind == "cuda":
        use_cuda(0)
    PARTS[name](setting)
    return setting.figures
