"""Drift of the data from those of the plan, its cost, and the command that plans again."""

from __future__ import annotations

from msgspec.structs import replace

from disttrain_cli.analysis.job.database import Database
from disttrain_cli.analysis.next_commands import plan_again
from disttrain_cli.analysis.result.rows import OperationRow
from disttrain_cli.analysis.result.verdicts import Verdict
from disttrain_cli.analysis.verdict import LEAST_SHARE
from disttrain_cli.data.drift import Drift, drift, of_last_phase, recent
from disttrain_cli.spec.profile import SizeSample


def moved_data(database: Database) -> list[Drift]:
    """Return the drift of the data, by the steps' sums and the recorded sizes."""
    job = database.job
    if job is None:
        return []
    steps = database.sql("SELECT step, tokens, images, targets FROM steps ORDER BY step")
    steps = [row | {"sequences": job.layout.global_batch_size} for row in steps]
    last = recent(of_last_phase(job.profile, steps))
    sizes = database.sql(
        "SELECT tokens, length_sq, images, targets, clips FROM sizes WHERE step >= $first",
        {"first": last[0]["step"] if last else 0},
    )
    columns = ("tokens", "length_sq", "images", "targets", "clips")
    lists = {name: [row[name] for row in sizes] for name in columns}
    return drift(job.profile, steps, SizeSample(**lists))


def stale(
    database: Database, moved: list[Drift], operations: list[OperationRow], verdict: Verdict
) -> Verdict:
    """Warn that the plan was made for other data, and advise a new plan if that costs most.

    It costs most if it changes the predicted step by more than the verdict's cause loses.
    """
    command = plan_again(database.paths)
    database.warnings += [one.sentence for one in moved]
    effect, changed_s = "", 0.0
    if operations and operations[0].planned:
        planned_s, expected_s = operations[0].planned / 1e3, operations[0].predicted / 1e3
        changed_s = abs(expected_s - planned_s)
        effect = (
            f": according to the profile, a step with these data takes {expected_s:.3g} s instead"
            f" of the planned {planned_s:.3g} s ({100 * (expected_s / planned_s - 1):+.0f} %)"
        )
    effects = f"The data differ from those that were planned for{effect}"
    database.warnings.append(f"{effects}; plan again: {command}")
    if changed_s < max(
        verdict.lost_s, LEAST_SHARE * database.query("iterations")[0]["iteration_s"]
    ):
        return verdict
    advice = (
        f"{moved[0].sentence}. {effects}. Measure these data and plan again, then see what remains:"
        f" {verdict.advice}"
    )
    return replace(verdict, advice=advice, next_command=command)
