"""Registry entries of other packages, found by the entry points of the installed ones."""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points
from typing import Any, TypeVar

from disttrain_cli.errors import SpecError

T = TypeVar("T")


def with_plugins(group: str, built_in: dict[str, T]) -> dict[str, T]:
    """Return a registry extended, by name, with the entries of installed packages.

    Groups are disttrain.heads (`spec.heads.Head` classes by item), disttrain.modalities
    (`data.modalities.modality.Modality` by item), disttrain.architectures
    (`models.architecture.Architecture` by the model_type of a config.json), disttrain.metrics
    (`data.metrics.Metric` by the name in `samples.metrics`) and disttrain.judges
    (`data.metrics.ImageJudge` classes by the name in `samples.judge`).

    Raises:
        SpecError: one cannot be loaded, or its name is already in use.
    """
    registry = dict(built_in)
    for entry in sorted(entry_points(group=group)):
        if entry.name in registry:
            raise _refused(group, entry, f"the name {entry.name} is taken")
        registry[entry.name] = _load(group, entry)
    return registry


def _load(group: str, entry: EntryPoint) -> Any:
    try:
        return entry.load()
    except Exception as error:
        raise _refused(group, entry, f"{type(error).__name__}: {error}") from error


def _refused(group: str, entry: EntryPoint, why: str) -> SpecError:
    package = entry.dist.name if entry.dist else entry.module
    return SpecError(
        f"{entry.name} = {entry.value} of the package {package} cannot be registered in {group}",
        why,
        f"Repair the package, or remove it: pip uninstall {package}",
    )
