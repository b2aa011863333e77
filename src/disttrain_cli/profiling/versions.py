"""Versions of the libraries behind a profile."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

LIBRARIES = ("disttrain", "torch", "transformers", "diffusers", "deepspeed", "flash-attn-4")


def library_versions() -> dict[str, str]:
    """Return versions of the libraries that decide what a profile measures or counts."""
    versions = {}
    for library in LIBRARIES:
        try:
            versions[library] = version(library)
        except PackageNotFoundError:
            continue
    return versions
