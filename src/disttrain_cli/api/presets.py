"""Presets: run files to start from, with their sample data and small models."""

from __future__ import annotations

import re
from importlib import import_module
from importlib.resources import files
from pathlib import Path

from disttrain_cli.calls import call
from disttrain_cli.errors import SpecError, UsageError
from disttrain_cli.naming import short_path
from disttrain_cli.spec.whole import write_whole

#: By path of `data.sources`, the function that writes the data there, as MODULE:FUNCTION.
WRITERS = {
    "data/captions": "disttrain_cli.data.sample_data:write_sample_data",
    "data/tones": "disttrain_cli.data.sample_audio:write_sample_audio",
    "data/talks": "disttrain_cli.data.sample_talks:write_sample_talks",
}
WORDS = "words"  # folder of the small models' shared tokenizer; a model's own files override it


def preset_names() -> list[str]:
    """Return the names of the presets that ship with the package."""
    folder = files("disttrain_cli") / "templates" / "presets"
    return sorted(
        entry.name.removesuffix(".yaml")
        for entry in folder.iterdir()
        if entry.name.endswith(".yaml")
    )


def preset_text(name: str) -> str:
    """Return the run file of a preset; raises UsageError with the known names."""
    if name not in preset_names():
        from disttrain_cli.spec.suggestions import listed

        raise UsageError(
            f"There is no preset {name!r}",
            "presets: " + listed(name, preset_names()),
            call("init", "DIR", preset="tiny"),
        )
    return (files("disttrain_cli") / "templates" / "presets" / f"{name}.yaml").read_text(
        encoding="utf-8"
    )


def fitted(text: str, gpus: int) -> str:
    """Return a preset with no more GPUs per node than this machine has.

    Without GPUs it is unchanged.
    """
    if not gpus:
        return text
    return re.sub(
        r"(?m)^(  gpus_per_node: )(\d+)",
        lambda match: f"{match[1]}{min(int(match[2]), gpus)}",
        text,
    )


def source_paths(content: str) -> list[str]:
    """Return the paths of a run file's sources."""
    import yaml

    sources = yaml.safe_load(content)["data"].get("sources", [])
    return [source["path"] for source in sources]


def write_data(content: str, folder: Path) -> list[str]:
    """Write the sample data that a run file reads, and return their paths relative to `folder`.

    Where it reads none of the known sample data, the scanned digits are written.

    Raises:
        DataError: a package is missing, or other files of the same name are there.
        SpecError: the folder cannot be written.
    """
    named = source_paths(content)
    chosen = [writer for path, writer in WRITERS.items() if path in named]
    written: list[str] = []
    for writer in chosen or [WRITERS["data/captions"]]:
        module, _, function = writer.partition(":")
        written += getattr(import_module(module), function)(folder, seed=0)
    return written


def has_model(preset: str) -> bool:
    """Return True if a preset trains a complete model, whose folder is written with it."""
    return (files("disttrain_cli") / "templates" / "folders" / preset).is_dir()


def write_model(preset: str, folder: Path) -> None:
    """Write that model's folder, in the published format, with random weights if it is small.

    Presets of published sizes have no data to train on, and no weights.

    Raises:
        SpecError: a file of the same name holds something else, or the folder cannot be written.
    """
    write_model_files(preset, folder)
    if not source_paths(preset_text(preset)):
        return
    from disttrain_cli.models.fresh import random_weights

    _write_new(folder, *random_weights(folder, seed=0))


def write_model_files(preset: str, folder: Path) -> None:
    """Write all files but the weights; raises SpecError as `write_model` does."""
    templates = files("disttrain_cli") / "templates" / "folders"
    named = {path.name: path for name in (WORDS, preset) for path in (templates / name).iterdir()}
    for name, path in named.items():
        _write_new(folder, name, path.read_bytes())


def _write_new(folder: Path, name: str, content: bytes) -> None:
    path = folder / name
    if not path.exists():
        write_whole(path, content)
    elif not path.is_file() or path.read_bytes() != content:
        raise SpecError(
            f"{short_path(path)} exists and differs from the preset's",
            "It was not changed.",
            "Choose another folder, or move the file away first.",
        )


def missing_data(folder: Path, content: str) -> list[str]:
    """Return the paths of a run file's sources that do not exist."""
    return [path for path in source_paths(content) if not (folder / path).exists()]
