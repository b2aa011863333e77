"""Docstrings say what a thing is or does: none begins with a question word or a dangling "of"."""

import ast
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "src" / "disttrain_cli"
RIDDLES = ("What ", "Whether ", "Of ", "Those ", "How ", "Who ", "Whose ", "Which ", "That ")
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def test_docstrings_begin_with_what_they_document() -> None:
    found = [
        f"{path.relative_to(PACKAGE)}: {text.splitlines()[0]}"
        for path in sorted(PACKAGE.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, DOCUMENTED)
        and (text := ast.get_docstring(node)) is not None
        and text.startswith(RIDDLES)
    ]
    assert not found, "\n".join(found)
