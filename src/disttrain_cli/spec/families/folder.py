"""Reader of a published folder of a whole model."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from disttrain_cli.calls import call
from disttrain_cli.errors import SpecError
from disttrain_cli.spec.families.defaults import IMAGE_PROCESSORS, class_of, completed
from disttrain_cli.spec.families.family import Family, Fields, Module
from disttrain_cli.spec.families.library import default_token, library_family
from disttrain_cli.spec.families.processors import image_processor_fields
from disttrain_cli.spec.families.table import FAMILIES
from disttrain_cli.spec.families.videos import video_processor_fields
from disttrain_cli.spec.files import parse_json
from disttrain_cli.spec.image_processor import ImageProcessor
from disttrain_cli.spec.library_processor import THINKER
from disttrain_cli.spec.video_processor import VideoProcessor

CONFIG = "config.json"
AGAIN = "Download the folder again."
#: Sections that describe an audio tower.
AUDIO_CONFIGS = ("audio_config", "sound_config")


@dataclass(frozen=True)
class PublishedFolder:
    """Folder of a whole model whose family is known."""

    path: Path
    model_type: str
    family: Family
    config: Fields

    @property
    def file(self) -> Path:
        """Path of its `config.json`."""
        return self.path / CONFIG

    @property
    def _sections(self) -> set[str]:
        return {module.section for module in self.family.modules.values()}

    def with_sections(self, changed: Mapping[str, Fields]) -> dict[str, Any]:
        """Return its `config.json` with other fields of some modules."""
        fields = dict(self.config)
        for name, others in changed.items():
            if not others:
                continue
            module = self.family.modules[name]
            if module.flat and fields.get(module.section) is None:
                fields |= others
            else:
                fields[module.section] = {**fields[module.section], **others}
        return fields

    def section(self, module: Module) -> dict[str, Any]:
        """Return the fields of a module's own configuration.

        Raises:
            SpecError: the whole model has no such part.
        """
        fields = self.config if module.whole else self.config.get(module.section)
        if fields is None and module.flat:
            fields = {
                name: value for name, value in self.config.items() if name not in self._sections
            }
        if not isinstance(fields, dict):
            raise SpecError(
                f"{self.file} belongs to a complete {self.model_type} model, of which"
                f" {module.section} is used",
                f"given: {fields!r}",
                AGAIN,
            )
        of_class = module.architecture is not None and not module.whole
        return {**fields, **({"model_type": module.architecture} if of_class else {})}

    def architecture(self, module: Module) -> str:
        """Return the name of a module's architecture."""
        return module.architecture or str(self.section(module).get("model_type", module.default))

    @property
    def image_token(self) -> int | None:
        """Id of an image's placeholder: the folder's, or its class's default."""
        return self.token("image")

    @property
    def video_token(self) -> int | None:
        """Id of a video's placeholder, likewise."""
        return self.token("video")

    def token(self, media: str) -> int | None:
        """Return the id of a file's placeholder: the folder's, or its class's default."""
        names = (f"{media}_token_id", f"{media}_token_index")
        named = (
            fields.get(field)
            for fields in (self.config, self.family.defaults)
            for field in (self.family.image_token if media == "image" else names)
        )
        found = next((value for value in named if isinstance(value, int)), None)
        if found is None and self.family.library:
            return default_token(self.model_type, media)
        return found

    def image_fields(self) -> tuple[Path, Fields]:
        """Return the image processor's file and its fields, completed with its class's defaults.

        Raises:
            SpecError: there is none, it cannot be read, or is of a class of another family.
        """
        path, fields = image_processor_fields(self.path)
        defaults = IMAGE_PROCESSORS[class_of(path, fields, self.family.image_processors)]
        return path, completed(fields, defaults)

    def processor(self) -> ImageProcessor:
        """Return the image processor's rule; raise SpecError if it is not a known one."""
        return self.family.processor(*self.image_fields())

    def video_processor(self) -> VideoProcessor | None:
        """Return the video processor's rule; None for families whose videos are not read.

        Raises:
            SpecError: the rule is not a known one.
        """
        if self.family.video is None:
            return None
        return self.family.video(*video_processor_fields(self.path))

    def specs(self, given: str) -> dict[str, dict[str, Any]]:
        """Return the modules as run file fields; `given` is the folder's name in the run file."""
        for module in self.family.modules.values():
            self.section(module)
        joins = self.family.joins(self.file, {**self.family.defaults, **self.config})
        return {
            name: {"kind": module.kind, "folder": given, **joins.get(name, {})}
            for name, module in self.family.modules.items()
        }


def thinker_of(fields: Fields) -> Fields:
    """Return the configuration of an Omni's part that reads and writes texts; others unchanged."""
    inside = fields.get(THINKER)
    if not isinstance(inside, dict):
        return fields
    return {**inside, "model_type": f"{fields.get('model_type')}_thinker"}


def family_of(fields: Fields) -> Family | None:
    """Return a family of whole models by its config.json; None if unknown."""
    fields = thinker_of(fields)
    kind = str(fields.get("model_type"))
    hears = any(isinstance(fields.get(name), dict) for name in AUDIO_CONFIGS)
    return FAMILIES.get(kind) or library_family(kind, hears)


def published_in(path: Path) -> PublishedFolder | None:
    """Return the whole model of a known family in a folder, if any.

    Raises:
        SpecError: its `config.json` cannot be read.
    """
    file = path / CONFIG
    fields = parse_json(file, "model configuration", AGAIN) if file.is_file() else None
    if not isinstance(fields, dict):
        return None
    fields, family = thinker_of(fields), family_of(fields)
    if family is None:
        return None
    return PublishedFolder(path, str(fields["model_type"]), family, fields)


def read_folder(path: Path) -> PublishedFolder:
    """Return the whole model in a folder (`model.folder`).

    Raises:
        SpecError: there is none, its family is not known, or it asks for code of its own.
    """
    file = path / CONFIG
    fields = parse_json(file, "model configuration", "Correct model.folder.")
    given = fields if isinstance(fields, dict) else {}
    if "auto_map" in given:
        raise SpecError(
            f"model.folder: {file} asks for code of its own (auto_map: {given['auto_map']})",
            "code of a model's folder is never run",
            "Use the folder of the model in the form of transformers' own class.",
        )
    published = published_in(path)
    if published is not None:
        return published
    raise SpecError(
        f"model.folder: {file} is of an unknown family: model_type {given.get('model_type')!r}",
        newer_library(given)
        or f"known: {', '.join(FAMILIES)}, and those that {call('models')} lists",
        "Set its modules one by one instead (model.modules), each with a folder.",
    )


def newer_library(config: Fields) -> str | None:
    """Return that a configuration was written by a newer transformers than the installed one."""
    wrote, installed = str(config.get("transformers_version", "")), version("transformers")
    if [*map(int, re.findall(r"\d+", wrote))][:2] <= [*map(int, re.findall(r"\d+", installed))][:2]:
        return None
    return f"it was written by transformers {wrote}, and {installed} is installed"
