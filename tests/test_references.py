"""References in docstrings, comments and texts lead to something that exists."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "disttrain_cli"
ROOMS = {path.name for path in PACKAGE.iterdir() if path.is_dir()}
FILES = {path.relative_to(ROOT).as_posix() for path in PACKAGE.rglob("*") if path.is_file()} | {
    path.relative_to(ROOT).as_posix() for path in (ROOT / "tests").rglob("*.py")
}
MODULES = {
    path.removeprefix("src/disttrain_cli/")
    .removesuffix(".py")
    .removesuffix("/__init__")
    .replace("/", "."): ROOT / path
    for path in FILES
    if path.startswith("src/") and path.endswith(".py")
}


@cache
def names(module: Path) -> set[str]:
    """Names that a module defines, or whose attributes it reads: fields of its classes."""
    found = set()
    for node in ast.walk(ast.parse(module.read_text())):
        for field in ("name", "id", "attr", "arg"):
            if isinstance(name := getattr(node, field, None), str):
                found.add(name)
    return found


@cache
def is_dead(reference: str) -> bool:
    """Whether `room.module.name` or `room/file` names nothing; other references are not judged."""
    path = reference.split()[0]
    if re.search(r"\.(py|sql|yaml|json)$", path):
        return "/" in path and not any(f"/{file}".endswith(f"/{path}") for file in FILES)
    parts = path.split(".")
    if parts[0] not in ROOMS or any(part.isdigit() for part in parts):  # a list in a run file
        return False
    for length in range(len(parts), 0, -1):
        ending = ".".join(parts[:length])
        modules = [name for name in MODULES if f".{name}".endswith(f".{ending}")]
        if modules:
            rest = parts[length:]
            return bool(rest) and not any(rest[0] in names(MODULES[name]) for name in modules)
    return True


@pytest.mark.parametrize(
    ("reference", "dead"),
    [
        ("models.layer.PipelineLayer", False),
        ("models.layer.FIELDS", True),
        ("data.sources", False),  # a field of the run file, and a folder
        ("planning.gone.solve", True),
        ("queries/kineto/blame.sql", False),
        ("commands/gone.py", True),
        ("torch.nn.Linear", False),
    ],
)
def test_a_dead_reference_is_found(reference, dead):
    assert is_dead(reference) == dead


def test_references_lead_somewhere():
    dead = {
        (path.relative_to(ROOT).as_posix(), reference)
        for path in MODULES.values()
        for reference in set(
            re.findall(r"`([a-z_]+(?:[./](?!\w*[A-Z]{4})\w+)+)(?:\(\))?`", path.read_text())
        )
        if is_dead(reference)
    }
    assert not dead


def test_traps_have_a_row():
    table = (ROOT / "docs" / "deepspeed.md").read_text()
    rows = {
        number
        for row in re.findall(r"^\| ([\d, ]+) \|", table, re.MULTILINE)
        for number in re.findall(r"\d+", row)
    }
    cited = {
        number
        for path in MODULES.values()
        for trap in re.findall(r"\btraps?\s+(\d+(?:(?:,|\s+and)\s+\d+)*)", path.read_text())
        for number in re.findall(r"\d+", trap)
    }
    assert cited and cited <= rows
