"""Layouts trained by real ranks, to be compared with one process (`equivalence_worker`)."""

from collections.abc import Callable, Container, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from disttrain_cli.runtime.launching.launch import launch
from disttrain_cli.runtime.messages.proof import faults
from disttrain_cli.spec.plan import Plan, UnitPlan
from disttrain_cli.spec.runfile import Run
from tests.runtime.equivalence_worker import check_equals, recorded, reference
from tests.runtime.factory import plan_of

WORKER = "tests.runtime.equivalence_worker:ranks"


def train(
    cases: Iterable[tuple[str, Run, Plan]],
    steps: int,
    folder: Path,
    *,
    in_order: Container[str] = (),
    after: Mapping[str, str] = {},
    timeout_s: float = 900,
) -> Path:
    """Ranks train every named case, those of one number of ranks in the same processes.

    Messages of the cases `in_order` go as over NCCL; those named in `after` resume from the
    checkpoint of an earlier case. Returns the folder that holds what each case
    left, by its name.
    """
    out = folder / "out"
    by_ranks: dict[int, list[dict[str, Any]]] = {}
    for name, run, plan in cases:
        by_ranks.setdefault(plan.plan.gpus_used, []).append(
            {
                "name": name,
                "run": run.source,
                "plan": plan.model_dump(mode="json"),
                "steps": steps,
                "in order": name in in_order,
                "origin": str(out / after[name]) if name in after else None,
                "out": str(out / name),
            }
        )
    for ranks, payload in by_ranks.items():
        launch(ranks, WORKER, {"cases": payload}, folder / "logs" / str(ranks), timeout_s=timeout_s)
    return out


class Case(NamedTuple):
    """A layout of one of a test's models."""

    model: str
    units: list[UnitPlan]
    microbatch_size: int
    trained: list[str] | None  # modules
    zero_stage: int = 0
    in_order: bool = False  # messages go as over NCCL


class Models:
    """Cases trained by ranks, and every model of theirs trained alone."""

    def __init__(
        self,
        cases: Mapping[str, Case],
        write: Callable[[Path, Case], Run],
        steps: int,
        folder: Path,
        timeout_s: float = 900,
    ) -> None:
        self._cases = cases
        self._alone: dict[tuple[str, str], Any] = {}
        several = []
        for number, (name, case) in enumerate(cases.items()):
            run = write(folder / f"run-{number}", case)
            several.append((name, run, plan_of(run, case.units, case.microbatch_size)))
            if self._model(case) not in self._alone:
                alone = write(folder / f"alone-{number}", case._replace(zero_stage=0))
                self._alone[self._model(case)] = reference(alone, steps)[:2]
        in_order = {name for name, case in cases.items() if case.in_order}
        self._out = train(several, steps, folder, in_order=in_order, timeout_s=timeout_s)

    def check(self, name: str) -> None:
        """The case's ranks computed what one process does, and no order of messages blocks."""
        case = self._cases[name]
        check_equals(self._out / name, *self._alone[self._model(case)])
        if case.in_order:
            assert faults(recorded(self._out / name)) == []

    @staticmethod
    def _model(case: Case) -> tuple[str, str]:
        return case.model, str(case.trained)
