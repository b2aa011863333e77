"""What other layouts gain, remembered from look to look: finding it takes half of a look, and as
long as nothing slows or recovers the answer is the same."""

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

#: By how much a step, or the passes of a unit for their work, may differ from those of an answer.
SAME = 0.02
#: A look asks twice where it finds a fault: for the steps as recorded, and without the fault.
KEPT = 2


class Known(NamedTuple):
    """An answer, and of which steps it is."""

    start: str
    moved_on: bool
    steps: Floats
    layouts: list[Remedy]


class KnownLayouts:
    """`other_layouts` that answers as before where it is asked of steps like those before."""

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
        """Have the next look find out for itself."""
        self._known = []


def _figures(graph: Graph, why: Explained) -> Floats:
    """Seconds of a step, as recorded and as replayed, and by unit and operation the time of passes
    over that of their work."""
    units = dict.fromkeys(graph.unit)
    return np.array(
        [
            float(graph.window.mean()),
            float(graph.replay(graph.recorded).mean()),
            *(factor for unit in units for factor in factors_of(unit, graph, why)),
        ]
    )
