"""Real weights out: folders that transformers and diffusers load with `from_pretrained`, written
layer by layer."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from disttrain_cli.models.layer import PipelineLayer
from disttrain_cli.models.published import on_meta, published_class
from disttrain_cli.models.weights import published_shapes

#: Largest weight file; a module's tensors are in memory one file at a time.
FILE_BYTES = 4 * 2**30
#: What belongs to a folder beside the model itself, copied where the run started from one.
BESIDE = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "*.model",
    "chat_template*",
    "generation_config.json",
    "preprocessor_config.json",
    "processor_config.json",
    "LICENSE*",
)


@dataclass(frozen=True)
class Written:
    """A folder that was written."""

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
        layers: all layers that have a part of it, without memory for their weights.
        read: whole tensors of a layer by the paths of its parameters.
    """
    model = on_meta(architecture, config)
    stem = _write_config(folder, model, config, dtype)
    saved = _saved_names(model)
    files = list(_files(layers, dtype.itemsize, most_bytes))
    file_of: dict[str, str] = {}
    total = 0
    for number, in_file in enumerate(files, 1):
        name = (
            f"{stem}.safetensors"
            if len(files) == 1
            else f"{stem}-{number:05d}-of-{len(files):05d}.safetensors"
        )
        tensors = {
            saved.get(path, path): tensor.to(dtype)
            for layer in in_file
            for path, tensor in layer.to_published(read(layer)).items()
        }
        _save(tensors, folder / name)
        file_of |= dict.fromkeys(tensors, name)
        total += sum(tensor.numel() for tensor in tensors.values())
    if len(files) > 1:
        index = {
            "metadata": {"total_size": total * dtype.itemsize, "total_parameters": total},
            "weight_map": file_of,
        }
        (folder / f"{stem}.safetensors.index.json").write_text(json.dumps(index, indent=2))
    return Written(folder.name, _import_path(published_class(architecture)), total)


def write_own(
    path: Path, layers: Sequence[PipelineLayer], read: Read, dtype: torch.dtype
) -> dict[str, list[int]]:
    """Write the parameters that no published model has (projectors), as LAYER.PARAMETER; returns
    their shapes."""
    tensors = {}
    for layer in layers:
        names = [name for name, _ in layer.named_parameters() if layer.published_name(name) is None]
        if names:
            values = read(layer)
            tensors.update({f"{layer.name}.{name}": values[name].to(dtype) for name in names})
    if tensors:
        _save(tensors, path)
    return {name: list(tensor.shape) for name, tensor in tensors.items()}


def copy_beside(source: Path, folder: Path) -> None:
    """Copy tokenizer and preprocessor files of a folder; nothing that is there already is written
    over."""
    for pattern in BESIDE:
        for path in sorted(source.glob(pattern)):
            if path.is_file() and not (folder / path.name).exists():
                shutil.copyfile(path, folder / path.name)


def _write_config(folder: Path, model: Any, config: Any, dtype: torch.dtype) -> str:
    """Write `config.json`; returns the stem of the weight files' names."""
    folder.mkdir(parents=True)
    if isinstance(config, dict):
        model.save_config(folder)
        return "diffusion_pytorch_model"
    config = copy.deepcopy(config)
    config.architectures, config.dtype = [type(model).__name__], dtype
    if hasattr(config, "tie_word_embeddings"):
        config.tie_word_embeddings = False  # an LLM's head and embedding are trained on their own
    if hasattr(config, "vision_use_head"):
        config.vision_use_head = False  # SigLIP's pooling, which nothing here reads
    config.save_pretrained(folder)
    return "model"


def _import_path(made: type) -> str:
    """Where a class can be imported from: the library itself if it exports the class, else its
    module."""
    library = import_module(made.__module__.partition(".")[0])
    home = library.__name__ if hasattr(library, made.__name__) else made.__module__
    return f"{home}.{made.__name__}"


def _saved_names(model: Any) -> dict[str, str]:
    """How the library would name the model's tensors in a file, where it differs from the names in
    its class."""
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
    layers: Sequence[PipelineLayer], itemsize: int, most_bytes: int
) -> Iterator[list[PipelineLayer]]:
    """Consecutive layers of each file."""
    in_file: list[PipelineLayer] = []
    filled = 0
    for layer in layers:
        shapes = published_shapes([layer]).values()
        size = sum(torch.Size(shape).numel() for shape in shapes) * itemsize
        if not size:
            continue
        if in_file and filled + size > most_bytes:
            yield in_file
            in_file, filled = [], 0
        in_file, filled = [*in_file, layer], filled + size
    yield in_file


def _save(tensors: dict[str, Tensor], path: Path) -> None:
    from safetensors.torch import save_file

    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()},
        path,
        metadata={"format": "pt"},
    )
