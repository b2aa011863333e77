"""Export of weights, layer by layer, to folders that `from_pretrained` loads.

Names and forms are those that the library's `save_pretrained` of the class writes (`conversion`);
a model that came as one folder keeps the names of its files.
"""

from __future__ import annotations

import copy
import json
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from disttrain_cli.models.configs.wholes import whole_config
from disttrain_cli.models.conversion import Conversion, Conversions
from disttrain_cli.models.division import whole_shape
from disttrain_cli.models.layer import PipelineLayer
from disttrain_cli.models.published import (
    Stored,
    Weights,
    on_meta,
    weight_files,
)
from disttrain_cli.spec.families.family import Module
from disttrain_cli.spec.families.folder import PublishedFolder

#: Largest weight file; a module's tensors are in memory one file at a time.
FILE_BYTES = 4 * 2**30


@dataclass(frozen=True)
class Written:
    """Summary of a written folder."""

    folder: str
    loads_with: str  # class of transformers or diffusers
    parameters: int


Read = Callable[[PipelineLayer], Mapping[str, Tensor]]


def write_model(
    folder: Path,
    architecture: str,
    config: Any,
    layers: Sequence[PipelineLayer],
    read: Read,
    dtype: torch.dtype,
    most_bytes: int = FILE_BYTES,
) -> Written:
    """Write a published model's configuration and weights.

    Args:
        architecture: its name, as for `published_class`.
        layers: all layers that hold a part of it, without memory for their weights.
        read: returns the unsharded tensors of a layer by the paths of its parameters.
    """
    model = on_meta(architecture, config)
    tied = any(layer.tied for layer in layers)
    stem = _write_config(folder, model, config, dtype, tied)
    owners = [_Layer(layer, read) for layer in layers]
    total = _write_weights(folder, stem, owners, Conversions(model), dtype, most_bytes)
    return Written(folder.name, import_path(type(model)), total)


def write_whole(
    folder: Path,
    published: PublishedFolder,
    layers: Mapping[str, Sequence[PipelineLayer]],
    changed: Mapping[str, Mapping[str, Any]],
    read: Read,
    dtype: torch.dtype,
    most_bytes: int = FILE_BYTES,
    change: Callable[[str, Tensor], Tensor] = lambda _, tensor: tensor,
) -> Written:
    """Write the folder of a whole published model again, with other weights.

    Tensors that no layer covers (blocks after the one whose output is read, a pooling head) are
    copied from the published folder.

    Args:
        change: transforms a tensor that no layer covers, by its name in the class.
        layers: by module all its layers, without memory for their weights.
        changed: by module the fields of its configuration that differ from the published ones.
        read: returns the unsharded tensors of a layer by the paths of its parameters.
    """
    config = whole_config(published)
    model = on_meta(published.model_type, config)
    conversions = Conversions(model)
    tied = any(layer.tied for of_module in layers.values() for layer in of_module)
    owners: list[_Layer | _Copied] = []
    covered = set[str]()
    for name, of_module in layers.items():
        for layer in of_module:
            owner = _Layer(layer, read, published.family.modules[name])
            owners.append(owner)
            covered |= owner.shapes.keys() | owner.shared
    folder.mkdir(parents=True)
    with Weights(weight_files(published.path)) as weights:
        there = conversions.to_class({name: name for name in weights.names})
        for name, conversion in there.items():
            if name not in conversions.tensors:  # none of the class's: as it is
                for stored in conversion.sources:
                    same = Stored(weights, Conversion((stored,), stored), stored)
                    owners.append(_Copied(same, partial(change, stored)))
            elif name not in covered:
                owners.append(_Copied(Stored(weights, conversion, name), partial(change, name)))
        total = _write_weights(folder, "model", owners, conversions, dtype, most_bytes, there)
    fields = published.with_sections(changed)
    fields.pop("torch_dtype", None)
    fields |= {
        "architectures": [type(model).__name__],
        "dtype": str(dtype).removeprefix("torch."),
        "transformers_version": version("transformers"),
    }
    fields["tie_word_embeddings"] = tied
    (folder / "config.json").write_text(json.dumps(fields, indent=2) + "\n")
    return Written(folder.name, "transformers.AutoModelForImageTextToText", total)


class _Layer:
    """Tensors of the class that come from a layer."""

    def __init__(self, layer: PipelineLayer, read: Read, module: Module | None = None) -> None:
        self._layer, self._read, self._module = layer, read, module
        blank = {
            path: torch.empty(whole_shape(parameter), device="meta")
            for path, parameter in layer.named_parameters()
        }
        #: shapes by name in the class
        self.shapes = {
            name: tensor.shape
            for name, tensor in self._named(
                {path: tensor for path, tensor in blank.items() if path not in layer.tied}
            ).items()
        }
        #: names of tied tensors, which another layer writes
        self.shared = self._named({path: blank[path] for path in layer.tied}).keys()

    def tensors(self) -> dict[str, Tensor]:
        """Return its tensors by their names in the class."""
        tensors, tied = self._read(self._layer), self._layer.tied
        return self._named({path: tensors[path] for path in tensors if path not in tied})

    def _named(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        layer, module = self._layer, self._module
        named = layer.to_published(tensors)
        if module is not None:
            named = {module.name_in_whole(name): tensor for name, tensor in named.items()}
            named |= {
                module.joint_in_whole(path): tensor
                for path, tensor in tensors.items()
                if layer.published_path(path) is None
            }
        return named


class _Copied:
    """Tensor of the class that the published folder holds and no layer has."""

    def __init__(self, stored: Stored, change: Callable[[Tensor], Tensor]) -> None:
        self._stored, self._change = stored, change
        self.shapes = {stored.name: torch.Size(stored.shape or ())}

    def tensors(self) -> dict[str, Tensor]:
        """Return it by its name in the class."""
        return {self._stored.name: self._change(self._stored.read())}


@dataclass
class _Part:
    """Consecutive tensors of a file: those that result from some owners' together."""

    owners: list[_Layer | _Copied]
    conversions: list[Conversion]
    elements: int = 0

    def tensors(self, dtype_of: Callable[[str], torch.dtype]) -> dict[str, Tensor]:
        """Return the tensors by their names in the file."""
        values = {
            name: tensor.to(dtype_of(name)) if tensor.is_floating_point() else tensor
            for owner in self.owners
            for name, tensor in owner.tensors().items()
        }
        return {
            name: tensor
            for conversion in self.conversions
            for name, tensor in conversion(values.pop).items()
        }


def _parts(
    owners: Sequence[_Layer | _Copied],
    conversions: Conversions,
    there: Mapping[str, Conversion] | None,
) -> list[_Part]:
    """Return the owners' tensors as parts; owners that share a conversion are one part."""
    owner_of = {name: index for index, owner in enumerate(owners) for name in owner.shapes}
    number_of, found = list(range(len(owners))), conversions.to_files(owner_of, there)
    for conversion in found:
        shared = {number_of[owner_of[name]] for name in conversion.sources}
        if len(shared) > 1:
            number_of = [min(shared) if number in shared else number for number in number_of]
    parts: dict[int, _Part] = {}
    for owner, number in zip(owners, number_of, strict=True):
        parts.setdefault(number, _Part([], [])).owners.append(owner)
    for conversion in found:
        part = parts[number_of[owner_of[conversion.sources[0]]]]
        part.conversions.append(conversion)
        part.elements += sum(
            owners[owner_of[name]].shapes[name].numel() for name in conversion.sources
        )
    return list(parts.values())


def _write_weights(
    folder: Path,
    stem: str,
    owners: Sequence[_Layer | _Copied],
    conversions: Conversions,
    dtype: torch.dtype,
    most_bytes: int,
    there: Mapping[str, Conversion] | None = None,
) -> int:
    """Write safetensors files, with an index if several; return the number of elements.

    Args:
        there: conversions of the folder that the model came from, whose names are kept.
    """
    files = list(_files(_parts(owners, conversions, there), dtype.itemsize, most_bytes))
    file_of: dict[str, str] = {}
    total = size = 0
    for number, in_file in enumerate(files, 1):
        name = (
            f"{stem}.safetensors"
            if len(files) == 1
            else f"{stem}-{number:05d}-of-{len(files):05d}.safetensors"
        )
        tensors: dict[str, Tensor] = {}
        for part in in_file:
            tensors |= part.tensors(partial(conversions.dtype_of, dtype=dtype))
        save_tensors(tensors, folder / name)
        file_of |= dict.fromkeys(tensors, name)
        total += sum(tensor.numel() for tensor in tensors.values())
        size += sum(tensor.nbytes for tensor in tensors.values())
    if len(files) > 1:
        index = {
            "metadata": {"total_size": size, "total_parameters": total},
            "weight_map": file_of,
        }
        (folder / f"{stem}.safetensors.index.json").write_text(json.dumps(index, indent=2))
    return total


def write_own(
    path: Path, layers: Sequence[PipelineLayer], read: Read, dtype: torch.dtype
) -> dict[str, list[int]]:
    """Write the parameters that no published model and no adapter has (projectors).

    They are named LAYER.PARAMETER; returns their shapes.
    """
    tensors = {}
    for layer in layers:
        names = [name for name, _ in layer.named_parameters() if layer.published_path(name) is None]
        if names:
            values = read(layer)
            tensors.update({f"{layer.name}.{name}": values[name].to(dtype) for name in names})
    if tensors:
        save_tensors(tensors, path)
    return {name: list(tensor.shape) for name, tensor in tensors.items()}


def _write_config(folder: Path, model: Any, config: Any, dtype: torch.dtype, tied: bool) -> str:
    """Write `config.json`; return the stem of the weight files' names."""
    folder.mkdir(parents=True)
    if isinstance(config, dict):
        model.save_config(folder)
        return "diffusion_pytorch_model"
    config = copy.deepcopy(config)
    config.architectures, config.dtype = [type(model).__name__], dtype
    if hasattr(config, "tie_word_embeddings"):
        config.tie_word_embeddings = tied
    if hasattr(config, "vision_use_head"):
        config.vision_use_head = False  # SigLIP's pooling head, which is not trained
    config.save_pretrained(folder)
    return "model"


def import_path(made: type) -> str:
    """Return the import path of a class, from the library itself if it exports the class."""
    library = import_module(made.__module__.partition(".")[0])
    home = library.__name__ if hasattr(library, made.__name__) else made.__module__
    return f"{home}.{made.__name__}"


def _files(parts: Sequence[_Part], itemsize: int, most_bytes: int) -> Iterator[list[_Part]]:
    """Yield the consecutive parts of each file."""
    in_file: list[_Part] = []
    filled = 0
    for part in parts:
        size = part.elements * itemsize
        if not size:
            continue
        if in_file and filled + size > most_bytes:
            yield in_file
            in_file, filled = [], 0
        in_file, filled = [*in_file, part], filled + size
    yield in_file


def save_tensors(tensors: dict[str, Tensor], path: Path) -> None:
    """Write a safetensors file; raise OSError if it cannot be written."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    whole = {name: tensor.contiguous() for name, tensor in tensors.items()}
    path.touch()
    mode = stat.S_IMODE(path.stat().st_mode)  # the library replaces it by a file of mode 0600
    try:
        save_file(whole, path, metadata={"format": "pt"})
    except SafetensorError as error:  # also raised when the disk is full
        raise OSError(str(error)) from None
    path.chmod(mode)
