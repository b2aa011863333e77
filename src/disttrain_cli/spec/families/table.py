"""All families, by the `model_type` of a whole model's config.json."""

from __future__ import annotations

from disttrain_cli.spec.families import llava
from disttrain_cli.spec.families.family import Family

FAMILIES: dict[str, Family] = {"llava": llava.FAMILY}
