"""`train.on_straggler: replan`: plans without devices that slow a job or are lost.

While the ranks run, verdicts of `disttrain watch` are received. A persistent verdict on a slow rank
leads to a plan on the remaining devices: the run's profile, calibrated with the traces so far, and
the planner. If that saves enough, the supervisor (`launching.supervise`) lets the ranks save and
end, and restarts them on it.

The device of the slow rank is left out or, if the cluster has several nodes, its node.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from disttrain_cli.errors import DisttrainError, SpecError
from disttrain_cli.mitigation.monitor import monitored
from disttrain_cli.runtime.launching.starts import next_start
from disttrain_cli.runtime.launching.supervise import Planned
from disttrain_cli.spec.files import fingerprint
from disttrain_cli.spec.plan import Layout, Plan, read_plan, write_plan
from disttrain_cli.spec.profile import Profile
from disttrain_cli.spec.rundir import RunDir, replans_file
from disttrain_cli.spec.runfile import Run
from disttrain_cli.spec.whole import is_own_file, write_whole

#: Least share of a step that a plan without a slow device must save.
LEAST_GAIN = 0.05
#: Least confidence of a verdict that leads to a new plan.
LEAST_SURE = 0.5


@contextmanager
def monitored_job(
    run: Run,
    folder: RunDir,
    plan: Plan,
    profile: Profile,
    file: Path,
    note: Callable[[str], None],
    emulated: bool = False,
) -> Iterator[Replanner | None]:
    """Monitor a job while it runs; yield its replanner if `train.on_straggler` requests one.

    A rehearsal is monitored only then, from its first step on.

    Args:
        run: the run.
        folder: folder of the run, or of its rehearsal.
        plan: the plan that the job starts with.
        profile: the profile of that plan.
        file: file of the plan.
        note: called from a separate thread.
        emulated: the job is a rehearsal.
    """
    if run.file.train.on_straggler != "replan":
        with nullcontext() if emulated else monitored(folder.root, note):
            yield None
        return
    replanner = Replanner(run, folder, Planned(plan, profile), file, note, emulated)
    at_once = 0.0 if emulated else None
    with monitored(folder.root, note, replanner.on_verdict, at_once, at_once):
        yield replanner


class Replanner:
    """Replanner of a run (`supervise.Replanner`).

    Args:
        run: the run.
        folder: folder of the run, or of its rehearsal.
        planned: the present plan and its profile.
        path: the plan's file, which new plans replace; for a rehearsal, in its folder.
        say: reports a message to the user.
        emulated: the ranks run on devices of the run's own profile, which is not replaced.
    """

    def __init__(
        self,
        run: Run,
        folder: RunDir,
        planned: Planned,
        path: Path,
        say: Callable[[str], None],
        emulated: bool = False,
    ) -> None:
        self._run, self._folder, self._path, self._say = run, folder, path, say
        self._planned, self._emulated = planned, emulated
        self._found: tuple[str, Planned] | None = None

    def on_verdict(self, row: dict[str, Any]) -> None:
        """Process a line of `disttrain watch --json`."""
        if row["stays"] and row["blamed_ranks"] and row["confidence"] >= LEAST_SURE:
            self._consider(row)

    def ready(self) -> bool:
        """Return True if there is a better plan than the present one."""
        return self._found is not None

    def take(self) -> tuple[str, Planned]:
        """Adopt the better plan as the run's; return the reason, and the plan."""
        assert self._found is not None, "ready() is True"
        (why, planned), self._found = self._found, None
        return why, self._keep(why, planned)

    def goes_with(self, device: int) -> range:
        """Return the devices that are left out together with one, itself included."""
        cluster = self._run.file.cluster
        each = cluster.gpus_per_node if cluster.nodes > 1 else 1
        first = device // each * each
        return range(first, first + each)

    def without(self, device: int) -> tuple[str, Planned] | None:
        """Adopt a plan without a lost device as the run's; None if none fits."""
        out, named = self._out([device])
        try:
            planned = self._made(out)
        except DisttrainError as error:
            self._say(f"{named} is lost, but there is no plan without it: {error.what}.")
            return None
        self._found = None
        why = f"{named} is lost permanently"
        return why, self._keep(why, planned)

    def _consider(self, row: dict[str, Any]) -> None:
        """Make a plan without the ranks that a verdict blames, and store it if it saves enough."""
        layout = self._planned.plan.plan
        out, named = self._out([layout.devices[rank] for rank in row["blamed_ranks"]])
        if not named:  # slow together: not the fault of their devices
            return
        try:
            planned = self._made(out)
            step_s = self._step_s(row, planned)
        except DisttrainError as error:
            self._say(
                f"{named} remains slow, but there is no plan without it: {error.what}. Training"
                " continues."
            )
            return
        gain = 1 - step_s / row["iteration_s"]
        comparison = (
            f"{named} remains slow: without it, a step of {planned.plan.plan.describe()} on"
            f" {planned.plan.plan.gpus_used} devices would take {step_s:.3g} s instead of"
            f" {row['iteration_s']:.3g} s ({-100 * gain:+.0f} %)"
        )
        if gain < LEAST_GAIN:
            self._say(f"{comparison}. Training continues unchanged.")
            return
        self._say(f"{comparison}. Saving after this step to continue with that plan.")
        self._found = comparison, planned

    def _out(self, devices: list[int]) -> tuple[list[int], str]:
        """Return all devices to leave out if some more are, and the name of what these are.

        If they are on several nodes, or several devices of one node, nothing more is left out, and
        the name is empty.
        """
        before, places = (
            self._planned.plan.plan.left_out,
            {self.goes_with(device) for device in devices},
        )
        if len(places) != 1:
            return before, ""
        (place,) = places
        kind = "Node" if self._run.file.cluster.nodes > 1 else "Device"
        return sorted({*before, *place}), f"{kind} {place.start // len(place)}"

    def _made(self, out: list[int]) -> Planned:
        """Return the best plan on the remaining devices, by the times recorded so far, if any.

        Raises:
            InfeasibleError: none fits.
        """
        from disttrain_cli.errors import DataError, InfeasibleError
        from disttrain_cli.planning.solve import solve
        from disttrain_cli.profiling.calibrate import calibrate

        profile, before = self._planned.profile, self._planned.plan.plan
        with suppress(DataError):  # no step has ended
            profile = calibrate([self._folder.root], self._run).profile
        left = profile.device.count - len(out)
        if left < 1:
            raise InfeasibleError("No device is left")
        plan = solve(self._run.file, profile, gpus=left, strategy=before.strategy, top=0)
        layout = plan.plan.model_copy(update={"left_out": out})
        predicted = plan.predicted.model_copy(update={"layout": fingerprint(layout)})
        return Planned(plan.model_copy(update={"plan": layout, "predicted": predicted}), profile)

    def _step_s(self, row: dict[str, Any], planned: Planned) -> float:
        """Return the seconds of a step on another plan.

        It scales the present step, without the cost of the slow rank, by the planner's predictions
        for both plans.
        """
        from disttrain_cli.planning.predict import predict
        from disttrain_cli.planning.solve import cluster_of
        from disttrain_cli.planning.units import units_of

        profile, layout = planned.profile, self._planned.plan.plan
        cluster = cluster_of(self._run.file, profile)
        present_s = predict(units_of(profile, cluster, layout), layout, cluster).iteration_s
        mended_s = float(row["iteration_s"] - row["lost_s"])
        return mended_s * planned.plan.predicted.iteration_s / present_s

    def _keep(self, why: str, planned: Planned) -> Planned:
        """Adopt a plan as the run's: write its files, and a line of `logs/replans.jsonl`."""
        from disttrain_cli.planning.picture import draw
        from disttrain_cli.planning.predict import simulated_step
        from disttrain_cli.planning.solve import cluster_of

        start, (plan, profile) = next_start(self._folder), planned
        step = simulated_step(profile, plan.plan, cluster_of(self._run.file, profile))
        for path in (self._path, self._folder.profile):
            if is_own_file(path):
                write_whole(path.with_name(f"{path.name}.before-{start}"), path.read_bytes())
        write_plan(self._path, plan)
        draw(self._path, step.pipeline, step.timeline, plan.plan)
        write_whole(self._folder.profile, profile.model_dump_json(indent=2) + "\n")
        row = {
            "at": datetime.now(UTC).isoformat(timespec="seconds"),
            "start": start,
            "why": why,
            "instead_of": fingerprint(self._planned.plan.plan),
            "plan": plan.plan.model_dump(mode="json"),
            "predicted_iteration_s": plan.predicted.iteration_s,
        }
        with suppress(OSError), replans_file(self._folder.logs).open("a") as file:
            file.write(json.dumps(row) + "\n")
        self._planned = Planned(plan, self._planned.profile) if self._emulated else planned
        return self._planned


def goes_on_with(folder: RunDir, plan: Plan) -> Plan:
    """Return the plan in a job's folder if the job was replanned from `plan`; else `plan`.

    `logs/replans.jsonl` lists the replans.
    """
    path = replans_file(folder.logs)
    layout = began = fingerprint(plan.plan)
    for line in path.read_text().splitlines() if path.exists() else ():
        with suppress(ValueError, KeyError):  # written to a full disk
            row = json.loads(line)
            if row["instead_of"] == layout:
                layout = fingerprint(Layout.model_validate(row["plan"]))
    with suppress(SpecError):  # the file was removed
        if layout != began and fingerprint((kept := read_plan(folder.plan)).plan) == layout:
            return kept
    return plan
