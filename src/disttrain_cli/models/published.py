"""Folders of published weights: tensors by name, read one at a time, under any prefix.

A folder follows Hugging Face's layout: one safetensors file, or several with an index. Pickled
files are never opened. Names are those of the installed library's class; names that older versions
wrote are translated by the library's own rules, and the prefix of a model that was saved inside a
larger one is inferred from the names.
"""

from __future__ import annotations

import copy
import shlex
from collections.abc import Callable, Collection, Iterable
from contextlib import ExitStack
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from disttrain_cli.errors import SpecError
from disttrain_cli.models.architectures import ARCHITECTURES
from disttrain_cli.spec.families.folder import family_of
from disttrain_cli.spec.files import parse_json
from disttrain_cli.spec.hub import fetch_weights

#: Files that transformers and diffusers write; an index with this name plus a suffix lists several
#: files.
SINGLE = ("model.safetensors", "diffusion_pytorch_model.safetensors")
_PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.bin.index.json")

POINTER = b"version https://git-lfs"  # first bytes of a pointer file

_VAE = "diffusers:AutoencoderKL"
# Renamed attention parameters of autoencoders saved by diffusers before 0.16.
_OLD_VAE = {
    ".query.": ".to_q.",
    ".key.": ".to_k.",
    ".value.": ".to_v.",
    ".proj_attn.": ".to_out.0.",
}


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


@cache
def published_class(architecture: str) -> Any:
    """Return the library class that saves and loads an architecture or a whole model."""
    if architecture == "vae":
        path = _VAE
    elif (family := family_of(architecture)) is not None:
        path = family.published
    else:
        path = ARCHITECTURES[architecture].published
    module, _, name = path.partition(":")
    return getattr(import_module(module), name)


def on_meta(architecture: str, config: Any) -> Any:
    """Return a published model without memory for its weights.

    diffusers' classes take a dict of arguments.
    """
    made = published_class(architecture)
    with torch.device("meta"):
        if isinstance(config, dict):
            return made(**config)
        config = copy.deepcopy(config)
        if not isinstance(config, made.config_class):  # the section of a whole model
            config = made.config_class.from_dict(config.to_dict())
        config._attn_implementation = None  # the class's default
        return made(config)


def renaming(architecture: str, config: Any) -> Callable[[str], str]:
    """Return a function from published tensor names to the installed class's names."""
    if architecture == "vae":
        return _renamed_vae
    if isinstance(config, dict):
        return lambda name: name
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightRenaming, rename_source_key

    model = on_meta(architecture, config)
    rules = [
        rule for rule in get_model_conversion_mapping(model) if isinstance(rule, WeightRenaming)
    ]
    known = model.state_dict()
    return lambda name: rename_source_key(name, rules, [], model.base_model_prefix, known)[0]


def _renamed_vae(name: str) -> str:
    for old, new in _OLD_VAE.items():
        name = name.replace(old, new)
    return name


def locate(
    names: Collection[str], wanted: Collection[str], rename: Callable[[str], str]
) -> dict[str, str]:
    """Return the name in the files of each wanted tensor that exists, by its name in the class.

    A part of a larger model has a prefix there ("language_model.", "vision_tower.vision_model."):
    the prefix with the most matches is used; tensors without a match (an LLM's head outside its
    body) are looked up under its parent prefixes.
    """
    by_prefix: dict[str, dict[str, str]] = {}
    for prefix in sorted({prefix for name in names for prefix in _prefixes(name)}, key=len):
        renamed = {rename(name[len(prefix) :]): name for name in names if name.startswith(prefix)}
        by_prefix[prefix] = {name: renamed[name] for name in wanted if name in renamed}
        if len(by_prefix[prefix]) == len(wanted):
            return by_prefix[prefix]
    best = max(by_prefix, key=lambda prefix: len(by_prefix[prefix]), default="")
    stored_as: dict[str, str] = {}
    for prefix in sorted((prefix for prefix in by_prefix if best.startswith(prefix)), key=len):
        stored_as |= by_prefix[prefix]
    return stored_as


def _prefixes(name: str) -> Iterable[str]:
    """Yield "", "a.", "a.b.", … for "a.b.3.c", up to the first number."""
    prefix = ""
    for part in name.split(".")[:-1]:
        yield prefix
        if part.isdigit():
            return
        prefix += f"{part}."
    yield prefix
