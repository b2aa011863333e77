"""Folders of published weights: tensors by name, read one at a time, under any prefix.

A folder follows Hugging Face's layout: one safetensors file, or several with an index. Pickled
files are never opened. Names and forms are those of the installed library's class; what files hold
is converted by the library's own rules (`conversion`), and the prefix of a model that was saved
inside a larger one is inferred from the names.
"""

from __future__ import annotations

import copy
import shlex
from collections.abc import Collection, Iterable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from disttrain_cli.errors import SpecError
from disttrain_cli.models.architectures import architectures
from disttrain_cli.models.configs.decoders import published_class_of
from disttrain_cli.models.configs.vaes import CLASS, VAES
from disttrain_cli.models.conversion import Conversion, Conversions
from disttrain_cli.spec.files import parse_json
from disttrain_cli.spec.hub import fetch_weights

#: Files that transformers and diffusers write; an index with this name plus a suffix lists several
#: files.
SINGLE = ("model.safetensors", "diffusion_pytorch_model.safetensors")
_PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.bin.index.json")

POINTER = b"version https://git-lfs"  # first bytes of a pointer file


def weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files of a folder; empty if it holds no weights at all.

    For a model name on Hugging Face, missing files are downloaded.

    Raises:
        SpecError: the weights are pickled only, or files that the index names are missing, or
            pointers of Git LFS.
    """
    fetch_weights(folder)
    for name in SINGLE:
        if (folder / name).exists():
            return _no_pointers([folder / name])
        index = folder / f"{name}.index.json"
        if index.exists():
            return _no_pointers(_of_index(index))
    others = sorted(folder.glob("*.safetensors"))
    if len(others) == 1:
        return _no_pointers(others)
    if others:
        names = ", ".join(path.name for path in others)
        raise SpecError(
            f"{folder} holds several weight files and no index",
            f"given: {names}",
            f"Keep one of them, named {SINGLE[0]} or {SINGLE[1]}.",
        )
    pickled = sorted({path.name for pattern in _PICKLED for path in folder.glob(pattern)})
    if pickled:
        raise SpecError(
            f"The weights in {folder} are pickled, and pickled files are never opened",
            f"given: {', '.join(pickled)}; needed: {' or '.join(SINGLE)}",
            "Download the safetensors files, convert them with the library's own save_pretrained,"
            " or set pretrained: false.",
        )
    return []


def _no_pointers(files: list[Path]) -> list[Path]:
    """Return the same files; raise SpecError if one is a Git LFS pointer."""
    for path in files:
        with path.open("rb") as file:
            pointer = file.read(len(POINTER)) == POINTER
        if pointer:
            raise SpecError(
                f"{path} is a Git LFS pointer in place of the weights",
                next_step=f"Bring the files: git -C {shlex.quote(str(path.parent))} lfs pull",
            )
    return files


def _of_index(index: Path) -> list[Path]:
    described = parse_json(index, "index of weights", f"Download {index.parent} again.")
    named = described.get("weight_map") if isinstance(described, dict) else None
    if (
        not isinstance(named, dict)
        or not named
        or any(not isinstance(name, str) or "/" in name for name in named.values())
    ):
        raise SpecError(
            f"The index of weights {index} is damaged",
            "weight_map must name the file of every tensor",
            f"Download {index.parent} again.",
        )
    files = [index.parent / name for name in sorted(set(named.values()))]
    missing = [path.name for path in files if not path.exists()]
    if missing:
        raise SpecError(
            f"Weight files are missing in {index.parent}",
            f"{index.name} names {len(files)}, missing: {', '.join(missing)}",
            f"Download {index.parent} again.",
        )
    return files


class Weights:
    """Tensors of some safetensors files by name; a context manager that closes the files."""

    def __init__(self, files: Iterable[Path]) -> None:
        from safetensors import SafetensorError, safe_open

        self._stack = ExitStack()
        self._file_of: dict[str, tuple[Path, Any]] = {}
        for path in files:
            try:
                opened = self._stack.enter_context(safe_open(path, framework="pt"))
            except (OSError, SafetensorError) as error:
                raise SpecError(
                    f"The weight file {path} is {'damaged' if path.exists() else 'missing'}",
                    str(error),
                    "Download or export it again.",
                ) from None
            self._file_of |= dict.fromkeys(opened.keys(), (path, opened))

    def __enter__(self) -> Weights:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @property
    def names(self) -> Collection[str]:
        """Names of all tensors."""
        return self._file_of.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor, without reading it."""
        return tuple(self._file_of[name][1].get_slice(name).get_shape())

    def stored_as(self, name: str) -> str:
        """Return a tensor's dtype as safetensors names it: F32, BF16, I8 and others."""
        return str(self._file_of[name][1].get_slice(name).get_dtype())

    def read(self, name: str) -> Tensor:
        """Return one tensor."""
        tensor: Tensor = self._file_of[name][1].get_tensor(name)
        return tensor


@dataclass(frozen=True)
class Stored:
    """Tensor of a class as some files hold it.

    Attributes:
        name: in the class.
    """

    weights: Weights
    conversion: Conversion
    name: str

    @property
    def sources(self) -> tuple[str, ...]:
        """Names of the tensors in the files that it results from."""
        return self.conversion.sources

    @property
    def label(self) -> str:
        """Name in the files, for messages."""
        first, *_, last = self.sources if len(self.sources) > 1 else (*self.sources, "")
        return f"{first} … {last}" if last else first

    @property
    def shape(self) -> tuple[int, ...] | None:
        """Its shape, without reading it; None if the shapes in the files do not fit each other."""
        if self.conversion.rule is None:
            return self.weights.shape(self.sources[0])
        try:
            return self.conversion.shapes(self.weights.shape)[self.name]
        except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError):
            return None  # rules raise what torch does

    def read(self) -> Tensor:
        """Return the tensor."""
        return self.conversion(self.weights.read)[self.name]


@cache
def published_class(architecture: str) -> Any:
    """Return the library class that saves and loads an architecture or a whole model.

    Where no entry of ours names one, transformers does: of a `model_type` the class of the whole
    model with images or audio, if any, else the causal language model, else the model alone.

    Raises:
        SpecError: the installed transformers has no such model.
    """
    entry = architectures().get(architecture)
    path = entry.published if entry is not None else None
    path = f"diffusers:{architecture}" if architecture in VAES else path
    if path is not None:
        module, _, name = path.partition(":")
        return getattr(import_module(module), name)
    import transformers

    if architecture in transformers.CONFIG_MAPPING:
        config = transformers.CONFIG_MAPPING[architecture]
        for classes in (
            transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
            transformers.MODEL_FOR_MULTIMODAL_LM_MAPPING,
        ):
            if (found := classes.get(config, None)) is not None:
                return found[0] if isinstance(found, tuple) else found
        with suppress(KeyError):
            return published_class_of(config)
    raise SpecError(
        f"transformers {transformers.__version__} has no model {architecture!r}",
        next_step="Install the release that has it, or train another model.",
    )


def on_meta(architecture: str, config: Any) -> Any:
    """Return a published model without memory for its weights.

    diffusers' classes take a dict of arguments, which of a "vae" names its class.
    """
    made = published_class(config[CLASS] if architecture == "vae" else architecture)
    with torch.device("meta"):
        if isinstance(config, dict):
            return made(**config)
        config = copy.deepcopy(config)
        if not isinstance(config, made.config_class):  # the section of a whole model
            config = made.config_class.from_dict(config.to_dict())
        config._attn_implementation = None  # the class's default
        return made(config)


def locate(
    weights: Weights, wanted: Collection[str], conversions: Conversions
) -> dict[str, Stored]:
    """Return each wanted tensor of a class that some files hold, by its name in the class.

    A part of a larger model has a prefix there ("language_model.", "vision_tower.vision_model."):
    the prefix with the most matches is used; tensors without a match (an LLM's head outside its
    body) are looked up under its parent prefixes.
    """
    names = weights.names
    by_prefix: dict[str, dict[str, Stored]] = {}
    for prefix in sorted({prefix for name in names for prefix in _prefixes(name)}, key=len):
        there = conversions.to_class(
            {name[len(prefix) :]: name for name in names if name.startswith(prefix)}
        )
        by_prefix[prefix] = {
            name: Stored(weights, there[name], name) for name in wanted if name in there
        }
        if len(by_prefix[prefix]) == len(wanted):
            return by_prefix[prefix]
    best = max(by_prefix, key=lambda prefix: len(by_prefix[prefix]), default="")
    stored: dict[str, Stored] = {}
    for prefix in sorted((prefix for prefix in by_prefix if best.startswith(prefix)), key=len):
        stored |= by_prefix[prefix]
    return stored


def _prefixes(name: str) -> Iterable[str]:
    """Yield "", "a.", "a.b.", … for "a.b.3.c", up to the first number."""
    prefix = ""
    for part in name.split(".")[:-1]:
        yield prefix
        if part.isdigit():
            return
        prefix += f"{part}."
    yield prefix
