"""Folders of adapters as peft writes and reads them: adapter_config.json and
adapter_model.safetensors.

peft calls an adapter's parameter by the place of its linear in the adapted model, one of
transformers or diffusers: base_model.model.PLACE.lora_A.weight.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import torch

from disttrain_cli.errors import SpecError
from disttrain_cli.models.architectures import read_configs
from disttrain_cli.models.configs import ModuleConfig
from disttrain_cli.models.configs.lora import BASE, CONFIG, read_config
from disttrain_cli.models.division import whole_shape
from disttrain_cli.models.export import Read, Written, import_path, save_tensors
from disttrain_cli.models.layer import PipelineLayer, is_adapter
from disttrain_cli.models.lora import ADAPTABLE, Lora, matches
from disttrain_cli.models.published import Weights, on_meta, published_class, weight_files
from disttrain_cli.models.weights import (
    Fill,
    fill_parameter,
    load_into,
    module_layers,
    source_of,
)
from disttrain_cli.spec.files import parse_json
from disttrain_cli.spec.runfile import Run
from disttrain_cli.spec.runfile.lora import ALL_LINEAR

WEIGHTS = "adapter_model.safetensors"
#: Where peft's models hold the adapted one.
PREFIX = "base_model.model."
#: peft's names of what a model does, by kind of module.
TASKS = {"llm": "CAUSAL_LM"}
_SHOWN = 4  # names shown of many


def load_adapters(layers: Sequence[PipelineLayer], run: Run, fill: Fill | None = None) -> list[str]:
    """Give layers the adapters that the run file names (`lora.folder`); returns notes for the user.

    Layers may be a stage's, of one TP rank, of any dtype, on any device.

    Raises:
        SpecError: an adapter is damaged, or of another model.
    """
    notes = []
    for module, group in groupby(layers, key=lambda layer: layer.module):
        lora = read_configs(run)[module].lora
        if lora is None or lora.folder is None or not run.file.model.modules[module].pretrained:
            continue
        field = f"model.modules.{module}.lora.folder"
        fill_adapters(list(group), run, module, lora.folder, field, fill)
        notes.append(f"{module}: adapters from {lora.folder}.")
    return notes


def check_adapters(run: Run, modules: Collection[str]) -> list[str]:
    """What the adapters of some modules start from, a sentence each.

    Raises:
        SpecError: a folder that the run file names is damaged, or of another model.
    """
    notes = []
    for module in modules:
        lora, spec = read_configs(run)[module].lora, run.file.model.modules[module]
        if lora is None:
            continue
        if lora.folder is None or not spec.pretrained:
            notes.append(f"{module}: its adapters start at random, its own weights stay.")
            continue
        field = f"model.modules.{module}.lora.folder"
        _check_base(run, module, lora.folder, field)
        fill_adapters([], run, module, lora.folder, field)
        notes.append(f"{field}: adapters of {module} start from {lora.folder}.")
    return notes


def fill_adapters(
    layers: Sequence[PipelineLayer],
    run: Run,
    module: str,
    folder: Path,
    field: str,
    fill: Fill | None = None,
) -> None:
    """Set the adapters of some layers of a module from a folder, which must be of this very module.

    Args:
        field: what names the folder, as the user wrote it.
        fill: what is done with a tensor, if it is not put into the layer's own parameter.
    """
    expected = dict(_named(module_layers(run, module)))
    with Weights([folder / WEIGHTS]) as weights:
        shapes = {name: weights.shape(name) for name in weights.names}
        lacking = [name for name in expected if name not in shapes]
        unknown = [name for name in shapes if name not in expected]
        other = [
            f"{name}: {list(shapes[name])} there, {list(whole_shape(one))} here"
            for name, (_, _, one) in expected.items()
            if name in shapes and shapes[name] != whole_shape(one)
        ]
        if lacking or unknown or other:
            lines = [
                *(f"{name}: missing" for name in lacking),
                *(f"{name}: not of this model" for name in unknown),
                *other,
            ]
            more = [f"and {len(lines) - _SHOWN} more"] if len(lines) > _SHOWN else []
            raise SpecError(
                f"{field}: the adapter in {folder} is of another model than {module}",
                "\n".join([*lines[:_SHOWN], *more]),
                "Give the adapter of this model, or start from none.",
            )
        for name, (layer, path, _) in _named(layers):
            (fill or fill_parameter)(layer, path, weights.read(name))


def _named(
    layers: Sequence[PipelineLayer],
) -> Iterator[tuple[str, tuple[PipelineLayer, str, torch.nn.Parameter]]]:
    """(peft's name, (layer, path, parameter)) of every adapter's parameter."""
    for layer in layers:
        for path, parameter in layer.named_parameters():
            if is_adapter(path):
                yield stored_name(layer, path), (layer, path, parameter)


def _check_base(run: Run, module: str, folder: Path, field: str) -> None:
    """SpecError where an adapter names another model than the one that the module starts from."""
    described = parse_json(folder / CONFIG, "adapter configuration", f"Correct {field}.")
    base, spec = described.get(BASE), run.file.model.modules[module]
    if not base or spec.folder is None:
        return
    ours = run.resolve(spec.folder)
    if Path(base).resolve() != ours and Path(base).name != ours.name:
        raise SpecError(
            f"{field}: the adapter in {folder} is of another model than {module}",
            f"its {BASE}: {base}; model.modules.{module}.folder: {ours}",
            f"Give the model's own adapter; if {ours} is that model under another name, correct"
            f" {BASE} in {folder / CONFIG}.",
        )


def check_alike(lora: Lora, folder: Path, field: str) -> None:
    """SpecError where the adapter in a folder is not computed as a module's adapters are."""
    there = read_config(folder, field)
    for name in ("r", "lora_alpha", "use_rslora"):
        if name in there and there[name] != getattr(lora, name):
            raise SpecError(
                f"{field}: the adapters in {folder} are others than those of {lora.module}",
                f"{name}: {there[name]} there, {getattr(lora, name)} in the run file",
                f"Make model.modules.{lora.module}.lora as it was there.",
            )


def write_adapter(
    folder: Path,
    module: ModuleConfig,
    layers: Sequence[PipelineLayer],
    read: Read,
    dtype: torch.dtype,
    base: Path,
) -> Written:
    """Write a module's adapters as peft does; what is said to load them is the class of their base.

    Args:
        layers: all layers of the module, without memory for their weights.
        read: whole tensors of a layer by the paths of its parameters.
        base: folder of the model that they belong to.
    """
    assert module.lora is not None
    folder.mkdir(parents=True)
    tensors = {
        stored_name(layer, path): tensor.to(dtype)
        for layer in layers
        for path, tensor in read(layer).items()
        if is_adapter(path)
    }
    save_tensors(tensors, folder / WEIGHTS)
    places = {name.removeprefix(PREFIX).rpartition(".lora_")[0] for name in tensors}
    named = _targets(module.lora, places, on_meta(module.architecture, module.config))
    described = _described(module.lora, base, TASKS.get(module.kind), named)
    (folder / CONFIG).write_text(json.dumps(described, indent=2) + "\n")
    made = import_path(published_class(module.architecture))
    return Written(folder.name, made, sum(tensor.numel() for tensor in tensors.values()))


def unchanged_base(
    run: Run, layers: Sequence[PipelineLayer], read: Read, dtype: torch.dtype
) -> Path | None:
    """The folder that the run file names for a module, if it holds the weights that the adapters
    belong to, bit for bit in `dtype`, and no others.

    Args:
        layers: all layers of the module, without memory for their weights.
        read: whole tensors of a layer by the paths of its parameters.
    """
    source = source_of(run, layers[0].module, "module")
    if source is None or source.part is not None or not weight_files(source.folder):
        return None
    known: dict[str, Mapping[str, torch.Tensor]] = {}  # of the layer that is compared

    def compare(layer: PipelineLayer, path: str, whole: torch.Tensor) -> None:
        if path in layer.tied:
            return
        if layer.name not in known:
            known.clear()
            known[layer.name] = read(layer)
        if not torch.equal(whole.to(dtype), known[layer.name][path].to(dtype)):
            raise _Changed

    try:
        load_into(layers, run, fill=compare)
    except _Changed:
        return None
    return source.folder


class _Changed(Exception):
    """A weight is not that of the folder."""


def _targets(lora: Lora, places: set[str], model: torch.nn.Module) -> Collection[str] | str:
    """`target_modules` with which peft finds these very places: as they were given, by their ends,
    or one by one."""
    adaptable = [name for name, part in model.named_modules() if isinstance(part, ADAPTABLE)]
    ends = {place.rpartition(".")[2] for place in places}
    for named in (lora.target_modules, ends):
        if named != ALL_LINEAR and {n for n in adaptable if matches(named, n)} == places:
            return named
    return places


def stored_name(layer: PipelineLayer, path: str) -> str:
    """What peft calls an adapter's parameter in a file."""
    return f"{PREFIX}{layer.published_path(path)}"


def _described(
    lora: Lora, base: Path, task: str | None, named: Collection[str]
) -> Mapping[str, Any]:
    """peft's configuration of an adapter.

    Args:
        base: folder of the model that it belongs to.
        task: peft's name of what the model does, if it has one.
        named: `target_modules`.
    """
    return {
        "peft_type": "LORA",
        "task_type": task,
        BASE: str(base),
        "r": lora.r,
        "lora_alpha": lora.lora_alpha,
        "target_modules": named if isinstance(named, str) else sorted(named),
        "use_rslora": lora.use_rslora,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "inference_mode": True,
    }
