"""`disttrain profile --calibrate`: correct a run's profile by the run's own traces.

Nothing is measured again. Layers, links and optimizer get factors on the terms of the profile's
cost models; data statistics that have drifted replace the profile's. The result is a profile like
any other: plan with it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import numpy as np

from disttrain_cli.analysis.job.database import Database, open_database
from disttrain_cli.calls import call
from disttrain_cli.data.sizes import sizes_of_sample
from disttrain_cli.errors import DataError, MismatchError
from disttrain_cli.profiling.layer_factors import Corrected, correct_layers
from disttrain_cli.profiling.link_factors import Measure, correct_links, correct_optimizer
from disttrain_cli.profiling.recorded_data import recorded_data, with_data
from disttrain_cli.spec.files import Strict
from disttrain_cli.spec.layer_costs import Polynomial
from disttrain_cli.spec.profile import Profile
from disttrain_cli.spec.runfile import Run
from disttrain_cli.spec.trace import Job
from disttrain_cli.spec.work import Work

#: Percent by which a stage exceeds the time that its layers explain before it is reported.
STAGE_PCT = 3.0
RECORD = f"Record a run with: {call('train')}"


class Change(Strict):
    """A figure of the profile before and after, and how well it explains the recorded rows."""

    what: str
    where: str  # module or links
    measure: str
    before: float
    after: float
    change_pct: float | None  # None where there was nothing before
    rows: int
    error_before_pct: float | None = None
    error_after_pct: float | None = None


@dataclass(frozen=True)
class Calibration:
    """The corrected profile, the changes, and notes for the reader."""

    profile: Profile
    changes: list[Change]
    notes: list[str]


def calibrate(paths: list[Path], run: Run) -> Calibration:
    """Fit the cost models of a run's profile to its traces.

    Args:
        paths: folders of one recorded run (`analysis.job.files.find_traces`).
        run: the run file that the profile is for.

    Raises:
        DataError: no trace can be read there, it has no job.json that describes its stages, or no
            measured step.
        MismatchError: the run trained another model; both fingerprints are named.
    """
    database = open_database(paths)
    job = _job(database, paths, run)
    profile, layers = correct_layers(database, job)
    if not layers:
        raise DataError(
            f"No complete steps to calibrate with in {paths[0]}",
            "no step after the first ones is complete",
            RECORD,
        )
    profile, links = correct_links(database, job, profile)
    profile, optimizer = correct_optimizer(database, job, profile)
    sample, drifts = recorded_data(database, profile)
    changes = [*map(_of_layers, layers), *map(_of_measure, [*links, *optimizer])]
    if sample is not None:
        before = profile.data.images_per_sequence.mean
        profile = with_data(profile, run, sample) if drifts else profile
        changes.append(
            _change(
                "images per sequence",
                "data",
                "",
                before,
                profile.data.images_per_sequence.mean,
                len(sample.tokens),
            )
        )
    notes = [
        *database.warnings,
        *(one.sentence for one in drifts),
        *(note for one in layers for note in _strange(one, database)),
    ]
    provenance = job.profile.provenance | {"calibrated": _provenance(database, job, run)}
    profile = _with_module_times(profile).model_copy(update={"provenance": provenance})
    return Calibration(profile, changes, notes)


def _job(database: Database, paths: list[Path], run: Run) -> Job:
    """Return the job, or raise if its profile cannot be corrected."""
    if database.job is None or not database.stages:
        raise DataError(
            f"The trace in {paths[0]} does not describe its run",
            "; ".join(database.warnings) or "its job.json describes no stages",
            RECORD,
        )
    wanted, have = run.file.model_fingerprint(), database.job.profile.fingerprints.model
    if wanted != have:
        raise MismatchError(
            f"The run in {paths[0]} trained another model",
            f"model of the run: {have}; here: {wanted}",
            f"Calibrate with a run of this model, or name its run file. {RECORD}",
        )
    return database.job


def _change(
    what: str,
    where: str,
    measure: str,
    before: float,
    after: float,
    rows: int,
    errors: tuple[float, float] | None = None,
) -> Change:
    error_before_pct, error_after_pct = errors or (None, None)
    return Change(
        what=what,
        where=where,
        measure=measure,
        before=before,
        after=after,
        rows=rows,
        change_pct=100 * (after - before) / before if before else None,
        error_before_pct=error_before_pct,
        error_after_pct=error_after_pct,
    )


def _of_layers(one: Corrected) -> Change:
    return _change(
        one.operation,
        one.module,
        "ms",
        one.before_ms,
        one.after_ms,
        one.rows,
        (one.error_before_pct, one.error_after_pct),
    )


def _strange(one: Corrected, database: Database) -> Iterator[str]:
    """Yield notes on slow ranks and on stages whose time the layers' costs do not explain."""
    if one.slow_ranks:
        ranks = ", ".join(map(str, one.slow_ranks))
        yield (
            f"{one.module} {one.operation}: left out, far slower than others of the same stage:"
            f" rank {ranks}"
        )
    for stage, more_pct in one.stages_pct.items():
        if more_pct > STAGE_PCT:
            yield (
                f"{one.module} {one.operation}: {database.stages[stage].name} takes {more_pct:.0f}"
                " % longer than its layers' costs explain: devices may be slow"
            )


def _of_measure(one: Measure) -> Change:
    measure = {"gbps": "Gbit/s", "us": "µs", "parameter": "ns"}[one.what.rpartition("_")[2]]
    return _change(
        one.what,
        one.where,
        measure,
        one.before,
        one.after,
        one.rows,
        (one.error_before_pct, one.error_after_pct),
    )


def _with_module_times(profile: Profile) -> Profile:
    """Recompute the mean times of modules from the corrected layers and data."""
    work = sizes_of_sample(profile.data.sample).work(profile.inputs)
    modules = {}
    for name, module in profile.modules.items():
        # sequences without work for the module do not cost the polynomial's base
        idle = 1.0 - float(np.mean(np.any(work[name] > 0, axis=1)))

        def mean_ms(
            times: list[Polynomial], idle: float = idle, mean: Work = module.work_per_sequence
        ) -> float:
            return sum(time(mean) - idle * time.base for time in times)

        modules[name] = module.model_copy(
            update={
                "tp": {
                    tp: time.model_copy(
                        update={
                            "forward_ms": mean_ms(
                                [module.costs[kind].tp[tp].forward_ms for kind in module.layers]
                            ),
                            "backward_ms": mean_ms(
                                [module.costs[kind].tp[tp].backward_ms for kind in module.layers]
                            ),
                        }
                    )
                    for tp, time in module.tp.items()
                }
            }
        )
    return profile.model_copy(update={"modules": modules})


def _provenance(database: Database, job: Job, run: Run) -> str:
    measured = database.sql(
        "SELECT min(step) AS first, max(step) AS last, count(*) AS count FROM windows "
        "WHERE measured"
    )[0]
    how = "rehearsed" if job.rehearsed else "run"
    return (
        f"{how} {run.dir.root.name}, start {job.run}, {measured['count']} steps of"
        f" {measured['first']} to {measured['last']},"
        f" {datetime.now(UTC).isoformat(timespec='seconds')}"
    )
