"""Learning rates over the steps of a run."""

from itertools import pairwise
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from disttrain_cli.runtime.engine.schedule import beyond_schedule, learning_rate
from disttrain_cli.spec.runfile.train import TrainSpec


def train_spec(**optimizer: object) -> TrainSpec:
    return TrainSpec.model_validate(
        {"global_batch_size": 1, "steps": 100, "optimizer": {"lr": 1e-2, **optimizer}}
    )


def test_the_rate_warms_up_and_falls_to_its_end() -> None:
    train = train_spec(warmup_steps=10, schedule="cosine", min_lr_fraction=0.1)
    rates = [learning_rate(train, "llm", step) for step in range(130)]
    assert rates[0] == pytest.approx(1e-3)
    assert rates[9] == rates[10] == pytest.approx(1e-2)
    assert rates[55] == pytest.approx(1e-2 * 0.55)
    assert rates[100] == rates[129] == pytest.approx(1e-3)


def test_steps_beyond_a_schedule_that_ends_at_zero_are_said() -> None:
    train = train_spec(
        warmup_steps=10,
        schedule="cosine",
        modules={"eye": {"min_lr_fraction": 0.1}, "ear": {"schedule": "constant"}},
    )
    file = SimpleNamespace(
        train=train, model=SimpleNamespace(trained_names=["eye", "ear", "llm", "projectors"])
    )
    run = SimpleNamespace(file=file)
    [said] = beyond_schedule(run, 101)  # type: ignore[arg-type]
    assert said.startswith("warning: llm, projectors: the schedule ends at train.steps, 100, ")
    assert beyond_schedule(run, 100) == []  # type: ignore[arg-type]
    file.train = train.model_copy(update={"steps": None, "epochs": 4.0})
    file.train.count_epochs(25 * train.global_batch_size)
    [said] = beyond_schedule(run, 101)  # type: ignore[arg-type]
    assert "at train.epochs, 100, " in said and "train.steps" not in said


@given(
    warmup=st.integers(0, 50),
    end=st.floats(0, 1),
    schedule=st.sampled_from(["constant", "cosine", "linear"]),
)
def test_rates_rise_then_never_rise_again(warmup: int, end: float, schedule: str) -> None:
    train = train_spec(warmup_steps=warmup, schedule=schedule, min_lr_fraction=end)
    rates = [learning_rate(train, "llm", step) for step in range(110)]
    top = max(1, warmup)
    assert all(a <= b for a, b in pairwise(rates[:top]))
    assert all(a >= b - 1e-15 for a, b in pairwise(rates[top:]))
    assert max(rates) == pytest.approx(1e-2)
    assert rates[-1] == pytest.approx(1e-2 * (1.0 if schedule == "constant" else end))
