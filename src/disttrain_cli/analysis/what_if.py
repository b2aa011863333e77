"""Slowdowns as in "Understanding Stragglers in Large Model Training Using What-if Analysis".

The study's ideal takes the **mean** compute time per operation and the **median** transfer, over
all ranks alike; S = time without delays at the host and for data ÷ time of the ideal; S_x restores
group x in the ideal. If stages differ by design (units) its ideal misleads: `losses` has this
project's.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np

from disttrain_cli.analysis.graph import Delays, Graph, group_mean
from disttrain_cli.analysis.result.verdicts import WhatIf
from disttrain_cli.spec.trace import COMPUTE


def what_if(graph: Graph) -> WhatIf:
    """Replay the steps in the study's terms."""
    recorded = graph.recorded
    none = np.zeros_like(recorded.load)
    base = replace(recorded, load=none, gap=none)
    received = np.array([len(sources) > 0 for sources in graph.walk.sources])[:, None]
    transfer = np.where(
        received, np.median(recorded.transfer[received[:, 0]]) if received.any() else 0.0, 0.0
    )
    ideal = replace(
        base,
        compute=group_mean(recorded.compute, graph.groups("operation")),
        transfer=transfer,
        handover=np.full_like(none, np.median(recorded.handover)),
    )
    best, actual = _seconds(graph, ideal), _seconds(graph, base)

    def restored(pick: Any) -> float:
        return _seconds(graph, _where(pick, base, ideal)) / best

    ranks = np.unique(graph.rank)
    by_rank = {
        int(r): recorded.compute[graph.rank == r].sum() / ideal.compute[graph.rank == r].sum()
        for r in ranks
    }
    worst = sorted(by_rank, key=lambda r: by_rank[r], reverse=True)[: math.ceil(0.03 * len(ranks))]
    loss = actual - best

    def regained(pick: Any) -> float | None:
        return (actual - _seconds(graph, _where(pick, ideal, base))) / loss if loss > 1e-9 else None

    units = np.asarray(graph.unit)
    return WhatIf(
        slowdown=actual / best,
        by_stage={str(d): restored(graph.depth == d) for d in np.unique(graph.depth)},
        by_replica={
            f"{unit}.{r}": restored((units == unit) & (graph.replica == r))
            for unit in dict.fromkeys(graph.unit)
            for r in np.unique(graph.replica[units == unit])
        },
        by_operation={
            COMPUTE[place]: restored(graph.operation == place)
            for place in np.unique(graph.operation)
        },
        worst_workers_share=regained(np.isin(graph.rank, worst)),
        last_stage_share=regained(graph.depth == graph.depth.max()),
    )


def _seconds(graph: Graph, delays: Delays) -> float:
    return float(graph.replay(delays).mean())


def _where(pick: Any, chosen: Delays, other: Delays) -> Delays:
    """Return the delays of `chosen` for the picked passes, of `other` for the rest."""
    rows = pick[:, None]
    return replace(
        other,
        compute=np.where(rows, chosen.compute, other.compute),
        transfer=np.where(rows, chosen.transfer, other.transfer),
        handover=np.where(rows, chosen.handover, other.handover),
    )
