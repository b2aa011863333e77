"""Exports of runs of a complete published model: one folder like it, or one adapter for it."""

from __future__ import annotations

import re
import shlex
from collections.abc import Container
from pathlib import Path

import torch

from disttrain_cli.models.adapter_folder import Adapted, write_adapter
from disttrain_cli.models.adapters import Unread, unchanged_base, unread_of
from disttrain_cli.models.architectures import read_configs
from disttrain_cli.models.configs.wholes import whole_config
from disttrain_cli.models.export import Read, Written, import_path, write_whole
from disttrain_cli.models.layer import PipelineLayer
from disttrain_cli.models.published import on_meta, published_class
from disttrain_cli.models.tying import untie
from disttrain_cli.models.weights import module_layers
from disttrain_cli.runtime.outputs.companions import write_companions
from disttrain_cli.spec.families.folder import PublishedFolder
from disttrain_cli.spec.runfile import Run
from disttrain_cli.spec.runfile.model import PROJECTORS


def generating(folder: Path, base: Path | None = None) -> str:
    """Return a command that answers a question about an image with an exported folder.

    Args:
        folder: of the model, or of an adapter.
        base: folder of the adapter's base model.
    """
    content = [{"type": "image", "url": "IMAGE.jpg"}, {"type": "text", "text": "What is this?"}]
    asked = f"print(p(text={[{'role': 'user', 'content': content}]!r}, return_full_text=False))"
    code = (
        f"from transformers import pipeline; p = pipeline('image-text-to-text', {str(folder)!r}); "
        f"{asked}"
        if base is None
        else "from peft import PeftModel; from transformers import"
        " AutoModelForImageTextToText as M, AutoProcessor as P, pipeline;"
        f" m = PeftModel.from_pretrained(M.from_pretrained({str(base)!r}), {str(folder)!r});"
        " p = pipeline('image-text-to-text', m.merge_and_unload(),"
        f" processor=P.from_pretrained({str(folder)!r})); {asked}"
    )
    plain = not re.search(r'["$`\\!]', code)  # unchanged inside double quotes of a shell
    return f'python -c "{code}"' if plain else shlex.join(["python", "-c", code])


def write_over(
    folder: Path,
    run: Run,
    published: PublishedFolder,
    stored: Container[str],
    read: Read,
    dtype: torch.dtype,
    to: Path,
) -> tuple[Written, str]:
    """Write the adapters of a run of a complete published model as one adapter for it.

    Also returns the folder of its base model: `model.folder`, or one in the new folder.

    Args:
        stored: LAYER/PARAMETER of all weights of the checkpoint.
        read: returns the global tensors of a layer by the paths of its parameters.
        to: final path of the new folder.
    """
    configs, layers = read_configs(run), _layers_of(run, published, stored)
    everything = [layer for of_module in layers.values() for layer in of_module]
    projector = PROJECTORS in run.file.model.trained_names
    written = {
        f"{layer.name}/{path}"
        for layer in everything
        for path, _ in layer.named_parameters()
        if projector and layer.owner_of(path) == PROJECTORS
    }
    unchanged = unchanged_base(run, everything, read, dtype, written, whole=True)
    base = to / "base" if unchanged is None else unchanged
    modules = [
        Adapted(configs[name], layers[name], part, projector)
        for name, part in published.family.modules.items()
    ]
    model = on_meta(published.model_type, whole_config(published))
    count = write_adapter(folder, modules, model, read, dtype, base, unread_of(run))
    if unchanged is None:
        write_published(folder / "base", run, published, stored, read, dtype)
    write_companions(run, published.path, folder, llm=True)
    made = import_path(published_class(published.model_type))
    return Written(folder.name, made, count), str(base) if unchanged is not None else "base"


def write_published(
    folder: Path,
    run: Run,
    published: PublishedFolder,
    stored: Container[str],
    read: Read,
    dtype: torch.dtype,
    merge: bool = False,
) -> Written:
    """Write a run of a complete published model as a folder like it.

    Args:
        merge: add the parts of `model.adapter` that no layer of the run has.
        stored: LAYER/PARAMETER of all weights of the checkpoint.
        read: returns the global tensors of a layer by the paths of its parameters.
    """
    modules, layers = run.file.model.modules, _layers_of(run, published, stored)
    tied = {name: any(layer.tied for layer in of_module) for name, of_module in layers.items()}
    written = write_whole(
        folder,
        published,
        layers,
        {name: spec.config | _tie(published, name, tied[name]) for name, spec in modules.items()},
        read,
        dtype,
        change=(unread_of(run) if merge else Unread({}, {}, False)).change,
    )
    write_companions(run, published.path, folder, llm=True)
    return written


def _layers_of(
    run: Run, published: PublishedFolder, stored: Container[str]
) -> dict[str, list[PipelineLayer]]:
    """Return all layers of the published model by module, without memory for their weights."""
    layers = {name: module_layers(run, name) for name in published.family.modules}
    for of_module in layers.values():
        untie(of_module, stored)
    return layers


def _tie(published: PublishedFolder, name: str, tied: bool) -> dict[str, bool]:
    """Return config fields for an LLM's head where its tying differs from the published model."""
    module = published.family.modules[name]
    if module.kind != "llm" or whole_config(published).tie_word_embeddings == tied:
        return {}
    return {"tie_word_embeddings": tied}
