"""Initial weights from another run's checkpoint or a `disttrain export` folder (`train --from`).

Such a run begins at step 0 with a fresh optimizer and with the model, data, schedule and layout of
its run file. Modules are matched by name: one that the origin contains takes all of its weights,
and its projector's, from there; any other starts as it would without an origin. For a generator's
VAE, the run file's folder takes precedence.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from disttrain_cli.calls import argument, call
from disttrain_cli.errors import SpecError
from disttrain_cli.runtime.checkpoints.folder import (
    DESCRIPTION,
    TENSORS,
    changed_since,
    check_tied,
    describe,
    held,
    latest,
    newly_trained,
)
from disttrain_cli.spec.adapter import BASE, CONFIG, read_fields
from disttrain_cli.spec.families.folder import published_in
from disttrain_cli.spec.files import parse_json
from disttrain_cli.spec.runfile import Run, read_run

if TYPE_CHECKING:
    from torch import Tensor

    from disttrain_cli.models.layer import PipelineLayer
    from disttrain_cli.models.weights import Fill, Source
    from disttrain_cli.runtime.engine.engine import UnitEngine

EXPORT, JOINTS = "model.json", "projectors.safetensors"
SHOWN = 8  # tensors named of many
ANEW = "give the module another name, so that it starts from random weights"


def find(given: Path) -> Path:
    """Return the checkpoint or export folder that the user named, directly or by a run.

    A run is named by its folder or its run file.

    Raises:
        SpecError: there is none.
    """
    named = given / "disttrain.yaml" if (given / "disttrain.yaml").is_file() else given
    root = read_run(named).dir.root if named.is_file() else named
    path = (
        root
        if any((root / name).is_file() for name in (DESCRIPTION, EXPORT))
        else (latest(root / "checkpoints") or latest(root))
    )
    if path is None:
        raise SpecError(
            f"There are no weights to start from in {given}",
            f"looked for: a checkpoint in {root / 'checkpoints'}; {DESCRIPTION}, or {EXPORT} of an"
            " export",
            f"A whole model: set model.folder: {given} in the run file."
            if published_in(given) is not None
            else f"An adapter over a whole model: set model.adapter: {given} in the run file."
            if (given / CONFIG).is_file()
            else "Name the folder of a run (runs/NAME), of a checkpoint, or one that disttrain"
            " export wrote.",
        )
    return path.resolve()


def where(folder: Path, root: Path) -> Path:
    """Return the folder of an origin, also if a fresh start has moved it.

    A fresh start moves the checkpoints of the same run to `earlier/`, in the run's folder or, where
    they are on another disk, in their own.
    """
    if folder.exists():
        return folder
    moved = [
        *(root / "earlier").glob(f"*/checkpoints/{folder.name}"),
        *(root / "checkpoints" / "earlier").glob(f"*/{folder.name}"),
    ]
    return max(moved, default=folder)


def modules_in(run: Run, folder: Path) -> list[str]:
    """Return the run's modules whose weights an origin contains, in pipeline order.

    Raises:
        SpecError: its description is damaged, or it contains none of them.
    """
    theirs = _modules(run, folder)
    modules = [name for name in run.file.model.order if name in theirs]
    if not modules:
        raise SpecError(
            f"{folder} has no weights of this model",
            f"modules there: {', '.join(sorted(theirs))}; here: {', '.join(run.file.model.order)}",
            "Give the modules of the run file the names they had.",
        )
    return modules


def given_layers(run: Run, folder: Path) -> frozenset[str]:
    """Return the names of the layers that take their weights from an origin."""
    from disttrain_cli.models.graph import layer_table
    from disttrain_cli.models.weights import source_of

    modules = modules_in(run, folder)
    own_vae = {name for name in modules if source_of(run, name, "vae") is not None}
    return frozenset(
        info.name
        for info in layer_table(run)
        if info.module in modules and not (info.frozen and info.module in own_vae)
    )


def check(run: Run, folder: Path) -> list[str]:
    """Compare an origin's tensors with the model; describe each module's initial weights.

    Returns a sentence per module.

    Raises:
        SpecError: a tensor is missing or has another shape; the origin is damaged or contains
            nothing of this model; latents were prepared with another VAE than the origin's.
    """
    from disttrain_cli.models.graph import build_layers, layer_table
    from disttrain_cli.models.tying import shared_names

    taken, given = modules_in(run, folder), given_layers(run, folder)
    _check_latents(run, folder, taken)
    _check_adapted(run, folder, taken)
    layers = [
        layer
        for index, info in enumerate(layer_table(run))
        if info.name in given
        for layer in build_layers(run, index, index + 1, device="meta")
    ]
    if _is_checkpoint(folder):
        with held(folder):
            _check_stored(folder, layers)
            check_tied(folder, shared_names(layer_table(run)))
        notes = [f"{name}: weights from {folder}." for name in taken]
    else:
        notes = _from_export(folder, run, layers, lambda layer, path, whole: None)
    for name in run.file.model.order:
        spec = run.file.model.modules[name]
        if name not in taken:
            start = (
                f"starts from {spec.folder}"
                if spec.folder and spec.pretrained
                else "starts from random weights"
            )
            notes.append(f"{name}: not in {folder}; {start}.")
    unused = sorted(_modules(run, folder) - set(taken))
    return [*notes, *([f"Not used of {folder}: {', '.join(unused)}."] if unused else [])]


def adapted_in(folder: Path) -> set[str]:
    """Return the names of the modules for which an origin has adapters."""
    from disttrain_cli.models.layer import is_adapter

    if not _is_checkpoint(folder):
        return {path.parent.name for path in folder.glob(f"*/{CONFIG}")}
    described = parse_json(folder / TENSORS, "list of weights", _another(folder))
    keys = (key.split("/", 2) for key in described["tensors"])
    return {key[1].partition(".")[0] for key in keys if len(key) == 3 and is_adapter(key[2])}


def _check_adapted(run: Run, folder: Path, modules: list[str]) -> None:
    """Raise SpecError where an origin's adapters differ from the run's, or the run has none."""
    from disttrain_cli.models.adapters import check_alike
    from disttrain_cli.models.architectures import read_configs

    for name in sorted(adapted_in(folder).intersection(modules)):
        lora = read_configs(run)[name].lora
        if lora is None:
            raise SpecError(
                f"{folder} has adapters of {name}, which has none here",
                f"model.modules.{name}.lora is not given",
                "Give it the lora that it had; or export with"
                f" {argument('merge', True)}, and start from what that wrote.",
            )
        there = (
            describe(folder).get("adapters", {}).get(name, {})
            if _is_checkpoint(folder)
            else read_fields(folder / name, argument("origin"))
        )
        check_alike(lora, there, folder)


def _check_latents(run: Run, folder: Path, modules: list[str]) -> None:
    """Raise SpecError where a generator's cached latents come from a randomly initialised VAE.

    Such a VAE depends on this run's seed, so that the origin's weights do not match its latents.
    """
    from disttrain_cli.models.weights import source_of

    for name in modules:
        if run.file.model.modules[name].cached_latents and source_of(run, name, "vae") is None:
            raise SpecError(
                f"The latents of {name} are not those that the weights in {folder} know",
                f"{call('data_latents')} draws the weights of its VAE from this run's seed",
                f"Set model.modules.{name}.vae_folder to the VAE of that run ({call('export')}"
                " writes it), or cached_latents: false.",
            )


def starts(run: Run, folder: Path | None, resume: bool) -> list[str]:
    """Return sentences on the sources of weights and moments and on changed run-file fields.

    Args:
        folder: origin of the weights; None = none.
        resume: True to continue from the newest checkpoint, if there is one.

    Raises:
        SpecError: an origin, the newest checkpoint, or the folder of a module does not fit the
            model.
    """
    from disttrain_cli.models.adapters import check_adapters
    from disttrain_cli.models.graph import layer_table
    from disttrain_cli.models.tying import shared_names
    from disttrain_cli.models.weights import starting_weights

    newest = latest(run.dir.checkpoints) if resume else None
    if newest is None:
        notes, given = ([], []) if folder is None else (check(run, folder), modules_in(run, folder))
        adapted = set() if folder is None else adapted_in(folder)
        notes += check_adapters(run, [one for one in run.file.model.order if one not in adapted])
    else:
        check_tied(newest, shared_names(layer_table(run)))
        fresh, given = newly_trained(newest, run.file.model.trained_names), run.file.model.order
        notes = changed_since(run.dir.checkpoints, run)
        if fresh:
            notes.append(
                f"{', '.join(fresh)}: frozen up to {newest.name}, trained from here on; moments"
                " start at zero."
            )
    return notes + starting_weights(run, given, training=True)


def start_from(folder: Path, engine: UnitEngine, run: Run) -> None:
    """Load this rank's weights from an origin of any layout.

    Every rank calls this before its first step.

    Raises:
        SpecError: it is damaged, or lacks a tensor of the model.
    """
    from disttrain_cli.models.adapters import load_adapters
    from disttrain_cli.models.tying import stored_name
    from disttrain_cli.models.weights import put
    from disttrain_cli.runtime.checkpoints.checkpoint import load_weights
    from disttrain_cli.runtime.checkpoints.owning import WEIGHT, wanted

    given, adapted = given_layers(run, folder), adapted_in(folder)
    pieces = {key: one for key, one in wanted(engine).items() if key.split("/", 2)[1] in given}
    layers = [layer for layer in engine.module.layers if layer.name in given]

    def fill(layer: PipelineLayer, path: str, whole: Tensor) -> None:
        one = pieces[f"{WEIGHT}/{stored_name(layer, path)}"]
        for offsets, values in one.boxes:
            lines = tuple(
                slice(at, at + size) for at, size in zip(offsets, values.shape, strict=True)
            )
            put(values, whole[lines], layer, path)

    if _is_checkpoint(folder):
        try:
            load_weights(
                folder, {key: one for key, one in pieces.items() if not _is_new(key, adapted)}
            )
        except SpecError as error:
            raise SpecError(error.what, error.why, _another(folder)) from None
    else:
        _from_export(folder, run, layers, fill)
    load_adapters([layer for layer in layers if layer.module not in adapted], run, fill)


def _is_checkpoint(folder: Path) -> bool:
    return (folder / DESCRIPTION).exists()


def _modules(run: Run, folder: Path) -> set[str]:
    """Return the names of all modules that an origin contains."""
    name, key = (TENSORS, "tensors") if _is_checkpoint(folder) else (EXPORT, "modules")
    described = parse_json(folder / name, "list of weights", _another(folder))
    listed = described.get(key) if isinstance(described, dict) else None
    if not isinstance(listed, dict):
        raise SpecError(f"{folder} is damaged", f"{name} lists no {key}", _another(folder))
    if name == EXPORT:
        return {
            name
            for name, about in listed.items()
            if isinstance(about, dict) and about.get("kind") != "vae"
        }
    layers = {key.split("/", 2)[1] for key in listed if key.startswith("weight/")}
    order = run.file.model.order
    return {
        next((name for name in order if layer.startswith(f"{name}.")), layer.partition(".")[0])
        for layer in layers
    }


def _check_stored(folder: Path, layers: list[PipelineLayer]) -> None:
    """Raise SpecError where a checkpoint's tensor list is damaged or does not fit these layers."""
    from disttrain_cli.models.division import whole_shape
    from disttrain_cli.models.layer import is_adapter
    from disttrain_cli.runtime.checkpoints.owning import WEIGHT, named_parameters
    from disttrain_cli.runtime.checkpoints.storage import damaged, misfits, read_metadata

    try:
        files = describe(folder)["files"]
    except SpecError as error:
        raise SpecError(error.what, error.why, _another(folder)) from None
    # The ranks verify the contents of the other files, each some of them.
    problems = misfits(folder, files) or damaged(folder, {TENSORS: files[TENSORS]})
    if problems:
        raise SpecError(
            f"The checkpoint {folder} is damaged", "\n".join(problems), _another(folder)
        )
    stored = read_metadata(folder).state_dict_metadata
    adapted = adapted_in(folder)
    expected = {
        key: whole_shape(parameter)
        for name, parameter in named_parameters(layers)
        if not _is_new(key := f"{WEIGHT}/{name}", adapted)
    }
    _compare(folder, expected, {key: tuple(one.size) for key, one in stored.items()})
    names = {layer.name for layer in layers}
    unknown = [
        key
        for key in stored
        if key.startswith(f"{WEIGHT}/")
        and key.split("/", 2)[1] in names
        and is_adapter(key)
        and key not in expected
    ]
    if unknown:
        raise SpecError(
            f"{folder} has adapters of layers that have none here",
            ", ".join(unknown[:SHOWN]),
            "Set lora.target_modules to those of that run.",
        )


def _is_new(key: str, adapted: set[str]) -> bool:
    """Return True if a weight belongs to an adapter of a module that had none in the origin."""
    from disttrain_cli.models.layer import is_adapter

    _, layer, path = key.split("/", 2)
    return is_adapter(path) and layer.partition(".")[0] not in adapted


def _compare(
    folder: Path, expected: dict[str, tuple[int, ...]], there: dict[str, tuple[int, ...]]
) -> None:
    lacking = [key for key in expected if key not in there]
    other = [key for key in expected if key in there and there[key] != tuple(expected[key])]
    if lacking or other:
        lines = [f"{key}: missing" for key in lacking] + [
            f"{key}: {list(there[key])} there, {list(expected[key])} in the model" for key in other
        ]
        more = [f"and {len(lines) - SHOWN} more"] if len(lines) > SHOWN else []
        raise SpecError(
            f"{len(lines)} tensors of the model are not in {folder}, or have another shape",
            "\n".join(lines[:SHOWN] + more),
            f"Set config to that of the origin, or {ANEW}.",
        )


def _from_export(folder: Path, run: Run, layers: list[PipelineLayer], fill: Fill) -> list[str]:
    """Pass the layers' tensors of an export to `fill`; return notes for the user.

    Raises:
        SpecError: weights are missing or damaged, or a tensor has another shape.
    """
    from disttrain_cli.models.adapters import fill_adapters
    from disttrain_cli.models.architectures import read_configs
    from disttrain_cli.models.division import whole_shape
    from disttrain_cli.models.published import Weights, weight_files
    from disttrain_cli.models.weights import Source, load_into, published_as

    adapted = adapted_in(folder)

    def source(run: Run, module: str, part: str) -> Source:
        of_part = folder / (module if part == "module" else f"{module}_vae")
        if part == "module" and module in adapted:
            of_part = base_of(folder, module)
        if not weight_files(of_part):
            raise SpecError(
                f"There are no weights of {of_part.name} in {folder}", "", _another(folder)
            )
        return Source(
            argument("origin"),
            of_part,
            *published_as(read_configs(run)[module], part),
            otherwise=ANEW,
        )

    notes = load_into(layers, run, source, fill)
    ours = [
        (layer, path, parameter)
        for layer in layers
        for path, parameter in layer.named_parameters()
        if layer.published_path(path) is None
    ]
    if ours:
        with Weights([folder / JOINTS] if (folder / JOINTS).exists() else []) as weights:
            _compare(
                folder / JOINTS,
                {f"{layer.name}.{path}": whole_shape(p) for layer, path, p in ours},
                {name: weights.shape(name) for name in weights.names},
            )
            for layer, path, _ in ours:
                fill(layer, path, weights.read(f"{layer.name}.{path}"))
    for module in adapted:
        mine = [layer for layer in layers if layer.module == module]
        if mine:
            fill_adapters(mine, run, module, folder / module, argument("origin"), fill)
            notes.append(f"{module}: adapters from {folder / module}.")
    return notes


def base_of(folder: Path, module: str) -> Path:
    """Return the folder of an exported adapter's base model: in the export, or per its config."""
    beside = folder / f"{module}_base"
    if beside.exists():
        return beside
    described = parse_json(folder / module / CONFIG, "adapter configuration", _another(folder))
    base = described.get(BASE) if isinstance(described, dict) else None
    if not isinstance(base, str) or not Path(base).is_dir():
        raise SpecError(
            f"The model that the adapter in {folder / module} belongs to is not there",
            f"{BASE}: {base}",
            f"Correct it in {folder / module / CONFIG}.",
        )
    return Path(base)


def _another(folder: Path) -> str:
    return f"Name another checkpoint or export than {folder}."
