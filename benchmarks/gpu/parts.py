"""The parts, in the order in which they run, and the seconds that each may take."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from benchmarks.gpu import jobs, modules
from benchmarks.gpu.setting import Figures, Setting
from disttrain_cli.models.host import use_cuda


def block(setting: Setting, preset: str) -> None:
    """One LLM block on one packed sequence of three documents."""
    run = setting.run_of(preset)
    length = run.file.data.sequence_length
    documents = [[length // 2, length // 4, length // 4]]
    layers = modules.layers_of(setting, run, "llm", {"documents": documents}, "block")
    config: Any = run.file.model.modules["llm"].config
    setting.tell("attention", modules.attention_kernel(setting, config["hidden_size"] // config["num_attention_heads"]))
    setting.tell("documents", documents)
    modules.measured(setting, "packed", layers)
    layers = modules.layers_of(setting, run, "llm", {"documents": [[length]]}, "block")
    modules.measured(setting, "one_document", layers)
    setting.tell("kernels", modules.kernels(setting, layers))


def head(setting: Setting) -> None:
    """The LLM's last layer with its loss by chunks: its logits are never whole in fp32."""
    run = setting.run_of("mllm-9b")
    layers = modules.layers_of(setting, run, "llm", {"documents": [[run.file.data.sequence_length]]}, "head")
    modules.measured(setting, "head", layers)


def vit(setting: Setting) -> None:
    """The image encoder on eight images; then on images of another shape, whose first call may cost more."""
    run = setting.run_of("mllm-9b")
    side = 4 if setting.small else 36  # 512 × 512 in patches of 14, merged by twos
    for name, grid in (("square", (side, side)), ("wide", (side // 2, 2 * side))):
        layers = modules.layers_of(setting, run, "image_encoder", {"grids": [grid] * 8})
        modules.measured(setting, name, layers)
    setting.tell("kernels", modules.kernels(setting, layers))


def unet(setting: Setting) -> None:
    """The image generator, its VAE among it, on eight images: channels first, then last."""
    run = setting.run_of("mllm-9b")
    layers = modules.layers_of(setting, run, "image_generator", {"targets": 2 if setting.small else 8})
    modules.measured(setting, "channels_first", layers)
    setting.tell("kernels_channels_first", modules.kernels(setting, layers))
    modules.channels_last(layers.built)
    modules.measured(setting, "channels_last", layers)
    setting.tell("kernels_channels_last", modules.kernels(setting, layers))


def curve(setting: Setting) -> None:
    """What kernels reach of the device's peaks: an entry for `curves` in templates/hardware.yaml."""
    from benchmarks import efficiency

    known = efficiency.lookup("NVIDIA H100 80GB HBM3" if setting.small else torch.cuda.get_device_name())
    found = efficiency.measure(setting.device, known, small=setting.small)
    setting.tell("curve", found)
    setting.tell("proposed", efficiency.entry(known.curve, found).splitlines())


class Part(NamedTuple):
    """What to run, and for how many seconds at most."""

    run: Callable[[Setting], None]
    limit_s: float


PARTS: dict[str, Part] = {
    "tests": Part(jobs.pytest, 40.0),
    "block_7b": Part(lambda setting: block(setting, "mllm-9b"), 45.0),
    "head": Part(head, 25.0),
    "vit": Part(vit, 30.0),
    "unet": Part(unet, 60.0),
    "chain": Part(jobs.chain, 100.0),
    "shared": Part(jobs.shared, 50.0),
    "large": Part(jobs.large, 130.0),
    "block_70b": Part(lambda setting: block(setting, "mllm-72b"), 45.0),
    "curve": Part(curve, 25.0),
}


def run_part(name: str, setting: Setting) -> Figures:
    """Run one part in this process."""
    if setting.kind == "cuda":
        use_cuda(0)
    PARTS[name].run(setting)
    return setting.figures
