"""The package's extras: requirement, purpose, and the command that installs each."""

from __future__ import annotations

import re
import shlex
from importlib.util import find_spec
from typing import NamedTuple


class Extra(NamedTuple):
    """One extra of `pyproject.toml`."""

    requirement: str
    module: str
    gives: str

    @property
    def installed(self) -> bool:
        """True if its package is installed and its module can be found.

        Other packages have modules of the same name: FlashAttention 2 and 4 are both `flash_attn`.
        """
        from importlib.metadata import PackageNotFoundError, version  # 20 ms

        try:
            version(re.split(r"[<>=]", self.requirement)[0])
        except PackageNotFoundError:
            return False
        return find_spec(self.module) is not None


EXTRAS = {
    "demo": Extra("scikit-learn>=1.5", "sklearn", "sample data, and the judge of what is drawn"),
    "audio": Extra("soundfile>=0.13", "soundfile", "audio clips in data.sources"),
    "video": Extra("av>=14", "av", "videos in data.sources"),
    "http": Extra("aiohttp>=3.10", "aiohttp", "data.sources at http:// and https://"),
    "tensorboard": Extra("tensorboard>=2.18", "tensorboard", "train.track: [tensorboard]"),
    "wandb": Extra("wandb>=0.20", "wandb", "train.track: [wandb]"),
    "adapters": Extra("peft>=0.17", "peft", "exported adapters loaded and merged by peft"),
    "flash": Extra(
        "flash-attn-4>=4.0.0b36,<4.1", "flash_attn", "FlashAttention 4 on Hopper and Blackwell GPUs"
    ),
    "recurrent": Extra(
        "flash-linear-attention>=0.5", "fla", "kernels of Gated DeltaNet and KDA layers on GPUs"
    ),
    "generate": Extra(
        "torchvision>=0.26,<0.29",
        "torchvision",
        "transformers' processors of exported Qwen-VL, InternVL and SmolVLM folders",
    ),
}


def install_command(name: str) -> str:
    """Return the command that installs an extra's packages; torchvision as torch needs it."""
    words = _torchvision() if name == "generate" else [EXTRAS[name].requirement]
    return shlex.join(["python", "-m", "pip", "install", *words])


def _torchvision() -> list[str]:
    """Return pip's arguments for the torchvision that matches torch.

    torchvision 0.N is built for torch 2.(N - 15), each build of it for the same build.
    """
    from importlib.metadata import PackageNotFoundError, version  # 20 ms

    try:
        release, _, build = version("torch").partition("+")
    except PackageNotFoundError:
        return [EXTRAS["generate"].requirement]
    minor = int(release.split(".")[1]) + 15
    index = f"https://download.pytorch.org/whl/{build}"
    return [f"torchvision==0.{minor}.*", *(["--index-url", index] if build else [])]
