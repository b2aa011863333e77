"""Views that `--sql` can query, from `queries/views.yaml`, separate from the internal tables.

Internal tables and views are in the schema `internal`; `main` has one view for each documented one,
with exactly its documented columns, and `columns`, which explains them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

Family = Literal["own", "kineto", "study"]
INTERNAL = "internal"


@dataclass(frozen=True)
class View:
    """Documentation of a view: what a row is, the internal view it shows, and its columns."""

    about: str
    of: str
    columns: dict[str, str]


@cache
def documented_views(family: Family) -> dict[str, View]:
    """Return the documented views of a family of traces, by name."""
    import yaml

    text = (resources.files("disttrain_cli.analysis") / "queries" / "views.yaml").read_text(
        encoding="utf-8"
    )
    described: dict[str, Any] = yaml.load(
        text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    )
    return {
        name: View(
            view["about"],
            view.get("of", name),
            {
                column: view.get("own", {}).get(column) or described["columns"][column]
                for column in view["columns"]
            },
        )
        for name, view in described[family].items()
    }


def inside(connection: DuckDBPyConnection) -> None:
    """Create everything from now on in the internal schema."""
    connection.execute(f"CREATE SCHEMA IF NOT EXISTS {INTERNAL}; USE {INTERNAL}")


def publish(connection: DuckDBPyConnection, family: Family, *later: str) -> None:
    """Create the documented views and the table `columns`.

    Args:
        connection: its internal tables and views exist.
        family: family of the traces.
        later: views that the caller creates later.
    """
    for name, view in documented_views(family).items():
        if name not in later:
            connection.execute(
                f"CREATE VIEW main.{name} AS SELECT {', '.join(map(_quoted, view.columns))} "
                f"FROM {INTERNAL}.{view.of}"
            )
    explain(connection, family)


def explain(connection: DuckDBPyConnection, family: Family) -> None:
    """Create the table `columns`."""
    views = documented_views(family)
    described = [
        (name, column, meaning)
        for name, view in views.items()
        for column, meaning in view.columns.items()
    ]
    connection.execute(
        'CREATE TABLE main.columns AS SELECT unnest(?) AS "view", unnest(?) AS "column", unnest(?)'
        " AS meaning",
        [list(parts) for parts in zip(*described, strict=True)],
    )


def ask_published(connection: DuckDBPyConnection) -> None:
    """Resolve names without a schema to the documented views."""
    connection.execute("SET search_path = 'main'")


def ask_internal(connection: DuckDBPyConnection) -> None:
    """Resolve names without a schema to the internal tables and views."""
    connection.execute(f"SET search_path = '{INTERNAL}'")


def _quoted(name: str) -> str:
    return f'"{name}"'
