"""`train.on_straggler: replan`: plans without the devices that slow a job, or that it has lost.

While the ranks run, verdicts of `disttrain watch` are heard. One of a slow rank that stays becomes
a plan on the devices that are left: the run's profile, calibrated with the traces so far, and the
planner. Where that gains enough, whoever looks after the ranks (`launching.supervise`) has them
save and end, and starts them again on it.

What is left out is the device of the slow rank or, where the cluster has several nodes, its node.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from disttrain_cli.errors import DisttrainError, SpecError
from disttrain_cli.runtime.launching.starts import next_start
from disttrain_cli.runtime.launching.supervise import Planned
from disttrain_cli.spec.files import fingerprint
from disttrain_cli.spec.plan import Layout, Plan, read_plan, write_plan
from disttrain_cli.spec.rundir import RunDir, replans_file
from disttrain_cli.spec.runfile import Run
from disttrain_cli.spec.whole import is_own_file, write_whole

#: Of a step, what a plan without a slow device must gain.
LEAST_GAIN = 0.05
#: A verdict less sure is not acted upon.
LEAST_SURE = 0.5


class MakeAnew:
    """The `supervise.Replanner` of a run.

    Args:
        folder: the run's, or that of its rehearsal.
        planned: what runs now.
        path: of the plan's file, which new plans replace; of a rehearsal, in its own folder.
        say: what the user should know.
        emulated: the ranks run on devices of the run's own profile: it is not replaced.
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

    def hear(self, row: dict[str, Any]) -> None:
        """A line of `disttrain watch --json`."""
        if row["stays"] and row["blamed_ranks"] and row["confidence"] >= LEAST_SURE:
            self._consider(row)

    def ready(self) -> bool:
        """Whether there is a better plan than the present one."""
        return self._found is not None

    def take(self) -> tuple[str, Planned]:
        """Why it is better, and the plan, which is now the run's."""
        assert self._found is not None, "somebody asked whether it is ready"
        (why, planned), self._found = self._found, None
        return why, self._keep(why, planned)

    def goes_with(self, device: int) -> range:
        """The devices that are left out with one, itself included."""
        cluster = self._run.file.cluster
        each = cluster.gpus_per_node if cluster.nodes > 1 else 1
        first = device // each * each
        return range(first, first + each)

    def without(self, device: int) -> tuple[str, Planned] | None:
        """A plan that is now the run's, without a device that is gone; None where none fits."""
        out, named = self._out([device])
        try:
            planned = self._made(out)
        except DisttrainError as error:
            self._say(f"{named} is lost, but there is no plan without it: {error.what}.")
            return None
        self._found = None
        why = f"{named} is lost for good"
        return why, self._keep(why, planned)

    def _consider(self, row: dict[str, Any]) -> None:
        """Find a plan without the ranks that a verdict blames, and keep it where it gains
        enough."""
        layout = self._planned.plan.plan
        out, named = self._out([layout.devices[rank] for rank in row["blamed_ranks"]])
        if not named:  # slow together: not their devices' fault
            return
        try:
            planned = self._made(out)
            step_s = self._step_s(row, planned)
        except DisttrainError as error:
            self._say(
                f"{named} stays slow, but there is no plan without it: {error.what}. Training goes"
                " on."
            )
            return
        gain = 1 - step_s / row["iteration_s"]
        told = (
            f"{named} stays slow: without it, {planned.plan.plan.describe()} on"
            f" {planned.plan.plan.gpus_used} devices would take {step_s:.3g} s for a step, not"
            f" {row['iteration_s']:.3g} s ({-100 * gain:+.0f} %)"
        )
        if gain < LEAST_GAIN:
            self._say(f"{told}. Training goes on as it is.")
            return
        self._say(f"{told}. Saving after this step, to go on with that plan.")
        self._found = told, planned

    def _out(self, devices: list[int]) -> tuple[list[int], str]:
        """What is left out with some devices, besides what is already, and its name; none of
        several nodes, or of several devices where there is one node."""
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
        """The best plan on what is left, by the times recorded so far, as far as there are any.

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
        """A step on another plan: the present one without what the slow rank costs, by what the
        planner says of both."""
        from disttrain_cli.planning.predict import predict
        from disttrain_cli.planning.solve import cluster_of
        from disttrain_cli.planning.units import units_of

        profile, layout = planned.profile, self._planned.plan.plan
        cluster = cluster_of(self._run.file, profile)
        present_s = predict(units_of(profile, cluster, layout), layout, cluster).iteration_s
        mended_s = float(row["iteration_s"] - row["lost_s"])
        return mended_s * planned.plan.predicted.iteration_s / present_s

    def _keep(self, why: str, planned: Planned) -> Planned:
        """Make a plan the run's: files, and a line of `logs/replans.jsonl`."""
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
    """The plan in a job's folder, where the job began with another one and was planned anew
    (`logs/replans.jsonl`); else that one."""
    told = replans_file(folder.logs)
    layout = began = fingerprint(plan.plan)
    for line in told.read_text().splitlines() if told.exists() else ():
        with suppress(ValueError, KeyError):  # written to a full disk
            row = json.loads(line)
            if row["instead_of"] == layout:
                layout = fingerprint(Layout.model_validate(row["plan"]))
    with suppress(SpecError):  # it was removed
        if layout != began and fingerprint((kept := read_plan(folder.plan)).plan) == layout:
            return kept
    return plan
