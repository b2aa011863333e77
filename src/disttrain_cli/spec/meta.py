"""Descriptions of the fields of msgspec structs, for their JSON Schema."""

from __future__ import annotations

from msgspec import Meta


def doc(description: str) -> Meta:
    """Return the metadata of an annotated field."""
    return Meta(description=description)
