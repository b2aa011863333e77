"""Export of a checkpoint to Hugging Face folders: one per module, and the projectors between them.

    OUT/MODULE/                  config.json and safetensors, and tokenizer and preprocessor files
                                 where the run had them; of a module with LoRA adapter_config.json
                                 and adapter_model.safetensors
    OUT/MODULE_base/             the weights that an adapter belongs to, where no folder of the run
                                 file holds them
    OUT/MODULE_vae/              the generator's VAE, as given
    OUT/projectors.safetensors   parameters of projectors, as LAYER.PARAMETER
    OUT/model.json, README.md    how the parts are joined

A run of a complete published model (`model.folder`) becomes one folder of the same kind instead;
with LoRA one adapter for it, and in OUT/base its base model where that is not `model.folder`.
"""

from __future__ import annotations

import copy
import json
import os
import shutil
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel
from torch import Tensor

from disttrain_cli.calls import argument, call
from disttrain_cli.data.tokenizer import NONE, Tokenizer, read_tokenizer
from disttrain_cli.errors import SpecError
from disttrain_cli.models.adapter_folder import Adapted, one_adapter, write_adapter
from disttrain_cli.models.adapters import unchanged_base
from disttrain_cli.models.architectures import SCHEDULE, read_configs, scheduler_fields
from disttrain_cli.models.configs import ModuleConfig
from disttrain_cli.models.configs.noise import published_schedule
from disttrain_cli.models.export import (
    Read,
    Written,
    import_path,
    write_model,
    write_own,
)
from disttrain_cli.models.graph import layer_table
from disttrain_cli.models.layer import PipelineLayer
from disttrain_cli.models.lora import merged
from disttrain_cli.models.published import on_meta, published_class
from disttrain_cli.models.tying import untie
from disttrain_cli.models.vae import decoder_maker, encoder_maker
from disttrain_cli.models.weights import load_into, module_layers, source_of
from disttrain_cli.runtime.checkpoints import checkpoint
from disttrain_cli.runtime.checkpoints.folder import all_of, check_belongs, latest, model_of
from disttrain_cli.runtime.outputs.companions import write_companions
from disttrain_cli.runtime.outputs.whole import generating, write_over, write_published
from disttrain_cli.spec.progress import Progress, silent
from disttrain_cli.spec.runfile import Run
from disttrain_cli.spec.runfile.published import is_all


class ExportedModule(BaseModel):
    """Folder that was written for a module."""

    folder: str
    loads_with: str
    parameters: int
    averaged: bool = False
    base: str | None = None  # folder of the model that an adapter belongs to


class Exported(BaseModel):
    """Output of `export --json`."""

    path: str
    checkpoint: str
    step: int
    modules: dict[str, ExportedModule]
    projectors: str | None
    generates_with: str | None = None  # a command, where transformers loads the complete model


def export(
    run: Run,
    to: Path,
    *,
    step: int | None = None,
    ema: bool = False,
    merge: bool = False,
    progress: Progress = silent,
) -> Exported:
    """Write a checkpoint's modules into the new folder `to`, atomically.

    A run of a complete published model becomes a folder like it. Weights have the precision of the
    training (`train.precision`). At most one weight file's tensors are in memory.

    Args:
        step: of the checkpoint; None = the newest.
        ema: write the moving averages of the modules that have them.
        merge: write complete weights with LoRA adapters added, in place of the adapters.

    Raises:
        SpecError: there is no such checkpoint, it is damaged or without averages, or `to` exists.
        MismatchError: the checkpoint is of another model.
    """
    folder = _checkpoint(run, step)
    number = check_belongs(folder, model_of(run))
    if to.exists():
        raise SpecError(
            f"{to} exists",
            "An export writes a new folder and overwrites nothing.",
            "Name another folder, or move this one away.",
        )
    progress("checking the checkpoint", 0, 0)
    with checkpoint.opened(folder) as opened:
        averaged = _averaged(run, opened, folder) if ema else set()
        modules, projectors, generates_with = _write(run, opened, to, averaged, merge, progress)
    return Exported(
        path=str(to),
        checkpoint=str(folder),
        step=number,
        modules=modules,
        projectors=projectors,
        generates_with=generates_with,
    )


def _write(
    run: Run,
    opened: checkpoint.Opened,
    to: Path,
    averaged: Collection[str],
    merge: bool,
    progress: Progress,
) -> tuple[dict[str, ExportedModule], str | None, str | None]:
    """Write the folder; return its `modules`, `projectors` and `generates_with`."""
    dtype = torch.bfloat16 if run.file.train.precision == "bf16" else torch.float32

    def read(layer: PipelineLayer) -> dict[str, Tensor]:
        group = "ema" if layer.module in averaged else "weight"
        tensors = opened.read([layer.name], (group,))
        return {key.split("/", 2)[2]: tensor for key, tensor in tensors.items()}

    configs = read_configs(run)
    whole = _with_adapters(configs, read)
    published = run.published
    apart = not merge and any(module.lora for module in configs.values())
    if (
        published is not None
        and is_all(published, run.file.model)
        and (not apart or one_adapter(configs))
    ):
        progress("writing", 0, 1)
        with _whole_folder(to, made=False) as temporary:
            about = (temporary, run, published, opened.names())
            if apart:
                one, over = write_over(*about, read, dtype, to.resolve())
            else:
                one, over = write_published(*about, whole, dtype, merge), None
        progress("writing", 1, 1)
        single = ExportedModule(**{**vars(one), "folder": "."}, averaged=bool(averaged), base=over)
        generates = generating(to, None if over is None else to / over)
        return {published.model_type: single}, None, generates
    modules, exported, tokenizer = dict[str, ExportedModule](), [], read_tokenizer(run)
    with _whole_folder(to) as temporary:
        for done, (name, module) in enumerate(configs.items()):
            progress(f"writing {name}", done, len(configs))
            layers = [layer for layer in module_layers(run, name) if layer.weights_of == "module"]
            untie(layers, opened.names())
            exported += layers
            config = module.config
            if module.kind == "llm":  # the tokens where generate() begins and ends
                config = copy.deepcopy(config)
                config.bos_token_id, config.eos_token_id = tokenizer.bos, tokenizer.eos
            module = replace(module, config=config)
            known = (module, layers, read, dtype)
            base: str | None = None
            if module.lora is None or merge:
                written = _write_module(run, temporary / name, module, layers, whole, dtype)
            elif folder_of := unchanged_base(run, layers, read, dtype):
                written, base = _write_adapter(temporary / name, *known, folder_of), str(folder_of)
            else:
                base = f"{name}_base"
                _write_module(run, temporary / base, *known)
                written = _write_adapter(temporary / name, *known, to.resolve() / base)
            modules[name] = ExportedModule(**vars(written), averaged=name in averaged, base=base)
            if module.vae is not None:
                modules[f"{name}_vae"] = ExportedModule(
                    **vars(_write_vae(run, module, temporary / f"{name}_vae"))
                )
        shapes = write_own(temporary / "projectors.safetensors", exported, read, dtype)
        _write_joints(run, temporary, modules, exported, shapes, tokenizer)
    progress("writing", len(configs), len(configs))
    return modules, str(to / "projectors.safetensors") if shapes else None, None


def _checkpoint(run: Run, step: int | None) -> Path:
    there = all_of(run.dir.checkpoints)
    folder = (
        latest(run.dir.checkpoints) if step is None else run.dir.checkpoints / f"step-{step:06d}"
    )
    if folder is None or folder not in there:
        what = (
            "There is no checkpoint"
            + ("" if step is None else f" of step {step}")
            + f" in {run.dir.checkpoints}"
        )
        steps = ", ".join(str(int(path.name.removeprefix("step-"))) for path in there)
        raise SpecError(
            what,
            f"steps there: {steps}" if there else "",
            "" if there else f"Train first: {call('train')}",
        )
    return folder


def _averaged(run: Run, opened: checkpoint.Opened, folder: Path) -> set[str]:
    """Return the modules that have moving averages in the checkpoint."""
    layers = opened.layers("ema")
    modules = {info.module for info in layer_table(run) if info.name in layers}
    if not modules:
        raise SpecError(
            f"The checkpoint {folder} has no moving averages",
            "train.ema of the run file asks for them.",
            f"Export without {argument('ema', True)} for the weights themselves.",
        )
    return modules


@contextmanager
def _whole_folder(to: Path, made: bool = True) -> Iterator[Path]:
    """Yield a temporary folder that is renamed to `to` at the end, or removed after a failure.

    Args:
        made: True to create it; False if the caller does.
    """
    temporary = to.with_name(f".{to.name}.partial")
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        (temporary if made else temporary.parent).mkdir(parents=True, exist_ok=True)
        yield temporary
        os.replace(temporary, to)
    except OSError as error:
        raise SpecError(
            f"Cannot write {to}", str(error), "Free space there or choose another folder."
        ) from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _with_adapters(configs: Mapping[str, ModuleConfig], read: Read) -> Read:
    """Return a reader of the same weights with modules' adapters merged into them."""

    def whole(layer: PipelineLayer) -> Mapping[str, Tensor]:
        lora, tensors = configs[layer.module].lora, read(layer)
        return tensors if lora is None else merged(layer, lora, tensors)

    return whole


def _write_adapter(
    folder: Path,
    module: ModuleConfig,
    layers: Sequence[PipelineLayer],
    read: Read,
    dtype: torch.dtype,
    base: Path,
) -> Written:
    """Write a module's adapters; the class that loads them is that of their base."""
    model = on_meta(module.architecture, module.config)
    count = write_adapter(folder, [Adapted(module, layers)], model, read, dtype, base)
    return Written(folder.name, import_path(published_class(module.architecture)), count)


def _write_module(
    run: Run,
    folder: Path,
    module: ModuleConfig,
    layers: Sequence[PipelineLayer],
    read: Read,
    dtype: torch.dtype,
) -> Written:
    written = write_model(folder, module.architecture, module.config, layers, read, dtype)
    _write_beside(run, module, folder)
    return written


def _write_beside(run: Run, module: ModuleConfig, folder: Path) -> None:
    spec = run.file.model.modules[module.name]
    source = None if spec.folder is None else run.resolve(spec.folder)
    write_companions(run, source, folder, module.kind == "llm")
    if module.noise is None:
        return
    sampler = module.noise.sampler(bounded=module.vae is None)
    fields = scheduler_fields(run, spec)
    if (schedule := published_schedule(module.name, spec, fields, sampler.config)) is None:
        sampler.save_config(folder)
    else:
        (folder / SCHEDULE).write_text(json.dumps(schedule, indent=2) + "\n")


def _write_vae(run: Run, module: ModuleConfig, folder: Path) -> Written:
    """Write the VAE with its initial weights, from its folder or the seed: it is never trained."""
    spec = run.file.model.modules[module.name]
    assert module.vae is not None and spec.image_size is not None
    parts = [
        encoder_maker(module.name, module.vae, spec.image_size),
        decoder_maker(module.name, module.vae),
    ]
    layers = [part.build(run.file.train.seed) for part in parts]
    if source_of(run, module.name, "vae") is not None:
        load_into(layers, run)
    return write_model(
        folder,
        "vae",
        module.vae,
        layers,
        lambda layer: dict(layer.named_parameters()),
        torch.float32,
    )


def _write_joints(
    run: Run,
    folder: Path,
    modules: Mapping[str, ExportedModule],
    layers: Sequence[PipelineLayer],
    shapes: Mapping[str, list[int]],
    tokenizer: Tokenizer,
) -> None:
    """Write how the parts are joined: as JSON, and as a README with the commands that load them."""
    joints: dict[str, Any] = {}
    for layer in layers:
        tensors = {
            name.removeprefix(f"{layer.name}."): shape
            for name, shape in shapes.items()
            if name.startswith(f"{layer.name}.")
        }
        if tensors:
            joints[layer.name] = {
                "reads": layer.reads,
                "writes": [spec.name for spec in layer.writes],
                "weights": tensors,
            }
    about = {
        name: {
            "kind": spec.kind,
            "merge": spec.merge,
            "projector": None if spec.projector == "mlp" else spec.projector,
            "image_size": spec.image_size,
            "context_tokens": spec.context_tokens if spec.kind == "generator" else None,
            "feature_layer": None if spec.feature_layer is None else -1,
        }  # the blocks after it are not exported
        for name, spec in run.file.model.modules.items()
    }
    described = {
        name: module.model_dump(exclude={"averaged"})
        | {
            key: value
            for key, value in about.get(name, {"kind": "vae"}).items()
            if value is not None
        }
        for name, module in modules.items()
    }
    ids = {name: getattr(tokenizer, name) for name in ("bos", "eos", "image", "context")}
    tokens = {name: None if number == NONE else number for name, number in ids.items()}
    (folder / "model.json").write_text(
        json.dumps(
            {"version": 1, "modules": described, "joints": joints, "tokens": tokens}, indent=2
        )
    )
    loads = "\n".join(f"{name} = {_loading(module)}" for name, module in modules.items())
    imports = "\n".join(
        sorted(
            {
                f"from {made.rpartition('.')[0]} import {made.rpartition('.')[2]}"
                for module in modules.values()
                for made in (module.loads_with, *(("peft.PeftModel",) if module.base else ()))
            }
        )
    )
    template = (files("disttrain_cli") / "templates" / "export.md").read_text(encoding="utf-8")
    (folder / "README.md").write_text(
        template.format(
            name=run.file.name,
            imports=imports,
            loads=loads,
            joints="\n".join(f"- `{name}`" for name in joints),
            **tokens,
        )
    )


def _loading(module: ExportedModule) -> str:
    """Return the expression that loads a module."""
    made = f"{module.loads_with.rpartition('.')[2]}.from_pretrained"
    if module.base is None:
        return f'{made}("{module.folder}")'
    return f'PeftModel.from_pretrained({made}("{module.base}"), "{module.folder}")'
