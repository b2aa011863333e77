"""Export of weights, layer by layer, to folders that `from_pretrained` loads."""

from __future__ import annotations

import copy
import json
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from disttrain_cli.models.configs.wholes import whole_config
from disttrain_cli.models.division import whole_shape
from disttrain_cli.models.layer import PipelineLayer
from disttrain_cli.models.published import (
    Weights,
    on_meta,
    renaming,
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
        architecture: its name in `architectures.ARCHITECTURES`, or "vae".
        layers: all layers that hold a part of it, without memory for their weights.
        read: returns the unsharded tensors of a layer by the paths of its parameters.
    """
    model = on_meta(architecture, config)
    tied = any(layer.tied for layer in layers)
    stem = _write_config(folder, model, config, dtype, tied)
    saved = _saved_names(model)
    total = _write_weights(
        folder, stem, [_Part(layer, read, saved) for layer in layers], dtype, most_bytes
    )
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
    saved, family = _saved_names(model), published.family
    tied = any(layer.tied for of_module in layers.values() for layer in of_module)
    layered = [
        _Part(layer, read, saved, family.modules[name])
        for name, of_module in layers.items()
        for layer in of_module
    ]
    known = {name for part in layered for name in (*part.names, *part.shared)}
    folder.mkdir(parents=True)
    with Weights(weight_files(published.path)) as weights:
        rename = renaming(published.model_type, config)
        there = {rename(name): name for name in weights.names}
        unread = [
            _Stored(weights, stored, saved.get(name, name), partial(change, name))
            for name, stored in there.items()
            if saved.get(name, name) not in known
        ]
        total = _write_weights(folder, "model", [*layered, *unread], dtype, most_bytes)
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


class _Part:
    """Tensors of a file that come from a layer."""

    def __init__(
        self,
        layer: PipelineLayer,
        read: Read,
        saved: Mapping[str, str],
        module: Module | None = None,
    ) -> None:
        self._layer, self._read, self._saved, self._module = layer, read, saved, module
        blank = {
            path: torch.empty(whole_shape(parameter), device="meta")
            for path, parameter in layer.named_parameters()
        }
        self.shapes = self._named(
            {path: tensor for path, tensor in blank.items() if path not in layer.tied}
        )
        #: names of tied tensors, which another layer writes
        self.shared = self._named({path: blank[path] for path in layer.tied}).keys()

    @property
    def names(self) -> Iterable[str]:
        """Names of its tensors in the file."""
        return self.shapes.keys()

    @property
    def elements(self) -> int:
        """Number of elements in all of its tensors."""
        return sum(tensor.numel() for tensor in self.shapes.values())

    def tensors(self) -> dict[str, Tensor]:
        """Return its tensors by their names in the file."""
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
        return {self._saved.get(name, name): tensor for name, tensor in named.items()}


@dataclass(frozen=True)
class _Stored:
    """Tensor of the published folder that is written again."""

    weights: Weights
    stored: str
    name: str
    change: Callable[[Tensor], Tensor]

    @property
    def names(self) -> Iterable[str]:
        """Its name in the file."""
        return (self.name,)

    @property
    def elements(self) -> int:
        """Number of its elements."""
        return torch.Size(self.weights.shape(self.stored)).numel()

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensor by its name in the file."""
        return {self.name: self.change(self.weights.read(self.stored))}


def _write_weights(
    folder: Path,
    stem: str,
    parts: Sequence[_Part | _Stored],
    dtype: torch.dtype,
    most_bytes: int,
) -> int:
    """Write safetensors files, with an index if several; return the number of elements."""
    files = list(_files(parts, dtype.itemsize, most_bytes))
    file_of: dict[str, str] = {}
    total = 0
    for number, in_file in enumerate(files, 1):
        name = (
            f"{stem}.safetensors"
            if len(files) == 1
            else f"{stem}-{number:05d}-of-{len(files):05d}.safetensors"
        )
        tensors = {
            path: tensor.to(dtype) for part in in_file for path, tensor in part.tensors().items()
        }
        save_tensors(tensors, folder / name)
        file_of |= dict.fromkeys(tensors, name)
        total += sum(tensor.numel() for tensor in tensors.values())
    if len(files) > 1:
        index = {
            "metadata": {"total_size": total * dtype.itemsize, "total_parameters": total},
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


def _saved_names(model: Any) -> dict[str, str]:
    """Return the library's names of the model's tensors in a file, by their names in the class.

    Empty for libraries other than transformers.
    """
    from transformers import PreTrainedModel
    from transformers.core_model_loading import revert_weight_conversion

    if not isinstance(model, PreTrainedModel):
        return {}
    state = model.state_dict()
    names = {id(tensor): name for name, tensor in state.items()}
    return {
        names[id(tensor)]: name for name, tensor in revert_weight_conversion(model, state).items()
    }


def _files(
    parts: Sequence[_Part | _Stored], itemsize: int, most_bytes: int
) -> Iterator[list[_Part | _Stored]]:
    """Yield the consecutive parts of each file."""
    in_file: list[_Part | _Stored] = []
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
