"""Correction of links and optimizer by a trace: transfers, reductions, optimizer steps.

Transfers are measured without waiting. As with layers, terms that a run cannot tell apart (latency
and bandwidth, where all messages have one size) change by one common factor. A link that the run
did not use stays unchanged, and so does one whose measured times no figures explain better: those
of hosts too busy to serve it in time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from disttrain_cli.analysis.job.database import Database
from disttrain_cli.analysis.job.recorded import waited_transfers
from disttrain_cli.costs.layout import (
    CostedStage,
    by_device,
    crossings,
    in_one_node,
    optimizer_s,
    reduce_s,
    reduction_of,
    replicas_link,
    transfers_s,
)
from disttrain_cli.profiling.factors import each_error_pct, fit_factors
from disttrain_cli.spec.profile import Profile
from disttrain_cli.spec.trace import Job

LEAST_FACTOR = 1e-6  # a bandwidth is finite
WHERE = {True: "inside a node", False: "between nodes"}


@dataclass(frozen=True)
class Measure:
    """A figure of a link or of the optimizer, before and after."""

    what: str  # as in the profile: "p2p_gbps"
    where: str
    before: float
    after: float
    rows: int  # cuts, once per direction, or stages
    error_before_pct: float  # of their times
    error_after_pct: float


@dataclass(frozen=True)
class _Sample:
    """Seconds of a message by the profile, and as measured."""

    inside: bool  # of a node
    latency_s: float
    bytes_s: float
    measured_s: float


def correct_links(database: Database, job: Job, profile: Profile) -> tuple[Profile, list[Measure]]:
    """Replace the links in `profile` by the trace's; also return the changes.

    The starting point is the links of the job's profile.
    """
    changed: list[Measure] = []
    for name, samples in (
        ("p2p", _transfers(database, job)),
        (reduction_of(job.layout), _reductions(database, job)),
    ):
        for inside in (True, False):
            alike = [sample for sample in samples if sample.inside is inside]
            if alike:
                profile, factors = _correct(profile, name, inside, alike)
                changed += factors
    return profile, changed


def correct_optimizer(
    database: Database, job: Job, profile: Profile
) -> tuple[Profile, list[Measure]]:
    """Set the optimizer's time per parameter in `profile` by the trace; also return the changes.

    The trace's time excludes the all-gather of weights. A profile without a time of the optimizer
    gets one; where the next forwards overlap part of it, it stays unchanged.
    """
    if job.layout.overlap:
        return profile, []
    nothing, one = (_with_optimizer(job.profile, ns) for ns in (0.0, 1.0))
    samples = []
    for stage, measured_s in _updates(database, "step"):
        if stage.trained:
            gather_s, with_one_s = (
                optimizer_s(with_ns, job.layout, stage, job.gpus_per_node)
                for with_ns in (nothing, one)
            )
            samples.append((gather_s, with_one_s - gather_s, measured_s))
    if not samples:
        return profile, []
    gather_s, per_ns, measured_s = np.array(samples).T
    before = job.profile.device.optimizer_ns_per_parameter
    after = max(0.0, float(np.median((measured_s - gather_s) / per_ns)))
    errors = [each_error_pct(gather_s + ns * per_ns, measured_s) for ns in (before, after)]
    if errors[1] > errors[0]:
        after, errors[1] = before, errors[0]
    return _with_optimizer(profile, after), [
        Measure("optimizer_ns_per_parameter", "", before, after, len(samples), *errors)
    ]


def _with_optimizer(profile: Profile, ns: float) -> Profile:
    return profile.model_copy(
        update={"device": profile.device.model_copy(update={"optimizer_ns_per_parameter": ns})}
    )


def _correct(
    profile: Profile, name: str, inside: bool, samples: list[_Sample]
) -> tuple[Profile, list[Measure]]:
    """Correct latency and bandwidth of one kind of message."""
    terms = np.array([(sample.latency_s, sample.bytes_s) for sample in samples])
    measured_s = np.array([sample.measured_s for sample in samples])
    used = terms.any(axis=0)
    factors = np.full(2, np.nan)
    factors[used] = np.maximum(fit_factors(terms[:, used], measured_s), LEAST_FACTOR)
    factors[~used] = factors[used].mean()
    links = profile.links.of(inside)
    latency, bandwidth = f"{name}_us", f"{name}_gbps"
    errors = [
        each_error_pct(seconds, measured_s) for seconds in (terms.sum(axis=1), terms @ factors)
    ]
    if errors[1] > errors[0]:
        factors, errors[1] = np.ones(2), errors[0]
    changed = {
        bandwidth: getattr(links, bandwidth) / float(factors[1]),
        latency: getattr(links, latency) * float(factors[0]),
    }
    return _with_link(profile, inside, changed), [
        Measure(what, WHERE[inside], getattr(links, what), after, len(samples), *errors)
        for what, after in changed.items()
    ]


def _with_link(profile: Profile, inside: bool, changed: dict[str, float]) -> Profile:
    links = profile.links
    if inside or links.inter_node is None:
        new = links.model_copy(update=changed)
    else:
        new = links.model_copy(update={"inter_node": links.inter_node.model_copy(update=changed)})
    return profile.model_copy(update={"links": new})


def _without_latency(profile: Profile, name: str) -> Profile:
    for inside in (True, False):
        profile = _with_link(profile, inside, {f"{name}_us": 0.0})
    return profile


def _transfers(database: Database, job: Job) -> list[_Sample]:
    """Return one sample per cut and direction at which some rank waited."""
    stages = database.stages
    number = {stage.name: index for index, stage in enumerate(stages)}
    cuts = crossings(stages)
    if not cuts:
        return []
    waited = waited_transfers(database)
    whole_s, bytes_s = (
        transfers_s(profile, job.layout, stages, job.gpus_per_node)
        for profile in (job.profile, _without_latency(job.profile, "p2p"))
    )
    samples, hops = (
        [],
        {
            (number[before.name], number[after.name]): cut
            for cut, (before, after) in enumerate(cuts)
        },
    )
    for row in waited:
        index = hops[row["before"], row["after"]]
        ranks = [rank for side in ("before", "after") for rank in stages[row[side]].ranks]
        samples.append(
            _Sample(
                _inside(job, ranks),
                float(whole_s[index] - bytes_s[index]),
                float(bytes_s[index]),
                row["measured_ms"] / 1e3,
            )
        )
    return samples


def _reductions(database: Database, job: Job) -> list[_Sample]:
    """Return one sample per stage whose replicas reduce gradients; none if passes overlap them."""
    if job.layout.overlap:
        return []
    bare = _without_latency(job.profile, reduction_of(job.layout))
    samples = []
    for stage, measured_s in _updates(database, "reduce"):
        whole_s, bytes_s = (
            reduce_s(profile, job.layout, stage, job.gpus_per_node)
            for profile in (job.profile, bare)
        )
        if whole_s:
            samples.append(
                _Sample(_reduces_inside(job, stage), whole_s - bytes_s, bytes_s, measured_s)
            )
    return samples


def _updates(database: Database, operation: str) -> list[tuple[CostedStage, float]]:
    """Return stages with the seconds of their reduction or optimizer step, without waiting.

    Several stages of a rank are one.
    """
    measured_ms = {
        (row["unit"], row["stage"]): row["measured_ms"]
        for row in database.query("updates")
        if row["operation"] == operation and row["measured_ms"]
    }
    return [
        (stage, measured_ms[stage.unit.name, stage.index] / 1e3)
        for stage in by_device(database.stages)
        if (stage.unit.name, stage.index) in measured_ms
    ]


def _inside(job: Job, ranks: Sequence[int]) -> bool:
    """Return True if messages use the links inside a node; with one node only, all do."""
    return job.profile.links.inter_node is None or in_one_node(ranks, job.gpus_per_node)


def _reduces_inside(job: Job, stage: CostedStage) -> bool:
    """Return True if links inside a node bound a reduction, also of a ring over several nodes."""
    bandwidth = f"{reduction_of(job.layout)}_gbps"
    link = replicas_link(job.profile, stage, job.gpus_per_node)
    return bool(getattr(link, bandwidth) >= getattr(job.profile.links, bandwidth))
