"""Kineto traces as an open DuckDB file, read before or now; what `--sql` can ask."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from disttrain_cli import __version__
from disttrain_cli.analysis.sql import lock, open_cached, query_text, rows_of
from disttrain_cli.analysis.views import ask_internal, ask_published
from disttrain_cli.spec.progress import Progress, silent

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

#: Changes whenever the tables do: databases of other versions are built again.
FORMAT_VERSION = "16"


@dataclass
class KinetoDatabase:
    """An open, read-only connection that can reach nothing else, and what reading had to leave
    out."""

    connection: DuckDBPyConnection
    run: str
    paths: list[Path]
    warnings: list[str] = field(default_factory=list)

    def answer(self, name: str) -> list[dict[str, Any]]:
        """Rows of a question that was answered when the traces were read (`ingest.ANSWERS`)."""
        return self.sql(f"FROM answer_{name}")

    def query(self, name: str, **parameters: Any) -> list[dict[str, Any]]:
        """Rows of `queries/kineto/NAME.sql`, with `$parameter` values."""
        return self.sql(query_text(f"kineto/{name}"), parameters)

    def columns(self, name: str, **parameters: Any) -> dict[str, Any]:
        """The same as NumPy columns, for long results."""
        return self.connection.execute(
            query_text(f"kineto/{name}"), parameters or None
        ).fetchnumpy()

    def sql(self, text: str, parameters: dict[str, Any] | None = None) -> list[dict[str, Any]]:
        """Rows of an SQL text of ours."""
        return rows_of(self.connection, text, parameters)


def open_kineto(
    files: list[Path], progress: Progress = silent, strangers: bool = False
) -> KinetoDatabase:
    """The traces of one job; read now, or opened as they were read before.

    Args:
        strangers: for queries that are not ours, over the documented views.

    Raises:
        DataError: no event can be read in any of the files, or the database cannot be written.
    """
    from disttrain_cli.analysis.kineto.kernels import pattern_texts, read_patterns

    def build(database: Path) -> None:
        from disttrain_cli.analysis.kineto.ingest import ingest

        ingest(files, database, read_patterns(patterns), progress)

    patterns = pattern_texts()
    connection = open_cached(
        files, f"kineto {FORMAT_VERSION} {__version__} {sorted(patterns.values())}", build
    )
    (ask_published if strangers else ask_internal)(connection)
    lock(connection)
    common = files[0].name if len(files) == 1 else files[0].resolve().parent.name
    database = KinetoDatabase(connection, common, files)
    database.warnings += [
        row["warning"] for row in database.sql("SELECT warning FROM internal.warnings")
    ]
    return database
