"""The views that `--sql` can ask, from `queries/views.yaml`: how they are shown, and kept apart
from what is inside.

Tables and views of ours lie in the schema `internal`; `main` has one view for each that is
documented, with exactly its documented columns, and `columns`, which explains them.
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
    """What one row is, the internal view that it shows, and column → what it means."""

    about: str
    of: str
    columns: dict[str, str]


@cache
def documented_views(family: Family) -> dict[str, View]:
    """By name, what traces of a kind can be asked."""
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
    """What is made from now on is internal."""
    connection.execute(f"CREATE SCHEMA IF NOT EXISTS {INTERNAL}; USE {INTERNAL}")


def publish(connection: DuckDBPyConnection, family: Family, *later: str) -> None:
    """Make the documented views of what lies inside, but for those that are made `later`, and
    `columns`."""
    for name, view in documented_views(family).items():
        if name not in later:
            connection.execute(
                f"CREATE VIEW main.{name} AS SELECT {', '.join(map(_quoted, view.columns))} "
                f"FROM {INTERNAL}.{view.of}"
            )
    explain(connection, family)


def explain(connection: DuckDBPyConnection, family: Family) -> None:
    """Make the table `columns`."""
    views = documented_views(family)
    told = [
        (name, column, meaning)
        for name, view in views.items()
        for column, meaning in view.columns.items()
    ]
    connection.execute(
        'CREATE TABLE main.columns AS SELECT unnest(?) AS "view", unnest(?) AS "column", unnest(?)'
        " AS meaning",
        [list(parts) for parts in zip(*told, strict=True)],
    )


def ask_published(connection: DuckDBPyConnection) -> None:
    """Names without a schema are those of the documented views."""
    connection.execute("SET search_path = 'main'")


def ask_internal(connection: DuckDBPyConnection) -> None:
    """Names without a schema are those of our own tables and views."""
    connection.execute(f"SET search_path = '{INTERNAL}'")


def _quoted(name: str) -> str:
    return f'"{name}"'
