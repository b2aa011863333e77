"""Import of adapters: folders as peft writes them, for one module or for a whole published model.

Parameters that are trained in full next to adapters are in these folders, too: `modules_to_save`,
and the projector of a whole model whose projectors are trained.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import torch

from disttrain_cli.calls import argument
from disttrain_cli.errors import SpecError
from disttrain_cli.models.architectures import read_configs
from disttrain_cli.models.configs.wholes import whole_config
from disttrain_cli.models.division import whole_shape
from disttrain_cli.models.export import Read
from disttrain_cli.models.layer import ADAPTER, PipelineLayer, is_adapter
from disttrain_cli.models.lora import Lora
from disttrain_cli.models.published import Weights, on_meta, weight_files
from disttrain_cli.models.weights import (
    Fill,
    fill_parameter,
    load_into,
    module_layers,
    source_of,
)
from disttrain_cli.spec.adapter import (
    BASE,
    CONFIG,
    NUMBERS,
    PREFIX,
    WEIGHTS,
    numbers_at,
    places_of,
    read_fields,
)
from disttrain_cli.spec.families.family import Module
from disttrain_cli.spec.files import parse_json
from disttrain_cli.spec.hub import name_of
from disttrain_cli.spec.runfile import Run
from disttrain_cli.spec.runfile.adapters import whole_part
from disttrain_cli.spec.runfile.lora import DEFAULTS
from disttrain_cli.spec.runfile.model import PROJECTORS

_SHOWN = 4  # names listed in an error message

#: Parameters of an adapter folder by their names in it: layer, path in the layer, parameter.
Named = Mapping[str, tuple[PipelineLayer, str, torch.nn.Parameter]]


def load_adapters(layers: Sequence[PipelineLayer], run: Run, fill: Fill | None = None) -> list[str]:
    """Load the adapters that the run file names into layers; return notes for the user.

    They come from `lora.folder`; the projector comes from a whole model's adapter. Layers may be
    those of one stage, of one TP rank, of any dtype, on any device.

    Raises:
        SpecError: an adapter is damaged, or belongs to another model.
    """
    notes = []
    for module, group in groupby(layers, key=lambda layer: layer.module):
        of_module, spec = list(group), run.file.model.modules[module]
        if not spec.pretrained:
            continue
        lora = read_configs(run)[module].lora
        if lora is not None and lora.folder is not None:
            fill_adapters(of_module, run, module, lora.folder, _field(run, lora), fill)
            notes.append(f"{module}: adapters from {lora.folder}.")
        _fill_joint(of_module, run, module, fill or fill_parameter)
    return notes


def check_adapters(run: Run, modules: Collection[str]) -> list[str]:
    """Check the initial adapters of some modules, and return a sentence about each.

    Raises:
        SpecError: a folder that the run file names is damaged, or belongs to another model.
    """
    notes = []
    for module in modules:
        lora, spec = read_configs(run)[module].lora, run.file.model.modules[module]
        if lora is None:
            continue
        if lora.folder is None or not spec.pretrained:
            notes.append(f"{module}: its adapters start at random, its own weights stay.")
            continue
        field = _field(run, lora)
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
    """Load adapters and parameters trained in full from a folder into layers of a module.

    The folder must cover exactly this module, or the whole model.

    Args:
        layers: layers to fill; the folder is checked against all layers of the module.
        field: field of the run file that names the folder, for error messages.
        fill: receives each tensor; None: the tensor is copied into the layer's parameter.

    Raises:
        SpecError: the folder belongs to another model.
    """
    lora = read_configs(run)[module].lora
    assert lora is not None
    whole = bool(lora.within) and folder == lora.folder  # other folders cover one module
    part = whole_part(run, module) if whole else None
    expected = named(module_layers(run, module), part)
    with Weights([folder / WEIGHTS]) as weights:
        shapes = {name: weights.shape(name) for name in weights.names}
        lacking = [name for name in expected if name not in shapes]
        unknown = _unknown(run, part, folder, shapes.keys() - expected.keys())
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
            raise SpecError(
                f"{field}: the adapter in {folder} is of another model than {module}",
                _shown(lines),
                "Give the adapter of this model (one over a whole model as model.adapter), or start"
                " from none.",
            )
        for name, (layer, path, _) in named(layers, part).items():
            (fill or fill_parameter)(layer, path, weights.read(name))


def _field(run: Run, lora: Lora) -> str:
    """Return the field of the run file that names the folder of a module's adapters."""
    given = run.file.model.adapter
    if given is not None and run.resolve(given) == lora.folder:
        return "model.adapter"
    return f"model.modules.{lora.module}.lora.folder"


def _unknown(run: Run, part: Module | None, folder: Path, names: Set[str]) -> list[str]:
    """Return the names in an adapter that match no part of the model.

    `names` are those that the layers of one module do not have. An adapter over the whole model
    (`model.adapter`) also has names of other modules, of the projector, and of parts of the model
    that no layer covers, such as blocks after the one whose output is read.

    Args:
        part: the module's entry in the whole model; None: the adapter covers this module alone.

    Raises:
        SpecError: it adapts parts that cannot be adapted here, such as the projector.
    """
    given, published = run.file.model.adapter, run.published
    if part is None or published is None or given is None or run.resolve(given) != folder:
        return sorted(names)
    known, read = _known(run)
    if not names - known:
        return []
    there = {
        f"{PREFIX}{name}"
        for name, _ in on_meta(published.model_type, whole_config(published)).named_parameters()
    }
    others = sorted(name for name in names - known if _weight(name) in read)
    if others:
        raise SpecError(
            f"model.adapter: the adapter in {folder} trains parts that cannot be trained so here",
            _shown(others),
            "Adapters of projectors are not computed: merge this one into its model with peft.",
        )
    return sorted(name for name in names - known if _weight(name) not in there)


def _known(run: Run) -> tuple[set[str], set[str]]:
    """Return a whole model adapter's names for a run's layers, and those layers' base weights."""
    known, read = set[str](), set[str]()
    for name in run.published.family.modules if run.published is not None else ():
        within = whole_part(run, name)
        if within is not None:
            layers = module_layers(run, name)
            known |= {*named(layers, within), *joint(layers, within)}
            read |= {*joint(layers, within), *_weights(layers, within)}
    return known, read


@dataclass(frozen=True)
class Unread:
    """Tensors of an adapter over the whole model for parts that no layer covers.

    Attributes:
        tensors: by their names in the adapter's file.
        numbers: r and lora_alpha by the paths of linears.
    """

    tensors: Mapping[str, torch.Tensor]
    numbers: Mapping[str, tuple[int, int]]
    use_rslora: bool

    def change(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor merged with its adapter, or replaced by its fully trained version."""
        place = name.removesuffix(".weight")
        if place not in self.numbers:
            return self.tensors.get(f"{PREFIX}{name}", tensor)
        r, alpha = self.numbers[place]
        a, b = (self.tensors[f"{PREFIX}{place}.{one}.weight"].float() for one in ADAPTER)
        scale = alpha / (math.sqrt(r) if self.use_rslora else r)
        return tensor.float() + scale * b @ a


def unread_of(run: Run) -> Unread:
    """Return the tensors of the initial adapter (`model.adapter`) for parts that no layer covers.

    Empty without such an adapter.
    """
    given = run.file.model.adapter
    if given is None:
        return Unread({}, {}, False)
    folder, (known, _) = run.resolve(given), _known(run)
    fields = DEFAULTS | read_fields(folder, "model.adapter")
    with Weights([folder / WEIGHTS]) as weights:
        tensors = {name: weights.read(name) for name in weights.names if name not in known}
    places = places_of([name.removeprefix(PREFIX) for name in tensors])
    numbers = {place: numbers_at(fields, place) for place in places}
    return Unread(tensors, numbers, bool(fields["use_rslora"]))


def _shown(lines: Sequence[str]) -> str:
    more = [f"and {len(lines) - _SHOWN} more"] if len(lines) > _SHOWN else []
    return "\n".join([*lines[:_SHOWN], *more])


def _weights(layers: Sequence[PipelineLayer], part: Module) -> Iterator[str]:
    """Yield the names in the whole model of a module's base parameters."""
    for layer in layers:
        for path, _ in layer.named_parameters():
            if layer.published_path(path) is not None:
                yield stored_name(layer, path, part)


def _weight(name: str) -> str:
    """Return the name of the base weight of an adapter's tensor, or of a fully trained tensor."""
    place, adapter, _ = name.rpartition(".lora_")
    return f"{place}.weight" if adapter else name


def named(layers: Sequence[PipelineLayer], part: Module | None) -> Named:
    """Return the parameters of some layers in an adapter folder: adapters, fully trained weights.

    Args:
        part: the module's entry in the whole model, if the folder covers the whole model.
    """
    return {
        stored_name(layer, path, part): (layer, path, parameter)
        for layer in layers
        for path, parameter in layer.named_parameters()
        if is_adapter(path) or path in layer.saved
    }


def joint(layers: Sequence[PipelineLayer], part: Module) -> Named:
    """Return a projector's parameters that the whole model has, by name in its adapter."""
    found: dict[str, tuple[PipelineLayer, str, torch.nn.Parameter]] = {}
    for layer in layers:
        for path, parameter in layer.named_parameters():
            if layer.owner_of(path) != PROJECTORS:
                continue
            if layer.published_path(path) is not None:
                found[stored_name(layer, path, part)] = (layer, path, parameter)
            elif part.joint:
                found[f"{PREFIX}{part.joint_in_whole(path)}"] = (layer, path, parameter)
    return found


def _fill_joint(layers: Sequence[PipelineLayer], run: Run, module: str, fill: Fill) -> None:
    """Load the projector from the adapter over the whole model, if it has one."""
    given, part = run.file.model.adapter, whole_part(run, module)
    wanted = joint(layers, part) if given is not None and part is not None else {}
    if not wanted or given is None:
        return
    with Weights([run.resolve(given) / WEIGHTS]) as weights:
        for name, (layer, path, parameter) in wanted.items():
            if name not in weights.names:
                continue
            if weights.shape(name) != whole_shape(parameter):
                raise SpecError(
                    f"model.adapter: a tensor of {given} has another shape",
                    f"{name}: {list(weights.shape(name))} there, {list(whole_shape(parameter))}"
                    " here",
                    "Give the adapter of this model, or start from none.",
                )
            fill(layer, path, weights.read(name))


def _check_base(run: Run, module: str, folder: Path, field: str) -> None:
    """Raise SpecError if an adapter's base model is not the one that the module starts from."""
    described = parse_json(folder / CONFIG, "adapter configuration", f"Correct {field}.")
    base, spec = described.get(BASE), run.file.model.modules[module]
    if not base or spec.folder is None:
        return
    ours = run.resolve(spec.folder)
    called = name_of(ours)
    if Path(base).resolve() != ours and Path(base).name != Path(called).name:
        raise SpecError(
            f"{field}: the adapter in {folder} is of another model than {module}",
            f"its {BASE}: {base}; model.modules.{module}.folder: {called}",
            f"Give the model's own adapter; if {called} is that model under another name, correct"
            f" {BASE} in {folder / CONFIG}.",
        )


def check_alike(lora: Lora, there: Mapping[str, Any], origin: Path) -> None:
    """Raise SpecError if the adapters in `origin` are computed differently from a module's.

    Args:
        there: known hyperparameters of those adapters (`NUMBERS`).
    """
    for name in NUMBERS:
        if name in there and there[name] != getattr(lora, name):
            raise SpecError(
                f"{argument('origin')}: the adapters in {origin} are others than those of"
                f" {lora.module}",
                f"{name}: {there[name]} there, {getattr(lora, name)} in the run file",
                f"Make model.modules.{lora.module}.lora equal to that of the origin.",
            )


def unchanged_base(
    run: Run,
    layers: Sequence[PipelineLayer],
    read: Read,
    dtype: torch.dtype,
    written: Collection[str] = (),
    *,
    whole: bool = False,
) -> Path | None:
    """Return the run file's model folder if it holds exactly the adapters' base weights.

    Weights are compared bit for bit in `dtype`; None if any differs.

    Args:
        layers: all layers of the module, or of all modules of the whole model, without memory for
            their weights.
        read: returns the unsharded tensors of a layer by the paths of its parameters.
        whole: `layers` are all modules of the whole model.
        written: LAYER/PARAMETER of tensors that the adapter folder contains, in addition to
            `layer.saved`.
    """
    sources = [
        source_of(run, name, "module") for name in dict.fromkeys(layer.module for layer in layers)
    ]
    first = sources[0]
    if first is None or any(one is None or one.folder != first.folder for one in sources):
        return None
    if not weight_files(first.folder) or (first.part is not None) != whole:
        return None
    known: dict[str, Mapping[str, torch.Tensor]] = {}  # tensors of the layer under comparison

    def compare(layer: PipelineLayer, path: str, whole: torch.Tensor) -> None:
        if path in layer.tied or path in layer.saved or f"{layer.name}/{path}" in written:
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
    return first.folder


class _Changed(Exception):
    """Raised when a weight differs from that of the folder."""


def stored_name(layer: PipelineLayer, path: str, part: Module | None = None) -> str:
    """Return peft's name in a file for an adapter's parameter, or for one trained in full.

    Args:
        part: the layer's module in the whole model, if the adapter covers the whole model.
    """
    name = layer.published_path(path)
    assert name is not None
    return f"{PREFIX}{name if part is None else part.name_in_whole(name)}"
