"""Next commands that verdicts and remedies suggest."""

from __future__ import annotations

import shlex
from pathlib import Path

AGAIN = "disttrain analyze"
AGAIN_REHEARSED = "disttrain train --rehearse"
LEVEL = "disttrain train"  # with train.ordering or preprocess changed in the run file
REMEASURE = "disttrain profile && disttrain plan"
SLOWEST_TRANSFERS = (
    'disttrain analyze --sql "SELECT step, slot, rank, operation, bytes, duration_ns / 1e6 AS ms'
    ' FROM operations WHERE measured AND bytes > 0 ORDER BY ms DESC LIMIT 20"'
)
SLOWEST_LINKS = (
    'disttrain analyze --sql "SELECT sender, receiver, direction, median(transfer_ms) AS ms,'
    " max(transfer_ms) AS most_ms, count(*) AS messages FROM messages GROUP BY ALL ORDER BY ms DESC"
    ' LIMIT 20"'
)
HOST_GAPS = (
    'disttrain analyze --sql "SELECT host, rank, avg(gap_s) FROM idle GROUP BY ALL ORDER BY 3 DESC"'
)
EXPERT_LOAD = (
    'disttrain analyze --sql "SELECT step, layer, list_max(rows) / list_avg(rows) AS load FROM'
    ' experts ORDER BY load DESC LIMIT 20"'
)


def plan_again(paths: list[Path]) -> str:
    """Return the command that calibrates the profile by the analysed run and plans again.

    Args:
        paths: analysed paths: a run's folder or its `traces` folder.
    """
    path = paths[0].parent if paths[0].name == "traces" else paths[0]
    run = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
    return f"disttrain profile --calibrate {shlex.quote(str(run))} && disttrain plan"


def slow_rank(rank: int) -> str:
    """Return the command that lists, by step, a rank's time over its predicted time."""
    return (
        'disttrain analyze --sql "SELECT step, avg(duration_ns / predicted_ms) FROM operations '
        f'WHERE rank = {rank} AND predicted_ms > 0 GROUP BY step ORDER BY step"'
    )
