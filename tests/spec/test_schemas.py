"""JSON Schemas: every field of the run file is described; editors find the schema by its head."""

import json

import pytest

from disttrain_cli.app import main
from disttrain_cli.spec.schemas import KINDS


@pytest.mark.parametrize("kind", KINDS)
def test_the_command_prints_a_schema(kind, capsys):
    with pytest.raises(SystemExit) as left:
        main(["schema", kind])
    schema = json.loads(capsys.readouterr().out)
    assert left.value.code == 0 and schema["$id"] == f"urn:disttrain:{kind}:1"
    assert schema["$schema"].startswith("https://json-schema.org/")
    if kind == "runfile":
        sections = [schema, *schema["$defs"].values()]
        bare = [
            f"{section['title']}.{name}"
            for section in sections
            for name, field in section["properties"].items()
            if not field.get("description", "").endswith(".")
        ]
        assert bare == [] and all(section["description"] for section in sections)
