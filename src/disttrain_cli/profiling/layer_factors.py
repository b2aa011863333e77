"""Correction of layer times by the rows of a trace: factors on the terms of the profile.

A row is a module on one stage in one slot: forward, backward or deferred weight gradients. Its time
is linear in the profile's coefficients, so a column of the equations is the result of
`costs.layout.stages_of` for a profile whose other times are all 0: frozen, recomputed and
TP-sharded layers need no special rules here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from disttrain_cli.analysis.job.costing import shares_cores
from disttrain_cli.analysis.job.database import Database
from disttrain_cli.costs.layout import stages_of
from disttrain_cli.profiling.factors import Floats, error_pct, fit_factors
from disttrain_cli.spec.layer_costs import LayerShard, Polynomial, combine
from disttrain_cli.spec.profile import Profile
from disttrain_cli.spec.trace import COMPUTE, Job

#: Rows of one module and direction that are read, spread over steps, ranks and slots.
MOST_ROWS = 20_000
#: A rank is slow, and left out, where it takes more than this many times the (lower) median
#: replica of its stage.
SLOW = 1.1
TERMS = tuple(Polynomial.model_fields)
#: Operation of each time; a split backward excludes the deferred weight gradients.
TIMES = {
    "forward_ms": "forward",
    "backward_ms": "backward",
    "backward_input_ms": "backward",
    "weight_ms": "weights",
}
#: By pass in which messages are overlapped, the time that it is part of; the backward's for others.
HIDING = {"forward": "forward_ms", "backward_input": "backward_input_ms"}
NOTHING = Polynomial()
# module, kind, TP, time, polynomial → polynomial
Change = Callable[[str, str, str, str, Polynomial], Polynomial]
ROWS = """
SELECT unit, stage, rank, CASE WHEN $llm THEN sequences ELSE images END AS items, tokens,
  sum_length_sq, duration_ns, slot
FROM operations
WHERE measured AND module = $module AND operation = $operation AND duration_ns > 0
  AND hash(step, rank, slot) % greatest(1, (
    SELECT count(*) FROM operations WHERE measured AND module = $module
                                            AND operation = $operation) // $most) = 0
ORDER BY step, rank, slot
"""


@dataclass(frozen=True)
class Corrected:
    """Corrected time of one direction of a module."""

    module: str
    operation: str
    before_ms: float  # mean of a row by the profile that the run had
    after_ms: float
    rows: int
    error_before_pct: float
    error_after_pct: float
    slow_ranks: list[int]  # left out
    # by stage number, percent by which it exceeds the time that its layers now explain
    stages_pct: dict[int, float]


@dataclass(frozen=True)
class _Column:
    """Contribution of one time of a kind of layer to the rows of every stage, by term [S, 4]."""

    kind: str
    time: str
    adds: dict[str, Floats]  # by operation


@dataclass(frozen=True)
class _Rows:
    """Recorded compute of one module in one operation."""

    stage: NDArray[np.int64]  # [N] index in the whole pipeline
    rank: NDArray[np.int64]
    work: Floats  # [N, 4] 1, items, tokens, Σ length²
    measured_ms: Floats  # as on an unshared device

    def __len__(self) -> int:
        return len(self.stage)

    def take(self, chosen: NDArray[np.bool_]) -> _Rows:
        return _Rows(
            self.stage[chosen], self.rank[chosen], self.work[chosen], self.measured_ms[chosen]
        )


def correct_layers(database: Database, job: Job) -> tuple[Profile, list[Corrected]]:
    """Correct the job's profile by the trace's layer times; also return the changes.

    Changes are by module and direction. Times that the run does not use (other TP sizes, gradients
    of inputs only) follow the mean factor of their direction, or of the forward where the run has
    no backward of the module.
    """
    known: dict[tuple[str, ...], Floats] = {}  # (module, kind, TP, time) → factors of the terms
    means: dict[tuple[str, str], float] = {}
    changed: list[Corrected] = []
    for module in job.profile.modules:
        columns, exchanged = _columns(job, module), _exchanged(job, module)
        tp = str(job.layout.unit_of(module).tp_of(module))
        by_kind: dict[tuple[str, str], Floats] = {}  # (kind, time) → factors
        for operation in COMPUTE:
            fitted = _correct(
                module,
                operation,
                columns,
                exchanged[operation],
                by_kind,
                _read(database, job, module, operation),
            )
            if fitted is not None:
                changed.append(fitted)
                means[module, operation] = fitted.after_ms / fitted.before_ms
        known |= {(module, kind, tp, time): factors for (kind, time), factors in by_kind.items()}

    def corrected(module: str, kind: str, tp: str, time: str, polynomial: Polynomial) -> Polynomial:
        alike = (TIMES[time], "backward", "forward")
        mean = next((means[module, one] for one in alike if (module, one) in means), 1.0)
        whole = "backward_ms" if time == "weight_ms" else time
        factors = known.get(
            (module, kind, tp, time),
            known.get((module, kind, tp, whole), np.full(len(TERMS), mean)),
        )
        return Polynomial(
            **{
                term: float(factor) * getattr(polynomial, term)
                for term, factor in zip(TERMS, factors, strict=True)
            }
        )

    return _retimed(job.profile, corrected), changed


def _correct(
    module: str,
    operation: str,
    columns: list[_Column],
    exchanged: Floats,
    factors: dict[tuple[str, str], Floats],
    rows: _Rows,
) -> Corrected | None:
    """Fit one direction and add its factors to `factors`.

    Those of the forward are known where the backward recomputes it, and the CP groups' exchanges
    keep the time that the links have.
    """
    of_operation = [column for column in columns if TIMES[column.time] == operation]
    others = [
        column
        for column in columns
        if TIMES[column.time] != operation and (column.kind, column.time) in factors
    ]
    rows = rows.take(_terms(of_operation, operation, rows).sum(axis=1) > 0.0)
    expected = _terms([*of_operation, *others], operation, rows).sum(axis=1)
    slow = _slow_ranks(rows, expected + (exchanged[rows.stage] * rows.work).sum(axis=1))
    rows = rows.take(~np.isin(rows.rank, slow))
    if not len(rows):
        return None
    terms, again = _terms(of_operation, operation, rows), _terms(others, operation, rows)
    messages = (exchanged[rows.stage] * rows.work).sum(axis=1)
    repeated = messages + again @ np.concatenate(
        [np.zeros(0), *(factors[column.kind, column.time] for column in others)]
    )
    used = terms.sum(axis=0) > 0.0
    fitted = np.full(len(used), np.nan)
    fitted[used] = fit_factors(terms[:, used], rows.measured_ms, repeated)
    before = messages + again.sum(axis=1) + terms.sum(axis=1)
    after = repeated + terms[:, used] @ fitted[used]
    fitted[~used] = after.mean() / before.mean()
    for index, column in enumerate(of_operation):
        factors[column.kind, column.time] = fitted[len(TERMS) * index : len(TERMS) * (index + 1)]
    return Corrected(
        module,
        operation,
        float(before.mean()),
        float(after.mean()),
        len(rows),
        error_pct(before, rows.measured_ms),
        error_pct(after, rows.measured_ms),
        slow,
        {
            stage: 100.0 * (float(np.median((rows.measured_ms / after)[rows.stage == stage])) - 1.0)
            for stage in np.unique(rows.stage).tolist()
        },
    )


def _terms(columns: list[_Column], operation: str, rows: _Rows) -> Floats:
    """Return [N, 4 · columns] ms that each term adds to each row."""
    blocks = [column.adds[operation][rows.stage] * rows.work for column in columns]
    return np.hstack(blocks) if blocks else np.zeros((len(rows), 0))


def _slow_ranks(rows: _Rows, expected_ms: Floats) -> list[int]:
    """Return ranks far slower on the same work than the lower median of their stage's replicas."""
    slow: list[int] = []
    for stage in np.unique(rows.stage):
        ranks = np.unique(rows.rank[rows.stage == stage])
        ratios = np.array(
            [np.median((rows.measured_ms / expected_ms)[rows.rank == rank]) for rank in ranks]
        )
        slow += ranks[ratios > SLOW * np.sort(ratios)[(len(ratios) - 1) // 2]].tolist()
    return slow


def _columns(job: Job, module: str) -> list[_Column]:
    """Return one column per time of every kind of a module's layers at the TP size of its unit."""
    unit = job.layout.unit_of(module)
    tp, columns = str(unit.tp_of(module)), []
    split = any(delay is not None for delay in unit.weight_delay or ())
    unshared = _without_heads(job.profile)
    dealt = _adds(_retimed(unshared, _only_at(set())), job, module)
    for kind, cost in job.profile.modules[module].costs.items():
        for time in TIMES if tp in cost.tp else ():
            if time == "weight_ms" and not split:
                continue
            parts = {time} if split or time != "backward_ms" else {time, "weight_ms"}
            alone = _retimed(unshared, _only_at({(module, kind, tp, part) for part in parts}))
            adds = _adds(alone, job, module)
            columns.append(_Column(kind, time, {name: adds[name] - dealt[name] for name in adds}))
    return columns


def _exchanged(job: Job, module: str) -> dict[str, Floats]:
    """Return the contribution of exchanges to the rows of every stage, by operation and term.

    Exchanges are those of CP groups, and of TP groups over which items are distributed.
    """
    return _adds(_retimed(job.profile, _only_at(set())), job, module)


def _adds(profile: Profile, job: Job, module: str) -> dict[str, Floats]:
    """Return a profile's contribution to the rows of every stage, by operation and term [S, 4]."""
    stages = stages_of(profile, job.layout)
    adds = {operation: np.zeros((len(stages), len(TERMS))) for operation in COMPUTE}
    for number, stage in enumerate(stages):
        for there in stage.costs:
            if there.module == module:
                for operation, part_ms in zip(COMPUTE, there.parts_ms, strict=True):
                    adds[operation][number] = part_ms
    return adds


def _without_heads(profile: Profile) -> Profile:
    """Return the profile without the exchanges of CP groups."""
    modules = {
        name: module.model_copy(
            update={
                "costs": {
                    kind: cost.model_copy(update={"heads": None})
                    for kind, cost in module.costs.items()
                }
            }
        )
        for name, module in profile.modules.items()
    }
    return profile.model_copy(update={"modules": modules})


def _times(shard: LayerShard) -> dict[str, Polynomial]:
    """Return the times of a layer by name; backward_ms without the deferrable weight gradients."""
    rest_ms = combine((1.0, shard.backward_ms), (-1.0, shard.weight_ms))
    return {time: getattr(shard, time) for time in TIMES} | {"backward_ms": rest_ms}


def _only_at(keys: set[tuple[str, str, str, str]]) -> Change:
    """Return a change that keeps these times and sets all others to zero."""

    def change(module: str, kind: str, tp: str, time: str, polynomial: Polynomial) -> Polynomial:
        return polynomial if (module, kind, tp, time) in keys else NOTHING

    return change


def _retimed(profile: Profile, change: Change) -> Profile:
    """Return the profile with each time of a layer changed by `change`.

    It is called as change(module, kind, TP, time, polynomial). Deferrable weight gradients are a
    time of their own, so the backward is passed without them. The overlapped time of a pass changes
    as the pass's time does.
    """
    modules = {}
    for name, module in profile.modules.items():
        costs = {}
        for kind, cost in module.costs.items():
            shards = {}
            for tp, shard in cost.tp.items():
                times = {
                    time: change(name, kind, tp, time, polynomial)
                    for time, polynomial in _times(shard).items()
                }
                times["backward_ms"] = combine(
                    (1.0, times["backward_ms"]), (1.0, times["weight_ms"])
                )
                hidden = {
                    hiding: change(name, kind, tp, HIDING.get(hiding, "backward_ms"), polynomial)
                    for hiding, polynomial in shard.hidden_ms.items()
                }
                shards[tp] = shard.model_copy(update=times | {"hidden_ms": hidden})
            costs[kind] = cost.model_copy(update={"tp": shards})
        modules[name] = module.model_copy(update={"costs": costs})
    return profile.model_copy(update={"modules": modules})


def _read(database: Database, job: Job, module: str, operation: str) -> _Rows:
    """Read the rows of measured steps, rescaled to unshared devices where CPU ranks share cores."""
    llm = job.profile.modules[module].kind == "llm"
    columns = database.connection.execute(
        ROWS, {"llm": llm, "module": module, "operation": operation, "most": MOST_ROWS}
    ).fetchnumpy()
    number = {(stage.unit.name, stage.index): index for index, stage in enumerate(database.stages)}
    index = np.array(
        [
            number.get(where, -1)
            for where in zip(columns["unit"], columns["stage"].tolist(), strict=True)
        ],
        dtype=np.int64,
    )
    amounts = np.stack(
        [columns[name].astype(np.float64) for name in ("items", "tokens", "sum_length_sq")], axis=1
    )
    rows = _Rows(
        index,
        columns["rank"].astype(np.int64),
        np.hstack([np.ones((len(index), 1)), amounts]),
        columns["duration_ns"] / 1e6 / _sharing(job, module),
    )
    chosen = (index >= 0) & amounts.any(axis=1)
    # the first forward may wait for weights, but must stay where it is the only one
    if job.layout.overlap and operation == "forward" and job.layout.microbatches > 1:
        chosen &= columns["slot"] > 0
    return rows.take(chosen)


def _sharing(job: Job, module: str) -> float:
    """Return the slowdown of the run's passes from sharing cores."""
    unit = job.layout.unit_of(module).name
    planned = [time.sharing for time in job.predicted.units if time.unit == unit]
    return planned[0] if planned and shares_cores(job) else 1.0
