"""Cache of the savings of other layouts between looks.

Computing them takes half of a look, and while nothing slows down or recovers the result is the
same.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from disttrain_cli.analysis.graph import Graph
from disttrain_cli.analysis.job.database import Database
from disttrain_cli.analysis.job.remedies.remedies import other_layouts
from disttrain_cli.analysis.job.remedies.replanning import factors_of
from disttrain_cli.analysis.losses import Explained
from disttrain_cli.analysis.result.verdicts import Remedy
from disttrain_cli.analysis.walk import Floats

#: Relative difference of a step, or of a unit's passes for their work, up to which a result is
#: reused.
SAME = 0.02
#: Number of cached results: a look with a fault needs two, for the steps as recorded and without
#: it.
KEPT = 2


class Known(NamedTuple):
    """A cached result, and the steps that it is for."""

    start: str
    moved_on: bool
    steps: Floats
    layouts: list[Remedy]


class KnownLayouts:
    """Cached `other_layouts`: returns the same result for similar steps."""

    def __init__(self) -> None:
        self._known: list[Known] = []

    def __call__(
        self, database: Database, graph: Graph, why: Explained, moved_on: bool
    ) -> list[Remedy]:
        asked, steps = (database.run, moved_on), _figures(graph, why)
        for one in self._known:
            if one[:2] == asked and np.allclose(steps, one.steps, rtol=SAME, atol=0.0):
                return one.layouts
        layouts = other_layouts(database, graph, why, moved_on)
        self._known = [Known(*asked, steps, layouts), *self._known][:KEPT]
        return layouts

    def forget(self) -> None:
        """Clear the cache, so that the next look computes the result again."""
        self._known = []


def _figures(graph: Graph, why: Explained) -> Floats:
    """Return the figures by which steps are similar.

    They are the seconds of a step, as recorded and as replayed, and by unit and operation the time
    of passes over that predicted for their work.
    """
    units = dict.fromkeys(graph.unit)
    return np.array(
        [
            float(graph.window.mean()),
            float(graph.replay(graph.recorded).mean()),
            *(factor for unit in units for factor in factors_of(unit, graph, why)),
        ]
    )
