"""Settings that a run file inherits from the folder of a whole published model (`model.folder`)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from disttrain_cli.errors import SpecError
from disttrain_cli.spec import hub
from disttrain_cli.spec.adapter import FIRST, places_of, read_names
from disttrain_cli.spec.families.folder import PublishedFolder, read_folder
from disttrain_cli.spec.runfile.model import ModelSpec, ModuleSpec

#: Fields of a module that describe its connection to the others.
JOINS = ("merge", "feature_layer", "projector")


#: Kinds of modules whose folders may be names on Hugging Face; a generator is a part of a model.
_BY_NAME = ("encoder", "llm")


def fetched(value: Any, folder: Path) -> dict[str, Path]:
    """Return the folders of the models that a run file names by their names on Hugging Face.

    See `spec.hub`; weights are not downloaded.

    Args:
        folder: base of relative paths.

    Raises:
        SpecError: one is not in the cache and cannot be downloaded.
    """
    model: Any = value.get("model") if isinstance(value, dict) else None
    if not isinstance(model, dict):
        return {}
    modules = model.get("modules")
    named = {"model.folder": model.get("folder")} | {
        f"model.modules.{name}.folder": spec.get("folder")
        for name, spec in (modules.items() if isinstance(modules, dict) else ())
        if isinstance(spec, dict) and spec.get("kind", "encoder") in _BY_NAME
    }
    return {
        given: hub.snapshot(given, field).path
        for field, given in named.items()
        if isinstance(given, str) and hub.is_name(given, folder)
    }


def with_folder(value: Any, folder: Path, named: Mapping[str, Path]) -> Any:
    """Return a run file's plain content, completed with the settings of its `model.folder`.

    A module under one of the family's names adjusts that module, or replaces it if it has an
    architecture or a folder of its own.

    Args:
        folder: base of relative paths.
        named: folders of names on Hugging Face.

    Raises:
        SpecError: the folder holds no whole model of a known family, or an unsupported one.
    """
    model: Any = value.get("model") if isinstance(value, dict) else None
    given = model.get("folder") if isinstance(model, dict) else None
    modules = (model.get("modules") or {}) if isinstance(model, dict) else {}
    if not isinstance(given, str) or not isinstance(modules, dict):
        return value  # validation reports wrong fields
    published = read_folder(named.get(given) or (folder / given).resolve())
    filled = {
        name: _adjusted(spec, modules.get(name), given)
        for name, spec in published.specs(given).items()
    }
    adapter = model.get("adapter")
    if isinstance(adapter, str):
        filled = _with_adapter(filled, published, adapter, (folder / adapter).resolve())
    data = value.get("data")
    if isinstance(data, dict):
        folders = {
            spec["kind"]: spec.get("folder") for spec in filled.values() if isinstance(spec, dict)
        }
        defaults: dict[str, Any] = {"tokenizer": folders.get("llm") or given}
        if folders.get("encoder") == given and not published.family.library:
            defaults["max_image_pixels"] = published.processor().most_pixels
        data = {**defaults, **data}
    return {**value, "model": {**model, "modules": {**modules, **filled}}, "data": data}


def is_of(published: PublishedFolder | None, model: ModelSpec, name: str) -> bool:
    """Return True if a module is the published folder's own."""
    return (
        published is not None
        and name in published.family.modules
        and model.modules[name].folder == model.folder
    )


def joins_as(published: PublishedFolder | None, model: ModelSpec) -> bool:
    """Return True if a model has all modules of the published folder, connected as there.

    Then the weights of its projector fit.
    """
    if published is None or model.folder is None or model.projector_hidden is not None:
        return False
    for name, fields in published.specs(model.folder).items():
        plain = ModuleSpec.model_validate(fields)
        if name not in model.modules or not is_of(published, model, name):
            return False
        spec = model.modules[name]
        if any(getattr(spec, join, None) != getattr(plain, join, None) for join in JOINS):
            return False
    return True


def is_all(published: PublishedFolder | None, model: ModelSpec) -> bool:
    """Return True if a model is exactly the published one."""
    return (
        published is not None
        and joins_as(published, model)
        and set(model.modules) == set(published.family.modules)
    )


def _with_adapter(
    modules: Mapping[str, Any], published: PublishedFolder, given: str, folder: Path
) -> dict[str, Any]:
    """Return modules with the adapters of an adapter over the whole model.

    Raises:
        SpecError: it adapts none of them.
    """
    names = read_names(folder)
    adapters = {f"{place}{FIRST}" for place in places_of(names)}
    adapted = {
        name
        for name, part in published.family.modules.items()
        # a merger that is trained in full is a projector
        if any(part.has(one) and (one in adapters or not part.merges(one)) for one in names)
    }
    if not adapted or not adapters:
        raise SpecError(
            f"model.adapter: the adapter in {folder} belongs to another model than model.folder",
            f"it has {', '.join(names[:2]) or 'nothing'}",
            "Use one for the complete model, or set that of a module as"
            " model.modules.NAME.lora.folder.",
        )
    return {
        name: {**spec, "lora": {"folder": given, **(spec.get("lora") or {})}}
        if name in adapted and isinstance(spec, dict) and not spec.get("architecture")
        else spec
        for name, spec in modules.items()
    }


def _adjusted(spec: Mapping[str, Any], given: Any, folder: str) -> Any:
    if given is None:
        return dict(spec)
    if not isinstance(given, dict):
        return given
    own = given.get("architecture") is not None or given.get("folder") not in (None, folder)
    return {"kind": spec["kind"], **given} if own else {**spec, **given, "folder": folder}
