"""What a run's adapters are: the run file over the folders of adapters that it names."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from disttrain_cli.errors import SpecError
from disttrain_cli.spec.adapter import NUMBERS, of_places, places_of, read_fields, read_names
from disttrain_cli.spec.families.family import Module
from disttrain_cli.spec.runfile import Run
from disttrain_cli.spec.runfile.lora import DEFAULTS, FIELDS
from disttrain_cli.spec.runfile.published import is_of


class Resolved(NamedTuple):
    """A module's adapters.

    Attributes:
        fields: by peft's names, all of `FIELDS`.
        folder: which they start from.
        part: which module of the whole model the module is, if the folder is over that.
    """

    fields: dict[str, Any]
    folder: Path | None
    part: Module | None


def resolved(run: Run, module: str) -> Resolved | None:
    """A module's adapters; None where it has none.

    Raises:
        SpecError: the folder is damaged or of another kind of adapter, or the two disagree.
    """
    spec = run.file.model.modules[module].lora
    if spec is None:
        return None
    field = f"model.modules.{module}.lora"
    given = {name: getattr(spec, name) for name in FIELDS if getattr(spec, name) is not None}
    if spec.folder is None:
        return Resolved(DEFAULTS | given, None, None)
    folder = run.resolve(spec.folder)
    there, part = _of_folder(run, module, folder, f"{field}.folder")
    for name in given.keys() & there.keys() - {"lora_dropout"}:  # which only training knows
        if _plain(given[name]) != _plain(there[name]):
            raise SpecError(
                f"{field}.{name} is not that of the adapter in {folder}",
                f"given: {given[name]}, there: {there[name]}",
                f"Leave {name} out, or start from no adapter.",
            )
    return Resolved(DEFAULTS | there | given, folder, part)


def numbers(run: Run) -> dict[str, dict[str, Any]]:
    """By module what changes the function of its adapters, and no tensor says."""
    found = {name: resolved(run, name) for name in run.file.model.order}
    return {
        name: {number: one.fields[number] for number in NUMBERS}
        for name, one in found.items()
        if one is not None
    }


def whole_part(run: Run, module: str) -> Module | None:
    """Which module of the whole published model a module is, if it is one of them."""
    published = run.published
    if published is None or not is_of(published, run.file.model, module):
        return None
    return published.family.modules[module]


def _of_folder(
    run: Run, module: str, folder: Path, field: str
) -> tuple[dict[str, Any], Module | None]:
    """What the folder of an adapter says of a module's adapters; and which module of the whole
    model it is, if the adapter is over the whole model."""
    fields, part = read_fields(folder, field), whole_part(run, module)
    if part is None and not {"rank_pattern", "alpha_pattern"} & fields.keys():
        return fields, None
    names = read_names(folder)
    mine = [] if part is None else [name for name in names if part.has(name)]
    return of_places(fields, places_of(mine or names), folder, field), part if mine else None


def _plain(value: Any) -> Any:
    return sorted(value) if isinstance(value, (list, tuple)) else value
