"""DuckDB database of Kineto traces, from the cache or newly built, and its `--sql` queries."""

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

#: Changes with the tables: databases of other versions are built again.
FORMAT_VERSION = "16"


@dataclass
class KinetoDatabase:
    """An open, read-only connection that can reach no other file, and warnings from reading."""

    connection: DuckDBPyConnection
    run: str
    paths: list[Path]
    warnings: list[str] = field(default_factory=list)

    def answer(self, name: str) -> list[dict[str, Any]]:
        """Return the rows of a query that was run when the traces were read (`ingest.ANSWERS`)."""
        return self.sql(f"FROM answer_{name}")

    def query(self, name: str, **parameters: Any) -> list[dict[str, Any]]:
        """Return the rows of `queries/kineto/NAME.sql`, with `$parameter` values."""
        return self.sql(query_text(f"kineto/{name}"), parameters)

    def columns(self, name: str, **parameters: Any) -> dict[str, Any]:
        """Return the result of `queries/kineto/NAME.sql` as NumPy columns, for long results."""
        return self.connection.execute(
            query_text(f"kineto/{name}"), parameters or None
        ).fetchnumpy()

    def sql(self, text: str, parameters: dict[str, Any] | None = None) -> list[dict[str, Any]]:
        """Run an SQL text of this package and return its rows."""
        return rows_of(self.connection, text, parameters)


def open_kineto(
    files: list[Path], progress: Progress = silent, strangers: bool = False
) -> KinetoDatabase:
    """Open the traces of one job, from the cache if they were read before.

    Args:
        files: Kineto/Chrome JSON.
        progress: called while files are read.
        strangers: resolve names to the documented views, for users' queries.

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
