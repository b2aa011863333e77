"""Description of a family of published vision-language models."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from disttrain_cli.errors import SpecError
from disttrain_cli.spec.image_processor import ImageProcessor
from disttrain_cli.spec.video_processor import VideoProcessor

#: A `config.json`, or a part of it.
Fields = Mapping[str, Any]


@dataclass(frozen=True)
class Module:
    """Module inside a whole published model.

    Attributes:
        section: field of the whole `config.json` that describes it.
        flat: if the section is missing, its fields are at the top level of the whole `config.json`.
        whole: its class reads the whole `config.json`.
        without: prefixes of names in the whole model's class that are another module's.
        architecture: its name here; None: the section's own `model_type`, or `default`.
        names: prefixes of names in the module's own published class → in the whole model's class.
        joint: prefixes of paths in its projector that no published tower has ("mlp.0") → in the
            whole model's class.
        mergers: submodules of its own class that are its projector.
    """

    kind: Literal["encoder", "llm"]
    section: str
    names: Mapping[str, str]
    architecture: str | None = None
    default: str = ""
    flat: bool = False
    whole: bool = False
    without: tuple[str, ...] = ()
    joint: Mapping[str, str] = field(default_factory=dict)
    mergers: tuple[str, ...] = ()

    def name_in_whole(self, name: str) -> str:
        """Return the whole model's name of a tensor of the module's own class."""
        return prefixed(name, self.names)

    def has(self, name: str) -> bool:
        """Return True if a tensor of the whole model is this module's.

        Only names that a whole model alone has are recognised.
        """
        return not name.startswith(self.without) and any(
            name.startswith(f"{theirs.rstrip('.')}.")
            for own, theirs in self.names.items()
            if theirs != own
        )

    def merges(self, name: str) -> bool:
        """Return True if a tensor of the whole model belongs to the module's projector (merger)."""
        return name.startswith(tuple(f"{self.name_in_whole(part)}." for part in self.mergers))

    def joint_in_whole(self, path: str) -> str:
        """Return the whole model's name of a parameter of the projector."""
        return prefixed(path, self.joint)


@dataclass(frozen=True)
class Family:
    """Mapping of a transformers class's folders to modules.

    Attributes:
        modules: its modules, by our names.
        joins: returns by module the fields of `ModuleSpec` that describe its projector, from the
            whole `config.json`; raises SpecError for unsupported values.
        processor: returns the image processor's rule from its own fields; raises SpecError if it
            has another.
        image_processors: possible classes of its image processor, first the default of a folder
            that names none (`defaults.IMAGE_PROCESSORS`).
        defaults: of the whole configuration's class, for the fields that are read here.
        image_token: fields of the whole `config.json` that may name the id of an image's
            placeholder.
        video: returns the video processor's rule from its own fields; None: videos are not read.
        library: the tower and the processor run as the library has them (`families.library`).
    """

    modules: Mapping[str, Module]
    joins: Callable[[Path, Fields], dict[str, dict[str, Any]]]
    processor: Callable[[Path, Fields], ImageProcessor]
    image_processors: tuple[str, ...]
    defaults: Fields
    image_token: tuple[str, ...] = ("image_token_id",)
    video: Callable[[Path, Fields], VideoProcessor] | None = None
    library: bool = False

    def part(self, name: str, kind: str) -> Module | None:
        """Return the family's module of this name, or else its first one of this kind."""
        of_kind = {key: one for key, one in self.modules.items() if one.kind == kind}
        return of_kind.get(name, next(iter(of_kind.values()), None))


def only(path: Path, fields: Fields, field: str, allowed: Mapping[Any, Any]) -> Any:
    """Return the meaning of a field's value, among the supported values.

    Raises:
        SpecError: it has another value.
    """
    given = fields[field]
    if isinstance(given, (str, int, bool, type(None))) and given in allowed:
        return allowed[given]
    raise SpecError(
        f"{path}: {field} {given!r} is not supported",
        f"allowed: {', '.join(str(value) for value in allowed)}",
        "Train its modules by their own folders (model.modules), or another model.",
    )


def feature_layer(path: Path, config: Fields) -> int:
    """Return the tower's block whose output is read, counted from the end.

    Raises:
        SpecError: several are read, or it is counted from the start.
    """
    layer = config["vision_feature_layer"]
    if isinstance(layer, int) and layer < 0:
        return layer
    raise SpecError(
        f"{path}: vision_feature_layer {layer!r} is not supported",
        "allowed: one block, counted from the end: -1, -2, …",
        "Train its modules by their own folders (model.modules), or another model.",
    )


def prefixed(name: str, prefixes: Mapping[str, str]) -> str:
    """Return a name with its prefix replaced.

    Raises:
        KeyError: it has none of the prefixes.
    """
    for prefix, instead in prefixes.items():
        if name == prefix or not prefix or name.startswith(f"{prefix}."):
            return instead + name[len(prefix) :]
    raise KeyError(name)
