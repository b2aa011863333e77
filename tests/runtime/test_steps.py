"""The step loop calls hooks in one order on all ranks, and ends as they request."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from disttrain_cli.runtime.evaluation import Evaluation, Standing
from disttrain_cli.runtime.hooks import Hook, Step
from disttrain_cli.runtime.steps import run_steps
from disttrain_cli.spec.runfile.train import EvaluationSpec, TrainSpec
from tests.runtime.factory import step_of


class Engine:
    """An engine as far as the loop uses it, next to a rank that measures twice as much."""

    optimizer, train_spec, skipped_steps = None, TrainSpec.model_construct(), 0

    def __init__(self, calls: list[str], fails: int = -1) -> None:
        self.calls, self.fails, self.largest = calls, fails, [0.0]
        self.tracer = SimpleNamespace(
            step=-1, now=lambda: len(calls), begin=calls.append, end_step=lambda: calls.append("|")
        )

    def get_ready(self) -> None:
        self.calls.append("ready")

    def run_step(self, order: int, fetch: int, measured: Callable[[], list[float]]) -> None:
        assert (order, fetch) == (10 * self.tracer.step, order + 1)
        self.calls.append("step")
        self.largest = [2 * value for value in measured()]
        self.skipped_steps += order == 10
        if order == 10 * self.fails:
            raise ArithmeticError


class Recording(Hook):
    """Record its calls; `changes` are attributes of a step that it sets when the step ends."""

    def __init__(self, name: str, calls: list[str], changes: dict[int, dict[str, Any]]) -> None:
        self.name, self.calls, self.changes = name, calls, changes
        self.seen: list[Step] = []

    def __enter__(self) -> Recording:
        self.calls.append(f"{self.name} enters")
        return self

    def __exit__(self, *error: Any) -> None:
        self.calls.append(f"{self.name} exits")

    def begin(self, step: int) -> None:
        self.calls.append(f"{self.name} begins")

    def measure(self) -> dict[str, float]:
        self.calls.append(f"{self.name} measures")
        return {self.name: float(len(self.name))}

    def stepped(self, step: Step) -> None:
        self.calls.append(f"{self.name} stepped")
        assert step.end_ns == 0

    def ended(self, step: Step) -> None:
        self.calls.append(f"{self.name} ended")
        for name, value in self.changes.get(step.number, {}).items():
            setattr(step, name, value)

    def reported(self, step: Step) -> None:
        self.calls.append(f"{self.name} reported")
        self.seen.append(step)


def ran(
    steps: range, changes: dict[int, dict[str, Any]] | None = None, fails: int = -1
) -> tuple[str, list[str], list[Step]]:
    """Returned reason, calls, and steps as the second hook saw them."""
    calls: list[str] = []
    first, second = Recording("a", calls, {}), Recording("bb", calls, changes or {})
    engine: Any = Engine(calls, fails)
    data: Any = SimpleNamespace(order=lambda step: 10 * step)
    fetch_of: Any = lambda order: order + 1  # noqa: E731
    with pytest.raises(ArithmeticError) if fails >= 0 else pytest.MonkeyPatch.context():
        reason = run_steps(steps, engine, data, fetch_of, [first, second])
        return reason, calls, second.seen
    return "", calls, second.seen


def of_each(call: str) -> list[str]:
    return [f"a {call}", f"bb {call}"]


STEP = [
    *("order", "ready", *of_each("begins"), "step", *of_each("measures")),
    *(*of_each("stepped"), *of_each("ended"), *of_each("reported"), "|"),
]
EXITS = ["bb exits", "a exits"]


def test_every_phase_is_called_for_all_hooks_before_the_next() -> None:
    reason, calls, seen = ran(range(1, 3))
    assert reason == "" and calls == [*of_each("enters"), *STEP, *STEP, *EXITS]
    assert [step.largest for step in seen] == [{"a": 2.0, "bb": 4.0}] * 2
    assert [(step.number, step.updated, step.last, step.saves) for step in seen] == [
        (1, False, False, False),
        (2, True, True, True),
    ]
    assert all(step.start_ns < step.end_ns for step in seen)


@pytest.mark.parametrize(
    ("change", "count", "expected"),
    [
        ({1: {"stop": "SIGTERM"}}, 2, "SIGTERM"),
        ({3: {"stop": "SIGTERM"}}, 4, ""),  # after the last step there is nothing to stop
        ({1: {"ends": "enough"}}, 2, ""),
        ({1: {"ends": "enough", "stop": "SIGTERM"}}, 2, ""),
        ({1: {"saves": True}}, 4, ""),
    ],
)
def test_hooks_end_training_with_a_checkpoint(
    change: dict[int, dict[str, Any]], count: int, expected: str
) -> None:
    reason, calls, seen = ran(range(4), change)
    assert (reason, len(seen), calls[-2:]) == (expected, count, EXITS)
    assert [step.number for step in seen if step.saves] == sorted({*change, count - 1})


def test_no_step_is_left() -> None:
    assert ran(range(4, 4)) == ("", [*of_each("enters"), *EXITS], [])


def test_hooks_are_left_after_an_error() -> None:
    _, calls, seen = ran(range(4), fails=1)
    assert [step.number for step in seen] == [0] and calls[-2:] == EXITS
    assert calls[-4:-2] == of_each("measures")


def test_an_evaluation_requests_checkpoints_and_the_end() -> None:
    evaluation = Evaluation.__new__(Evaluation)
    evaluation.spec = EvaluationSpec(every_steps=2, stop_after=1, keep_best=True)
    evaluation.standing, evaluation._steps, evaluation._every = Standing(), 8, 2
    losses = iter([2.0, 3.0, 3.5])
    evaluation.losses = lambda: {"evaluation_loss": next(losses)}  # type: ignore[method-assign]
    seen = [step_of(number, last=number == 5) for number in range(6)]
    for step in seen:
        evaluation.ended(step)
    assert [step.number for step in seen if step.saves] == [1]
    assert [step.row.get("evaluation_loss") for step in seen] == [None, 2.0, None, 3.0, None, 3.5]
    assert seen[0].about == {"held_out": {"loss": None, "step": -1, "since": 0}}
    assert seen[3].about == {
        "held_out_loss": 3.0,
        "held_out": {"loss": 2.0, "step": 1, "since": 1},
    }
    assert [bool(step.ends) for step in seen] == [False] * 3 + [True, True, False]
    assert seen[3].ends.startswith("Training ends after step 4: the held-out loss has not fallen")
