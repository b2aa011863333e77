"""First steps before a run: `init`, `doctor`, `models`, `schema`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from disttrain_cli.api.opening import check_choice
from disttrain_cli.calls import DEFAULT_RUN_FILE, argument, call
from disttrain_cli.errors import SpecError, UsageError
from disttrain_cli.spec.progress import Progress, silent

if TYPE_CHECKING:
    from disttrain_cli.api.environment import Environment
    from disttrain_cli.models.supported import Decoder, ImageText

Artefact = Literal["runfile", "profile", "plan"]
TINY = "tiny"  # default preset
MODEL, SCHEMA = "model", ".disttrain.schema.json"  # next to the run file
#: Comment by which editors find the schema that completes and checks the run file.
MODELINE = f"# yaml-language-server: $schema={SCHEMA}\n"


@dataclass(frozen=True)
class InitResult:
    """The written run file, and the data and model that it names."""

    path: Path
    data: list[str]
    preset: str | None = None
    model: str | None = None  # with a preset, the folder that was written
    samples: int | None = None  # in the user's own data
    skipped: int = 0
    notes: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)  # paths in the run file that do not exist


def init(
    folder: Path | str = ".",
    *,
    preset: str | None = None,
    model: str | None = None,
    data: str | None = None,
    sample_data: bool = False,
    progress: Progress = silent,
) -> InitResult:
    """Write a run file from a preset, or for the user's own model and data.

    Args:
        folder: folder to write, created if it does not exist.
        preset: name of the preset to start from; "tiny" if neither it nor a model is named.
        model: folder of a published vision-language model or LLM, or its name on Hugging Face.
        data: file, folder or URL of samples for that model.
        sample_data: also write a small real dataset for a preset.

    Raises:
        UsageError: arguments exclude each other, or there is no such preset.
        SpecError: another run file is there, or the model is of no known family.
        DataError: the data cannot be read, or a package for the sample data is missing.
    """
    both = f"{argument('model')} and {argument('data')}"
    if model is not None and data is not None:
        if preset is not None or sample_data:
            raise UsageError(
                f"{both} go without {argument('preset')} and {argument('sample_data', True)}",
                "a run file is either for your model and data, or from a preset",
                call("init", help=True),
            )
        return _init_own(Path(folder), model, data, progress)
    if model is not None or data is not None:
        raise UsageError(
            f"{both} go together",
            "sizes and steps of the run file depend on both",
            call("init", "DIR", model="PATH", data="PATH"),
        )
    return _init_preset(Path(folder), preset or TINY, sample_data, progress)


def _init_own(folder: Path, model: str, data: str, progress: Progress) -> InitResult:
    from disttrain_cli.api.environment import cuda_devices
    from disttrain_cli.api.own_run import own_run

    path = folder / DEFAULT_RUN_FILE
    if path.exists():
        raise _exists(path, "")
    own = own_run(folder, model, data, cuda_devices(), progress)
    _write_run_file(path, MODELINE + own.text)
    return InitResult(
        path, [data], model=model, samples=own.samples, skipped=own.skipped, notes=own.notes
    )


def _init_preset(folder: Path, preset: str, sample_data: bool, progress: Progress) -> InitResult:
    from disttrain_cli.api import presets
    from disttrain_cli.api.environment import cuda_devices

    path = folder / DEFAULT_RUN_FILE
    content = MODELINE + presets.fitted(presets.preset_text(preset), cuda_devices())
    if path.exists() and not (path.is_file() and path.read_bytes() == content.encode()):
        raise _exists(path, f" and differs from the preset {preset}")
    if sample_data:
        from disttrain_cli.data.sample_data import load_scans

        load_scans()  # raises DataError if its package is missing, before anything is written
    model = folder / MODEL if presets.has_model(preset) else None
    if model:
        progress("drawing the model's weights", 0, 0)
        presets.write_model(preset, model)
    _write_run_file(path, content)
    written: list[str] = []
    if sample_data:
        progress("writing sample data", 0, 0)
        written = presets.write_data(content, folder / "data")
    return InitResult(
        path,
        [str(folder / "data" / name) for name in written],
        preset=preset,
        model=str(model) if model else None,
        missing=presets.missing_data(folder, content),
    )


def _exists(path: Path, how: str) -> SpecError:
    return SpecError(
        f"{path} exists{how}",
        "It was not changed.",
        "Choose another folder, or move the file away first.",
    )


def _write_run_file(path: Path, content: str) -> None:
    from disttrain_cli.spec.schemas import schema_text
    from disttrain_cli.spec.whole import write_whole

    write_whole(path, content)
    write_whole(path.with_name(SCHEMA), schema_text("runfile"))


def doctor() -> Environment:
    """Report versions, devices, compilers and limits of this machine, and what is missing."""
    from disttrain_cli.api.environment import examine

    return examine()


@dataclass(frozen=True)
class Families:
    """Model families of the installed transformers."""

    transformers: str  # version
    decoders: list[Decoder]
    image_text: list[ImageText]


def models(names: Sequence[str] = (), progress: Progress = silent) -> Families:
    """Try the model families of the installed transformers, and return which of them run.

    Args:
        names: parts of names; without any, all families.

    Raises:
        UsageError: no family has such a name.
    """
    from importlib.metadata import version

    from disttrain_cli.models.supported import decoders, image_text_families

    progress("trying families", 0, 0)
    release = version("transformers")
    found = Families(release, decoders(tuple(names)), image_text_families(tuple(names)))
    if not found.decoders and not found.image_text:
        raise UsageError(
            f"transformers {release} has no family named {', '.join(names)}",
            next_step="Name a part of a model_type, or none for all of them.",
        )
    return found


def schema(kind: Artefact = "runfile") -> dict[str, Any]:
    """Return the JSON Schema of a run file, profile or plan."""
    check_choice("kind", kind, Artefact)
    from disttrain_cli.spec.schemas import schema_text

    return dict(json.loads(schema_text(kind)))
