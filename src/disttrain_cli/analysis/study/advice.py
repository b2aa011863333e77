"""Advice for a job with operation-level traces, and the queries for its evidence."""

from __future__ import annotations

import numpy as np
from msgspec.structs import replace

from disttrain_cli.analysis.losses import Losses
from disttrain_cli.analysis.result.verdicts import Evidence, Place, Verdict
from disttrain_cli.analysis.study.graph import StudyGraph
from disttrain_cli.analysis.study.operations import BACKWARD, FORWARD
from disttrain_cli.analysis.study.replays import Replays

_SQL = 'disttrain analyze --sql "SELECT {what} FROM operations {rest}"'
_BY_STAGE = _SQL.format(
    what="stage, optype, avg(duration) * 1e3 AS ms",
    rest="WHERE optype LIKE '%-compute' GROUP BY ALL ORDER BY ALL",
)
_BY_MICROBATCH = _SQL.format(
    what="step, mb_id, dp_rank, sum(duration) AS s",
    rest="WHERE optype LIKE '%-compute' GROUP BY ALL ORDER BY s DESC LIMIT 20",
)
_TRANSFERS = _SQL.format(
    what="optype, stage, min(duration) * 1e3 AS least_ms, max(duration) * 1e3 AS most_ms",
    rest="WHERE optype NOT LIKE '%-compute' GROUP BY ALL ORDER BY most_ms DESC",
)


_HOST = _SQL.format(
    what="rank, step, min(start_ts) AS first_pass_s",
    rest="WHERE optype = 'forward-compute' GROUP BY ALL ORDER BY 3 DESC LIMIT 20",
)


def command_of(cause: str, place: Place) -> str:
    """Return the command that lists the rows behind a cause."""
    if cause == "worker":
        return _SQL.format(
            what="step, avg(duration) * 1e3 AS ms",
            rest=f"WHERE rank = {place.rank} AND optype = '{FORWARD}' GROUP BY ALL ORDER BY ALL",
        )
    return {
        "communication": _TRANSFERS,
        "host": _HOST,
        "intra_microbatch": _BY_MICROBATCH,
        "inter_microbatch": _BY_MICROBATCH,
    }.get(cause, _BY_STAGE)


def explained(verdict: Verdict, graph: StudyGraph, replays: Replays, losses: Losses) -> Verdict:
    """Add advice for a Megatron job, and this trace's evidence, to a verdict."""
    cause, place = verdict.cause, replace(verdict.place, unit=None)
    headline, advice, command = verdict.headline, verdict.advice, command_of(cause, place)
    more = list[Evidence]()
    if cause == "stage":
        even_s = float(losses.lost["stage"].mean())
        even = f"{even_s:.3g} s ({100 * even_s / replays.measured.mean():.0f} %)"
        headline += (
            " This is saved if it becomes as fast as the others; spreading its work evenly over all"
            f" stages saves {even} per step."
        )
        advice, more = _stage(place, graph, even)
        more.append(Evidence("saved by equally long stages", even_s, "s"))
    elif cause == "worker":
        advice, more = _worker(place, graph)
    elif cause in ("intra_microbatch", "inter_microbatch"):
        over = "replicas" if cause == "intra_microbatch" else "microbatches"
        advice = (
            f"Sequences are of unequal length: balance Σ length² over the {over} when batches are"
            " assembled."
        )
    elif cause == "communication":
        slow = max(
            replays.what_if.by_operation.items(),
            key=lambda item: item[1] if "compute" not in item[0] else 0.0,
        )
        advice = (
            "Check the links and other traffic on them: transfers take longer in some steps or"
            " between some ranks."
        )
        more = [Evidence(f"slowdown by {slow[0]} alone", slow[1], "ratio")]
    elif cause == "host":
        advice = (
            "Operations start late although their inputs are ready: check data loading, Python,"
            " garbage collection and other processes on the hosts."
        )
    elif cause == "none":
        advice = "Nothing to fix; more speed needs more GPUs or faster kernels."
    more.append(Evidence("slowdown S in the study's definition", replays.what_if.slowdown, "ratio"))
    return replace(
        verdict,
        headline=headline,
        place=place,
        advice=advice,
        next_command=command,
        evidence=[*verdict.evidence, *more],
    )


def _stage(place: Place, graph: StudyGraph, even: str) -> tuple[str, list[Evidence]]:
    """Return advice and evidence for a stage that takes longer than the others.

    Args:
        place: location of the stage.
        graph: operations of the job.
        even: the saving of equally long stages.
    """
    stage = place.stage
    of_stage, passes = graph.stage == stage, np.isin(graph.optype, (FORWARD, BACKWARD))
    stages = len(np.unique(graph.stage))
    share = 1 - graph.taken[passes].mean() / graph.taken[passes & of_stage].mean()
    last = (
        " It is the last stage, which also computes the LM head and the loss."
        if stage == stages - 1
        else ""
    )
    return (
        (
            f"Move about {100 * share:.0f} % of the work of stage {stage} to the others, as fewer"
            f" layers: equally long stages save {even} per step.{last} If its devices are slow"
            " rather than its work large, fixing them saves the larger figure."
        ),
        [
            row
            for kind in (FORWARD, BACKWARD)
            for row in _beside(graph, kind, of_stage, f"stage {stage}", "stages")
        ],
    )


def _worker(place: Place, graph: StudyGraph) -> tuple[str, list[Evidence]]:
    mask = graph.rank == place.rank
    return (
        (
            f"Check the device of rank {place.rank} and the other processes on its host; run"
            " without that host if it stays slow."
        ),
        [
            row
            for kind in (FORWARD, BACKWARD)
            for row in _beside(graph, kind, mask, f"rank {place.rank}", "ranks")
        ],
    )


def _beside(
    graph: StudyGraph, kind: str, mask: np.ndarray, name: str, others: str
) -> list[Evidence]:
    """Return the mean time of a type of pass per microbatch, at a location and elsewhere.

    All parts of a stage count together.
    """
    what, same = kind.removesuffix("-compute"), graph.optype == kind
    groups = {name: same & mask, f"the other {others}": same & ~mask}
    ms = 1e3 * graph.trace.chunks * graph.taken
    return [
        Evidence(f"{group}: {what} of a microbatch", float(ms[pick].mean()), "ms")
        for group, pick in groups.items()
        if pick.any()
    ]
