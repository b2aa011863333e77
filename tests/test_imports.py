"""No file imports itself through others, and no folder its siblings through each other."""

import ast
from collections.abc import Callable, Iterable, Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import disttrain_cli

LONGEST_CHAIN = 29
PACKAGE = Path(disttrain_cli.__file__).parent


def module_name(file: Path, package: Path) -> str:
    parts = file.relative_to(package.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported(file: Path) -> Iterator[str]:
    """Every name that a file imports, in functions and under TYPE_CHECKING too; absolute only."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def imported_at_start(file: Path) -> Iterator[str]:
    """Every name that a file imports as it is imported itself."""
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def import_graph(
    package: Path, names_of: Callable[[Path], Iterator[str]] = imported
) -> dict[str, set[str]]:
    """Modules of the package, each with those that it imports."""
    files = {module_name(file, package): file for file in package.rglob("*.py")}
    graph = {}
    for name, file in files.items():
        targets = {
            target if target in files else target.rpartition(".")[0] for target in names_of(file)
        }
        graph[name] = (targets & files.keys()) - {name}
    return graph


def siblings(graph: dict[str, set[str]], parent: str) -> dict[str, set[str]]:
    """Files and folders directly in a folder, each with the siblings that anything in it
    imports."""
    prefix = f"{parent}."

    def child(name: str) -> str:
        return prefix + name.removeprefix(prefix).partition(".")[0]

    folder: dict[str, set[str]] = {}
    for name, targets in graph.items():
        if name.startswith(prefix):
            inside = {child(target) for target in targets if target.startswith(prefix)}
            folder.setdefault(child(name), set()).update(inside - {child(name)})
    return folder


def reachable(graph: dict[str, set[str]], start: str) -> set[str]:
    seen, left = set(), [start]
    while left:
        new = graph[left.pop()] - seen
        seen |= new
        left += new
    return seen


def circles(graph: dict[str, set[str]]) -> set[frozenset[str]]:
    """Sets of nodes that all import each other, directly or through others of the set."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError:
        reach = {name: reachable(graph, name) for name in graph}
        return {
            frozenset(other for other in reach[name] if name in reach[other])
            for name in graph
            if name in reach[name]
        }
    return set()


def all_circles(package: Path) -> set[frozenset[str]]:
    graph = import_graph(package)
    folders = [module_name(file, package) for file in package.rglob("__init__.py")]
    return union([circles(graph), *(circles(siblings(graph, folder)) for folder in folders)])


def union(sets: Iterable[set[frozenset[str]]]) -> set[frozenset[str]]:
    return set().union(*sets)


def test_there_are_no_import_circles():
    assert all_circles(PACKAGE) == set()


def test_no_file_needs_a_long_chain_of_others_to_be_imported():
    """What annotations alone need is imported under TYPE_CHECKING where chains are long."""
    graph, length = import_graph(PACKAGE, imported_at_start), dict[str, int]()
    for name in TopologicalSorter(graph).static_order():
        length[name] = 1 + max((length[other] for other in graph[name]), default=0)
    assert max(length.values()) <= LONGEST_CHAIN


@pytest.mark.parametrize(
    "line",
    [
        "from p.b.two import x",
        "from p.b import two",
        "import p.b.two",
        "def f():\n    from p.b import two",
        "if TYPE_CHECKING:\n    from p.b.two import x",
    ],
)
def test_circles_of_files_and_of_folders_are_seen(tmp_path, line):
    package = tmp_path / "p"
    for folder in ("", "a", "b"):
        (package / folder).mkdir()
        (package / folder / "__init__.py").touch()
    (package / "a" / "one.py").write_text(line)
    (package / "a" / "other.py").touch()
    (package / "b" / "two.py").touch()
    assert all_circles(package) == set()
    (package / "b" / "two.py").write_text("import p.a.other")
    assert all_circles(package) == {frozenset({"p.a", "p.b"})}
    (package / "b" / "two.py").write_text("import p.a.one")
    assert all_circles(package) == {
        frozenset({"p.a", "p.b"}),
        frozenset({"p.a.one", "p.b.two"}),
    }
