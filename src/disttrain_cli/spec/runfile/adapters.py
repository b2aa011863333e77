"""Adapters of a run: the run file's fields over those of the adapter folders that it names."""

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
    """Adapter settings of a module.

    Attributes:
        fields: by peft's names, all of `FIELDS`.
        folder: initial adapters.
        part: the module's entry in the whole model, if the folder covers that.
    """

    fields: dict[str, Any]
    folder: Path | None
    part: Module | None


def resolved(run: Run, module: str) -> Resolved | None:
    """Return a module's adapter settings; None without adapters.

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
    for name in given.keys() & there.keys() - {"lora_dropout"}:  # a training setting only
        if _plain(given[name]) != _plain(there[name]):
            raise SpecError(
                f"{field}.{name} differs from that of the adapter in {folder}",
                f"given: {given[name]}, there: {there[name]}",
                f"Remove {name}, or start without an adapter.",
            )
    return Resolved(DEFAULTS | there | given, folder, part)


def numbers(run: Run) -> dict[str, dict[str, Any]]:
    """Return by module the adapter settings that change its function and are in no tensor."""
    found = {name: resolved(run, name) for name in run.file.model.order}
    return {
        name: {number: one.fields[number] for number in NUMBERS}
        for name, one in found.items()
        if one is not None
    }


def whole_part(run: Run, module: str) -> Module | None:
    """Return a module's entry in the whole published model, if it is one of its modules."""
    published = run.published
    if published is None or not is_of(published, run.file.model, module):
        return None
    return published.family.modules[module]


def _of_folder(
    run: Run, module: str, folder: Path, field: str
) -> tuple[dict[str, Any], Module | None]:
    """Return a module's fields in an adapter folder, and its entry in the whole model.

    The latter is None unless the adapter covers the whole model.
    """
    fields, part = read_fields(folder, field), whole_part(run, module)
    if part is None and not {"rank_pattern", "alpha_pattern"} & fields.keys():
        return fields, None
    names = read_names(folder)
    mine = [] if part is None else [name for name in names if part.has(name)]
    return of_places(fields, places_of(mine or names), folder, field), part if mine else None


def _plain(value: Any) -> Any:
    return sorted(value) if isinstance(value, (list, tuple)) else value
