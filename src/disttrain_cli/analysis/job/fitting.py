"""Usable rows of a trace: with the schema's types, coordinates and possible times.

Other writers of segments, or damage, may leave other types, nulls, and ends before their starts, as
does a clock that is set back within an operation.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from disttrain_cli.spec.trace import arrow_schema

if TYPE_CHECKING:
    import pyarrow as pa

#: Times are nanoseconds since 1970, before 2096; `LONGEST_NS` is the longest possible operation.
LAST_NS, LONGEST_NS = 4 * 10**18, 30 * 86_400 * 10**9
#: Columns that must not be null.
NEEDED = {
    "segments": (
        "run",
        "step",
        "slot",
        "unit",
        "stage",
        "replica",
        "tp_rank",
        "rank",
        "host",
        "operation",
        "start_ns",
        "end_ns",
    ),
    "step_segments": ("run", "step", "end_ns", "iteration_s"),
    "size_segments": ("run", "step", "tokens", "length_sq", "images", "targets"),
    "sample_segments": ("run", "step"),
    "expert_segments": ("run", "step", "layer", "rows"),
}


def usable(name: str) -> str:
    """Return the SQL condition for the usable rows of a source."""
    conditions = [f"{column} IS NOT NULL" for column in NEEDED[name]]
    if name == "segments":
        conditions += [
            f"start_ns BETWEEN 0 AND {LAST_NS}",
            f"end_ns BETWEEN start_ns AND start_ns + {LONGEST_NS}",
        ]
    return " AND ".join(conditions)


def fitted(table: pa.Table, columns: dict[str, str]) -> pa.Table:
    """Return the table with the schema's types, without rows that lack a step.

    Raises:
        ValueError: it lacks columns, or one cannot be cast; the message names them.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    schema = arrow_schema(columns)
    if missing := set(columns) - set(table.column_names):
        raise ValueError(f"lacks the column(s) {', '.join(sorted(missing)[:4])}")
    cast = {}
    for name in columns:
        try:
            cast[name] = table.column(name).cast(schema.field(name).type)
        except pa.ArrowException:
            kind = table.schema.field(name).type
            raise ValueError(f"has a column {name} of the type {kind}") from None
    step = cast["step"]
    return pa.table(cast) if not step.null_count else pa.table(cast).filter(pc.is_valid(step))
