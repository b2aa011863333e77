"""Adapters in: folders as peft writes them, of one module or of a whole published model.

What is trained whole beside adapters is there too: `modules_to_save`, and the projector of a whole
model whose projectors are trained.
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

_SHOWN = 4  # names shown of many

#: A parameter that a folder of adapters has, by its name there: its layer, path and itself.
Named = Mapping[str, tuple[PipelineLayer, str, torch.nn.Parameter]]


def load_adapters(layers: Sequence[PipelineLayer], run: Run, fill: Fill | None = None) -> list[str]:
    """Give layers the adapters that the run file names (`lora.folder`), and the projector that a
    whole model's adapter has; returns notes for the user.

    Layers may be a stage's, of one TP rank, of any dtype, on any device.

    Raises:
        SpecError: an adapter is damaged, or of another model.
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
    """Set the adapters of some layers of a module, and what is trained whole beside them, from a
    folder, which must be of this very module, or of the whole model.

    Args:
        field: what names the folder, as the user wrote it.
        fill: what is done with a tensor, if it is not put into the layer's own parameter.
    """
    lora = read_configs(run)[module].lora
    assert lora is not None
    whole = bool(lora.within) and folder == lora.folder  # others are of one module
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
    """What names the folder of a module's adapters, as the user wrote it."""
    given = run.file.model.adapter
    if given is not None and run.resolve(given) == lora.folder:
        return "model.adapter"
    return f"model.modules.{lora.module}.lora.folder"


def _unknown(run: Run, part: Module | None, folder: Path, names: Set[str]) -> list[str]:
    """Those of an adapter's names, beside those of one module, that say nothing here.

    One over the whole model (`model.adapter`) has names of other modules and of the projector, too,
    and of parts of the model that no layer here has, such as blocks behind the one that is read.

    Args:
        part: which module of the whole model that one module is; None: the adapter is of it alone.

    Raises:
        SpecError: it has adapters of what has none here, such as the projector.
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
    """Names in a whole model's adapter of tensors for a run's layers, and of those layers' own
    weights."""
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
    """Tensors of an adapter over the whole model for parts that no layer here has.

    Attributes:
        tensors: by names in its file.
        numbers: r and lora_alpha by the places of linears.
    """

    tensors: Mapping[str, torch.Tensor]
    numbers: Mapping[str, tuple[int, int]]
    use_rslora: bool

    def change(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor of the whole model with its adapter added, or in its place the one that was
        trained whole."""
        place = name.removesuffix(".weight")
        if place not in self.numbers:
            return self.tensors.get(f"{PREFIX}{name}", tensor)
        r, alpha = self.numbers[place]
        a, b = (self.tensors[f"{PREFIX}{place}.{one}.weight"].float() for one in ADAPTER)
        scale = alpha / (math.sqrt(r) if self.use_rslora else r)
        return tensor.float() + scale * b @ a


def unread_of(run: Run) -> Unread:
    """Tensors in the adapter that a run starts from (`model.adapter`) for parts that no layer here
    has; nothing where there is none."""
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
    """Names in the whole model of a module's own parameters."""
    for layer in layers:
        for path, _ in layer.named_parameters():
            if layer.published_path(path) is not None:
                yield stored_name(layer, path, part)


def _weight(name: str) -> str:
    """The weight that an adapter's tensor belongs to; itself where it is trained whole."""
    place, adapter, _ = name.rpartition(".lora_")
    return f"{place}.weight" if adapter else name


def named(layers: Sequence[PipelineLayer], part: Module | None) -> Named:
    """What adapters' folders hold of some layers: adapters, and what is trained whole beside
    them.

    Args:
        part: which module of the whole model they are, if the folder is of such a one.
    """
    return {
        stored_name(layer, path, part): (layer, path, parameter)
        for layer in layers
        for path, parameter in layer.named_parameters()
        if is_adapter(path) or path in layer.saved
    }


def joint(layers: Sequence[PipelineLayer], part: Module) -> Named:
    """The parameters of a projector that the whole model has."""
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
    """Set a projector from the adapter over the whole model, where it has one."""
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
    """SpecError where an adapter names another model than the one that the module starts from."""
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
    """SpecError where adapters of an origin are not computed as a module's adapters are.

    Args:
        there: the numbers of its adapters (`NUMBERS`) that are known.
    """
    for name in NUMBERS:
        if name in there and there[name] != getattr(lora, name):
            raise SpecError(
                f"{argument('origin')}: the adapters in {origin} are others than those of"
                f" {lora.module}",
                f"{name}: {there[name]} there, {getattr(lora, name)} in the run file",
                f"Make model.modules.{lora.module}.lora as it was there.",
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
    """The folder that the run file names for a module or for a whole model, if it holds the weights
    that the adapters belong to, bit for bit in `dtype`, and no others.

    Args:
        layers: all layers of the module, or of all modules of the whole model, without memory for
            their weights.
        read: whole tensors of a layer by the paths of its parameters.
        whole: they are all modules of the whole model.
        written: LAYER/PARAMETER of what the adapter's folder has itself, beside `layer.saved`.
    """
    sources = [
        source_of(run, name, "module") for name in dict.fromkeys(layer.module for layer in layers)
    ]
    first = sources[0]
    if first is None or any(one is None or one.folder != first.folder for one in sources):
        return None
    if not weight_files(first.folder) or (first.part is not None) != whole:
        return None
    known: dict[str, Mapping[str, torch.Tensor]] = {}  # of the layer that is compared

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
    """A weight is not that of the folder."""


def stored_name(layer: PipelineLayer, path: str, part: Module | None = None) -> str:
    """What peft calls an adapter's parameter, or one that is trained whole, in a file.

    Args:
        part: which module of the whole model the layer is of, if that is what is adapted.
    """
    name = layer.published_path(path)
    assert name is not None
    return f"{PREFIX}{name if part is None else part.name_in_whole(name)}"
