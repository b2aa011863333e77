"""JSON Schemas of the files that users write or read: `disttrain schema`, docs/schema/."""

from __future__ import annotations

import json

from pydantic import BaseModel

from disttrain_cli.spec.plan import Plan
from disttrain_cli.spec.profile import Profile
from disttrain_cli.spec.runfile import RunFile

KINDS: dict[str, type[BaseModel]] = {"runfile": RunFile, "profile": Profile, "plan": Plan}
DRAFT = "https://json-schema.org/draft/2020-12/schema"


def schema_text(name: str) -> str:
    """Return the JSON Schema of one of `KINDS`."""
    schema = KINDS[name].model_json_schema()
    version = schema["properties"]["version"]["const"]
    head = {"$schema": DRAFT, "$id": f"urn:disttrain:{name}:{version}"}
    return json.dumps(head | schema, indent=2, ensure_ascii=False) + "\n"
