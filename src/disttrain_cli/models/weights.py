"""Import of weights: layers load their tensors from the Hugging Face folders in the run file.

Only the tensors of the given layers are read, one at a time, each with the tensors of the files
that it results from; of one that is sharded over a TP group each rank keeps its shard. Parameters
that no published model has (projectors) are unchanged.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from disttrain_cli.errors import SpecError
from disttrain_cli.models.architectures import SCHEDULE, read_configs, scheduler_fields
from disttrain_cli.models.configs import ModuleConfig
from disttrain_cli.models.configs.noise import unread
from disttrain_cli.models.configs.wholes import whole_config
from disttrain_cli.models.conversion import Conversions
from disttrain_cli.models.division import by_ids, piece, shard_of, whole_shape
from disttrain_cli.models.graph import build_layers, layer_table
from disttrain_cli.models.layer import PipelineLayer
from disttrain_cli.models.published import Stored, Weights, locate, on_meta, weight_files
from disttrain_cli.spec.families.family import Module
from disttrain_cli.spec.families.folder import published_in
from disttrain_cli.spec.files import parse_json
from disttrain_cli.spec.hub import snapshot_of
from disttrain_cli.spec.runfile import Run
from disttrain_cli.spec.runfile.published import is_of, joins_as

_SHOWN = 4  # names listed in an error message
#: Supported storage dtypes, in safetensors' names; quantised values mean nothing without their
#: scales.
_STORED_AS = {"F64", "F32", "F16", "BF16"}


@dataclass(frozen=True)
class Source:
    """Published model from which some layers load their weights."""

    field: str  # as in the run file: "model.modules.llm.folder"
    folder: Path
    architecture: str
    config: Any
    otherwise: str = "set pretrained: false"  # next step if its weights do not fit
    part: Module | None = None  # the layers' module, if the folder holds a whole model
    joint: bool = False  # True if the folder has the projector's weights, too


#: Receives a layer, the path of one of its parameters, and its unsharded value; token ids without a
#: row are NaN.
Fill = Callable[[PipelineLayer, str, Tensor], None]


def load_into(
    layers: Sequence[PipelineLayer],
    run: Run,
    sources: Callable[[Run, str, str], Source | None] | None = None,
    fill: Fill | None = None,
) -> list[str]:
    """Load the published weights that the run file names into layers; return notes for the user.

    Layers may be those of one stage, of one TP rank, of any dtype, on any device.

    Args:
        sources: returns the source of a module's part; None: that of the run file (`source_of`).
        fill: receives each tensor; None: the tensor is copied into the layer's parameter.

    Raises:
        SpecError: weights are pickled, damaged or incomplete, or a tensor is missing or has another
            shape.
    """
    notes = []
    for (module, part), group in groupby(
        layers, key=lambda layer: (layer.module, layer.weights_of)
    ):
        layers_of_part = list(group)
        published = [layer for layer in layers_of_part if layer.published]
        source = (sources or source_of)(run, module, part)
        if published and source is not None:
            notes += _load(published, run, module, part, source, fill or fill_parameter)
        if source is not None and source.joint:
            _load_joint(layers_of_part, source, fill or fill_parameter)
    return notes


def starting_weights(run: Run, given: Collection[str] = (), training: bool = False) -> list[str]:
    """Return a sentence about each module's initial weights, and about unexpectedly random ones.

    Modules in `given` get their weights from elsewhere. The folder of a whole model may lack its
    weights for planning, but not for `training`.

    Raises:
        SpecError: a folder's weights are pickled, damaged or quantised, files that its index names
            are missing, or the folder of a whole model holds none.
    """
    notes = []
    for module, config in read_configs(run).items():
        for part in (
            *(() if module in given else ("module",)),
            *(("vae",) if config.vae is not None else ()),
        ):
            source = source_of(run, module, part)
            # weights of a Hugging Face name are downloaded before training begins
            named = source is not None and snapshot_of(source.folder) is not None
            if source is not None and not named and not weight_files(source.folder):
                if training and is_of(run.published, run.file.model, module):
                    raise SpecError(
                        f"model.folder: {source.folder} holds no weights",
                        "needed: model.safetensors, or its parts with their index",
                        f"Download the folder again; or start {module} from random weights: "
                        f"model.modules.{module}: {{pretrained: false}}",
                    )
                notes.append(
                    f"{source.field}: {source.folder} holds no weights; {module} starts from random"
                    " ones."
                )
            elif source is not None:
                if not named:  # before anything is measured for weights that cannot be loaded
                    _check_readable(source)
                whose = module if part == "module" else f"the VAE of {module}"
                notes.append(f"{source.field}: {whose} starts from the weights in {source.folder}.")
            elif part == "vae" and run.file.model.modules[module].vae_folder is None:
                notes.append(
                    f"{module}: vae_folder is not given; its VAE has random weights, and is never"
                    " trained."
                )
    for module, spec in run.file.model.modules.items():
        if spec.kind == "generator" and (left := unread(scheduler_fields(run, spec))):
            notes.append(
                f"{module}: not read of its {SCHEDULE}: {', '.join(left)}; no scheduler that is"
                " trained here has such fields."
            )
    if run.published is not None and not joins_as(run.published, run.file.model):
        notes.append(
            f"model.folder: modules or how they are joined are not those of {run.published.path};"
            " projectors start from random weights."
        )
    return notes


def _check_readable(source: Source) -> None:
    """Raise SpecError if a folder's weights are damaged, or quantised by its `config.json`."""
    with Weights(weight_files(source.folder)) as weights:
        if found := _quantised_in(weights, source):
            raise found


def source_of(run: Run, module: str, part: str) -> Source | None:
    """Return the source of a module's or its VAE's weights; None if it names no folder."""
    spec, config = run.file.model.modules[module], read_configs(run)[module]
    folder = spec.folder if part == "module" else spec.vae_folder
    if folder is None or not spec.pretrained:
        return None
    field = f"model.modules.{module}.{'folder' if part == 'module' else 'vae_folder'}"
    path = run.resolve(folder)
    whole = published_in(path) if part == "module" else None
    if whole is None:
        return Source(field, path, *published_as(config, part))
    return Source(
        field if folder != run.file.model.folder else "model.folder",
        path,
        whole.model_type,
        whole_config(whole),
        part=whole.family.part(module, config.kind),
        joint=joins_as(run.published, run.file.model),
    )


def published_as(config: ModuleConfig, part: str) -> tuple[str, Any]:
    """Return architecture and configuration of a module's published model, or of its VAE's."""
    return ("vae", config.vae) if part == "vae" else (config.architecture, config.config)


def published_shapes(layers: Iterable[PipelineLayer]) -> dict[str, tuple[int, ...]]:
    """Return the unsharded shapes of the layers' published tensors, by published name."""
    shapes = {}
    for layer in layers:
        blank = {
            path: torch.empty(whole_shape(parameter), device="meta")
            for path, parameter in layer.named_parameters()
        }
        shapes.update(
            {name: tuple(tensor.shape) for name, tensor in layer.to_published(blank).items()}
        )
    return shapes


def module_layers(run: Run, module: str) -> list[PipelineLayer]:
    """Return all layers of a module, without memory for their weights."""
    positions = [index for index, info in enumerate(layer_table(run)) if info.module == module]
    return build_layers(run, positions[0], positions[-1] + 1, device="meta")


def _load(
    layers: Sequence[PipelineLayer], run: Run, module: str, part: str, source: Source, fill: Fill
) -> list[str]:
    files = weight_files(source.folder)
    if not files:  # `starting_weights` reports it
        return []
    conversions = Conversions(on_meta(source.architecture, source.config))
    of_part = [layer for layer in module_layers(run, module) if layer.weights_of == part]
    in_class = {
        name: name if source.part is None else source.part.name_in_whole(name)
        for name in published_shapes(of_part) | published_shapes(layers)
    }
    # a folder with tied embedding and head holds the embedding only: the head is, or, if this run
    # does not tie them, starts as, a copy of it
    head, body = conversions.head or ("", "")
    ties = any(layer.tied for layer in of_part)
    with Weights(files) as weights:
        wanted = {*in_class.values(), *((body,) if head in in_class.values() else ())}
        located = locate(weights, wanted, conversions)
        copied = head in wanted and head not in located and body in located
        if any(layer.tied for layer in layers) and {head, body} <= located.keys():
            _check_equal(located[head], located[body], source, module)
        if copied and not ties and not _ties(source):
            raise _lacking([head], weights, source)
        if copied:
            located[head] = located[body]
        stored = {name: located[now] for name, now in in_class.items() if now in located}
        shapes, by_id = published_shapes(layers), _by_id(layers)
        asked = by_id if "vocab_size" in (run.file.model.modules[module].config or {}) else set()
        new = max(_check(shapes, stored, weights, source, conversions, asked), default=0)
        for layer in layers:
            for path, whole in layer.from_published(
                lambda name: (
                    _read(stored[name], shapes[name]) if name in by_id else stored[name].read()
                )
            ):
                fill(layer, path, whole)
        read = {name for one in located.values() for name in one.sources}
        others = {name: name for name in weights.names if name not in read}
        unused = sorted(
            {
                unread
                for name, conversion in conversions.to_class(others).items()
                if _belongs(name, part, source.part)
                for unread in conversion.sources
            }
        )
    said = [f"{module}: weights from {source.folder}."]
    if copied and not ties:
        said.append(f"{module}: there is no {head}; it starts as a copy of {body}.")
    if new:
        said.append(
            f"{module}: {new} token ids are new to {source.folder}; their rows start at random."
        )
    if unused:
        more = f" and {len(unused) - _SHOWN} more" if len(unused) > _SHOWN else ""
        said.append(f"{module}: not used of {source.folder}: {', '.join(unused[:_SHOWN])}{more}.")
    return said


def _belongs(name: str, part: str, module: Module | None) -> bool:
    """Return True if a tensor of the folder is expected to be read by a module.

    A VAE's decoder is loaded only for image generation. In the folder of a whole model other
    tensors belong to other modules, and some of a tower's follow the block whose output is read.
    """
    if part != "module" or module is None:
        return part == "module"
    prefixes = tuple(f"{prefix}." for prefix in module.names.values())
    return module.kind == "llm" and name.startswith(prefixes)


def _load_joint(layers: Sequence[PipelineLayer], source: Source, fill: Fill) -> None:
    """Load the weights of a projector that the whole model has."""
    assert source.part is not None
    ours = [
        (layer, path, parameter)
        for layer in layers
        for path, parameter in layer.named_parameters()
        if layer.published_path(path) is None
    ]
    files = weight_files(source.folder) if ours else []
    if not files:
        return
    conversions = Conversions(on_meta(source.architecture, source.config))
    with Weights(files) as weights:
        there = conversions.to_class({name: name for name in weights.names})
        names = {path: source.part.joint_in_whole(path) for _, path, _ in ours}
        shapes = {names[path]: whole_shape(parameter) for _, path, parameter in ours}
        stored = {name: Stored(weights, there[name], name) for name in shapes if name in there}
        list(_check(shapes, stored, weights, source, conversions))
        for layer, path, _ in ours:
            fill(layer, path, stored[names[path]].read())


def _check(
    shapes: Mapping[str, tuple[int, ...]],
    stored: Mapping[str, Stored],
    weights: Weights,
    source: Source,
    conversions: Conversions,
    by_id: Collection[str] = (),
) -> Iterator[int]:
    """Raise SpecError for missing tensors, wrong shapes and unsupported dtypes.

    Yields the number of rows that tensors `by_id` lack, whose size the run file itself sets.
    """
    missing = [name for name in shapes if name not in stored]
    if missing:
        raise _lacking(missing, weights, source)
    for name, expected in shapes.items():
        one = stored[name]
        if conversions.tensors[one.name].is_floating_point():
            for source_name in one.sources:
                if weights.stored_as(source_name) not in _STORED_AS:
                    raise _quantised(source_name, weights, source)
        given = one.shape
        if given == expected:
            continue
        if name in by_id and given and given[1:] == expected[1:] and given[0] < expected[0]:
            yield expected[0] - given[0]
        elif missing := _missing_of(one, conversions):
            raise _lacking(missing, weights, source)
        else:
            said = f"given {list(given)}" if given else "given tensors that do not fit each other"
            raise SpecError(
                f"{source.field}: a tensor of {source.folder} has another shape",
                f"{one.label}: {said}, expected {list(expected)}",
                "Make the fields of config those of the folder's config.json, or"
                f" {source.otherwise}.",
            )


def _missing_of(one: Stored, conversions: Conversions) -> list[str]:
    """Return names in files that a tensor lacks, such as an expert's; files hold others of it."""
    expected = next(
        (
            conversion.shapes(lambda name: conversions.tensors[name].shape)
            for conversion in conversions.to_files(conversions.tensors)
            if one.name in conversion.sources
        ),
        {},
    )
    missing = [name for name in expected if not any(n.endswith(name) for n in one.sources)]
    return missing if len(missing) < len(expected) else []


def _check_equal(head: Stored, body: Stored, source: Source, module: str) -> None:
    """Raise SpecError if a folder's embedding and head differ; only one could be trained."""
    if head.shape != body.shape or not torch.equal(head.read(), body.read()):
        raise SpecError(
            f"{source.field}: the embedding and the head in {source.folder} are not tied",
            f"{head.label} differs from {body.label}, and tie_word_embeddings is true",
            f"Set tie_word_embeddings: false in model.modules.{module}.config to train both, or"
            f" {source.otherwise}.",
        )


def _lacking(missing: Sequence[str], weights: Weights, source: Source) -> SpecError:
    """Return the error for missing tensors: perhaps their quantised form is there."""
    if found := _quantised_in(weights, source):
        return found
    more = f" and {len(missing) - _SHOWN} more" if len(missing) > _SHOWN else ""
    return SpecError(
        f"{source.field}: the weights in {source.folder} lack tensors",
        f"missing: {', '.join(missing[:_SHOWN])}{more}; there are {len(weights.names)} tensors",
        f"Give the folder of a model of this architecture and size, or {source.otherwise}.",
    )


def _quantised_in(weights: Weights, source: Source) -> SpecError | None:
    """Return the error for the first quantised tensor of a folder, if its `config.json` has any."""
    config = source.folder / "config.json"
    if config.is_file() and "quantization_config" in parse_json(config, "model configuration", ""):
        for name in weights.names:
            if weights.stored_as(name) not in _STORED_AS:
                return _quantised(name, weights, source)
    return None


def _quantised(name: str, weights: Weights, source: Source) -> SpecError:
    return SpecError(
        f"{source.field}: a tensor of {source.folder} is not stored as plain numbers",
        f"{name}: {weights.stored_as(name)}; read are {', '.join(sorted(_STORED_AS))}",
        f"Give the folder of the model before it was quantised, or {source.otherwise}.",
    )


def _ties(source: Source) -> bool:
    """Return True if a folder's own configuration ties its LLM's head and embedding.

    If the field is missing, the class's default counts.
    """
    if source.part is not None:
        return bool(source.config.tie_word_embeddings)
    fields = parse_json(
        source.folder / "config.json", "model configuration", f"Download {source.folder} again."
    )
    default = getattr(type(source.config), "tie_word_embeddings", False)
    return bool(fields.get("tie_word_embeddings", default))


def _by_id(layers: Iterable[PipelineLayer]) -> set[str]:
    """Return the published names of tensors with a row per token id.

    Ids without a row in the folder (a tokenizer's new ones) start at random.
    """
    return {
        name
        for layer in layers
        for path, _ in layer.named_parameters()
        if by_ids(layer.division, path.rpartition(".")[0])
        and (name := layer.published_name(path)) is not None
    }


def _read(stored: Stored, shape: tuple[int, ...]) -> Tensor:
    """Return a tensor by token id, padded with rows of NaN if it has too few.

    Raises:
        SpecError: it contains NaN, which would be mistaken for padding.
    """
    tensor = stored.read()
    if tensor.isnan().any():
        raise SpecError(
            f"The weights {stored.label} are damaged",
            "some of them are NaN",
            "Start from other weights.",
        )
    rows = shape[0] - len(tensor)
    return torch.cat([tensor, tensor.new_full((rows, *shape[1:]), math.nan)]) if rows else tensor


def fill_parameter(layer: PipelineLayer, path: str, whole: Tensor) -> None:
    """Set a layer's parameter, or its shard of it."""
    parameter = layer.get_parameter(path)
    put(parameter, piece(whole, shard_of(parameter)), layer, path)


@torch.no_grad()
def put(values: Tensor, local: Tensor, layer: PipelineLayer, path: str) -> None:
    """Set values of a parameter; rows of token ids that the source lacks are unchanged."""
    local = local.to(values)
    values.copy_(
        torch.where(local.isnan(), values, local)
        if by_ids(layer.division, path.rpartition(".")[0])
        else local
    )
