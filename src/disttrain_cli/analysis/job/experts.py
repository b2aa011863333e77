"""Load of experts: rows of every layer's experts, collapsed routers, ranks with the fuller experts.

Ranks record how many rows of all ranks chose each expert of a layer in a step. Of an EP group, the
rank with more rows than the others computes longer, and they wait for it in the layer's exchanges:
its experts are full, not its device slow.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from disttrain_cli.analysis.causes import Finding
from disttrain_cli.analysis.figures import counted
from disttrain_cli.analysis.job.database import Database
from disttrain_cli.analysis.result.rows import ExpertRow
from disttrain_cli.spec.trace import Job

Floats = NDArray[np.float64]
#: A router has collapsed if of the experts that its rows need not use, fewer than this share are in
#: use (`ExpertRow.in_use`). Log-normal loads with a spread of 1.2, the widest that is published for
#: working models (`costs.routing`), are at 0.46 for 128 experts.
COLLAPSED = 0.2
#: Least load over the mean that can explain a slow rank.
LEAST_LOAD = 1.02


def expert_rows(database: Database) -> list[ExpertRow]:
    """Return the measured steps' rows by layer and expert; collapsed routers become warnings."""
    rows = [
        _row(database.job, module, layer, np.array([one["rows"] for one in of_layer]))
        for (module, layer), of_layer in groupby(
            database.query("expert_rows"), key=lambda one: (one["module"], one["layer"])
        )
    ]
    known = [row for row in rows if row is not None]
    if collapsed := [row for row in known if row.collapsed]:
        worst = min(collapsed, key=lambda row: row.in_use / len(row.rows))
        database.warnings.append(
            f"{counted(len(collapsed), 'router')} collapsed: the rows of layer {worst.layer}"
            f" ({worst.module}) go to {worst.in_use:.1f} of {len(worst.rows)} experts, the fullest"
            f" of which, {worst.fullest}, has {worst.load:.1f} times the mean. Check what balances"
            " the router (auxiliary loss, bias) and optimizer.lr"
        )
    return known


def _row(job: Job | None, module: str, layer: int, rows_E: Floats) -> ExpertRow | None:
    total, count = float(rows_E.sum()), len(rows_E)
    if not total:
        return None
    shares = rows_E[rows_E > 0] / total
    in_use, needed = float(np.exp(-(shares * np.log(shares)).sum())), _chosen(job, module)
    return ExpertRow(
        module=module,
        layer=layer,
        rows=rows_E.tolist(),
        load=float(rows_E.max()) * count / total,
        fullest=int(rows_E.argmax()),
        in_use=in_use,
        collapsed=in_use - needed < COLLAPSED * (count - needed),
    )


def _chosen(job: Job | None, module: str) -> int:
    """Return the number of experts that each row of a module chooses; 1 if unknown."""
    costs = (
        {}
        if job is None or module not in job.profile.modules
        else job.profile.modules[module].costs
    )
    return max((cost.experts.chosen for cost in costs.values() if cost.experts), default=1)


def rank_loads(database: Database, rows: Sequence[ExpertRow]) -> dict[int, float]:
    """Return, by rank of a unit with EP, the rows of its experts over the mean of its EP group.

    They are of all EP groups of a stage together, which hold the same experts.
    """
    loads: dict[int, float] = {}
    for stage in database.stages:
        local = [np.array(row.rows) for row in rows if row.layer in stage.layers]
        if stage.ep == 1 or not local:
            continue
        by_rank = sum(rows_E.reshape(stage.ep, -1).sum(axis=1) for rows_E in local)
        load = by_rank / np.mean(by_rank)
        for group in stage.ep_groups():
            loads |= dict(zip(group, load.tolist(), strict=True))
    return loads


def named(
    findings: Sequence[Finding], loads: Mapping[int, float], waited: Mapping[int, float]
) -> list[Finding]:
    """Return the findings; slow ranks whose experts' rows explain it have the cause "experts".

    A pass grows at most in proportion to the rows of its experts, so a rank that is slower than its
    rows allow has a slow device, too.

    Args:
        findings: causes that slow the steps.
        loads: `rank_loads`.
        waited: by rank, the share of its passes in which its group waits for it.
    """

    def explained(rank: int | None) -> bool:
        share = waited.get(rank, 0.0) if rank is not None else 0.0
        load = loads.get(rank, 1.0) if rank is not None else 1.0
        return load >= LEAST_LOAD and 0.0 < share < 1.0 and 1.0 / (1.0 - share) <= load

    return [
        replace(one, cause="experts")
        if one.cause == "worker" and all(explained(place.rank) for place in one.places)
        else one
        for one in findings
    ]
