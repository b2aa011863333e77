"""Data of the page's pictures that an `Analysis` lacks, queried from the traces."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from disttrain_cli.analysis.report.timeline import (
    drawable,
    drawable_kineto,
    kineto_steps,
    representative_steps,
)

if TYPE_CHECKING:
    from disttrain_cli.analysis.job.database import Database
    from disttrain_cli.analysis.kineto.database import KinetoDatabase


@dataclass(frozen=True)
class Pictures:
    """Timelines of `timeline.drawn_lanes`, rows of `cells.sql`, and rows of `step_series.sql`."""

    timelines: list[dict[str, Any]] = field(default_factory=list)
    cells: list[dict[str, Any]] = field(default_factory=list)
    steps: list[dict[str, Any]] = field(default_factory=list)


def pictures_of(database: Database, rank: int | None = None) -> Pictures:
    """Return the pictures of disttrain's traces; `rank` is the one that the verdict names."""
    return Pictures(
        [drawable(database, step, why, rank) for step, why in representative_steps(database)],
        database.query("cells"),
        database.query("step_series"),
    )


def kineto_pictures(database: KinetoDatabase, rank: int | None = None) -> Pictures:
    """Return the pictures of Kineto traces: kernels of some steps, time by step."""
    return Pictures(
        [drawable_kineto(database, step, why, rank) for step, why in kineto_steps(database)],
        [],
        database.query("step_series"),
    )
