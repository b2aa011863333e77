"""Verdicts on synthetic losses: each fault is found, and a healthy run is not called bad at any of
its steps."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from disttrain_cli.analysis.job.files import recorded_steps
from disttrain_cli.analysis.learning import learning
from disttrain_cli.spec.profile import LossToBeat
from tests.analysis import synthetic
from tests.planning.synthetic import run_file, tiny

BAR = 3.2
COUNT = 240
AT = np.arange(COUNT)


def rows(
    text: Any,
    held_out: dict[int, float] | None = None,
    image: Any = None,
    warmup: int = 20,
    first: int = 0,
    trained: tuple[str, ...] = ("llm", "image_generator"),
) -> list[dict[str, Any]]:
    held_out = held_out or {}
    return [
        {
            "step": first + at,
            "loss_text": float(loss),
            "loss_image": None if image is None else float(image[at]),
            "generator_losses": None,
            "learning_rate": 1e-3 * min(1.0, (first + at + 1) / warmup),
            "learning_rates": [
                (name, 1e-3 * min(1.0, (first + at + 1) / warmup)) for name in trained
            ],
            "evaluation_loss_text": held_out.get(first + at),
            "evaluation_loss_image": None,
        }
        for at, loss in enumerate(text)
    ]


def noisy(course: Any, share: float = 0.05, seed: int = 0) -> Any:
    return course * (1 + share * np.random.default_rng(seed).standard_normal(len(course)))


def judge(given: list[dict[str, Any]], **bars: float) -> Any:
    costs = tiny(run_file())
    to_beat = [LossToBeat(loss=loss, value=value, basis="…") for loss, value in bars.items()]
    data = costs.data.model_copy(update={"losses_to_beat": to_beat, "sequences": 50})
    return learning(given, costs.model_copy(update={"data": data}), batch=8)


FALLING = 0.4 + 5.2 * np.exp(-AT / 30)
FLAT = np.full(COUNT, 5.6)
FINETUNED = 1.6 + 0.4 * np.exp(-AT / 60)
HEALTHY = {"from scratch": FALLING, "fine-tuned": FINETUNED, "quick": 0.3 + 5 * np.exp(-AT / 5)}
EVERY = range(23, COUNT, 24)


@pytest.mark.parametrize("name", HEALTHY)
@pytest.mark.parametrize("share", [0.0, 0.02, 0.1])
def test_a_healthy_run_learns_and_is_never_called_bad(name: str, share: float) -> None:
    for seed in range(2):
        given = rows(noisy(HEALTHY[name], share, seed))
        seen = [judge(given[:count], text=BAR).verdict for count in [*range(1, COUNT, 7), COUNT]]
        assert {*seen} <= {"too early to say", "learning"}
        assert "learning" not in seen[:3]  # the warm-up
        assert seen[-1] == "learning" or (name == "fine-tuned" and share == 0.1)


@pytest.mark.parametrize("count", [*range(150, COUNT, 17), COUNT])
def test_noise_is_no_course(count: int) -> None:
    """Noise of neighbouring steps that is correlated, blocks of steps that do not divide a run,
    held-out losses that swing, and a floor that is reached within a few steps."""
    for seed in range(4):
        rng = np.random.default_rng(seed)
        walk = np.convolve(rng.standard_normal(COUNT + 20), 0.8 ** np.arange(20), "same")[10:-10]
        swinging = {step: 0.6 * (1 + 0.04 * rng.standard_normal()) for step in range(71, COUNT, 8)}
        floor = 0.5 + 3 * np.exp(-AT / 1.5)
        for text, held_out, warmup in (
            (FALLING * (1 + 0.1 * walk), {}, 20),
            (noisy(FALLING, 0.3, seed), {}, 20),
            (noisy(FALLING, 0.05, seed), {23: 3.1, 47: 1.6, **swinging}, 20),
            (noisy(floor, 0.02, seed), {}, 1),
        ):
            assert judge(rows(text[:count], held_out, warmup=warmup), text=BAR).verdict in (
                "learning",
                "too early to say",
            )
    assert judge(rows(noisy(floor, 0.02)[:count], warmup=1), text=BAR).verdict == "learning"


def test_a_bar_of_zero_is_none() -> None:
    assert judge(rows(noisy(FALLING)), text=0.0).verdict == "learning"


BAD: dict[str, tuple[Any, dict[int, float], str]] = {
    "flat": (FLAT, {}, "not learning"),
    "noisy flat": (noisy(FLAT), {}, "not learning"),
    "flat below the bar": (noisy(FLAT / 3, 0.02), {}, "not learning"),
    "noisy flat below the bar": (
        noisy(FLAT / 3, 0.2),
        {step: 1.8 + 1e-5 * step for step in EVERY},
        "not learning",
    ),
    "frequencies alone": (noisy(BAR + 2.4 * np.exp(-AT / 10)), {}, "not learning"),
    "by heart": (noisy(FALLING / 100), dict.fromkeys(EVERY, 0.9), "overfitting"),
    "U-shaped": (
        noisy(FALLING),
        {step: 1.5 + 0.3 * abs(step - 95) / 96 for step in EVERY},
        "overfitting",
    ),
    "U-shaped, once without a loss": (
        noisy(FALLING),
        {step: math.nan if step == 47 else 1.5 + 0.3 * abs(step - 95) / 96 for step in EVERY},
        "overfitting",
    ),
    "up again": (noisy(np.where(AT < 150, FALLING, 5.0)), {}, "diverging"),
    "up from the start": (noisy(2 + AT / 50), {}, "diverging"),
    "not a number": (np.where(AT < 230, FALLING, np.nan), {}, "diverging"),
    "infinite at times": (np.where(AT % 3 == 0, np.inf, FALLING), {}, "diverging"),
}


@pytest.mark.parametrize("name", BAD)
def test_each_fault_is_found(name: str) -> None:
    text, held_out, expected = BAD[name]
    judged = judge(rows(text, held_out), text=BAR)
    assert (judged.verdict, judged.losses[0].verdict) == (expected, expected)
    assert judged.bad and judged.advice and judged.headline.startswith(f"{expected}: text ")


def test_a_flat_loss_is_not_called_bad_before_the_warm_up_is_over() -> None:
    given = rows(noisy(FLAT), warmup=200)
    assert judge(given[:200], text=BAR).verdict == "too early to say"
    assert judge(given, text=BAR).verdict == "not learning"


def test_a_loss_that_stood_still_when_the_run_went_on_may_have_been_learned() -> None:
    given = rows(noisy(np.full(COUNT, 0.9), 0.02), first=1000)
    assert judge(given, text=BAR).verdict == "too early to say"
    assert judge(rows(noisy(FLAT), first=1000), text=BAR).verdict == "not learning"


def test_short_runs() -> None:
    assert judge([]).verdict == "too early to say"
    assert "3 steps so far" in judge(rows(FLAT[:3])).headline


def test_losses_that_training_cannot_change_are_left_out() -> None:
    given = rows(FLAT, image=noisy(1.4 * FALLING / 5.6), trained=("image_generator",))
    assert [one.loss for one in judge(given, text=BAR).losses] == ["image"]
    assert [one.loss for one in judge(rows(0 * FLAT, image=FALLING)).losses] == ["image"]


def test_the_worst_loss_is_the_verdict() -> None:
    """A generator that was trained before may learn what its loss does not show: only one that
    stays above the loss to beat is called bad."""
    stands = noisy(np.full(COUNT, 0.8), 0.02) * (AT % 7 != 3)  # 0: the batch had no image
    both = rows(noisy(FALLING), image=stands)
    assert judge(both, text=BAR).verdict == "learning"
    assert judge(both, text=BAR, image=0.7).verdict == "not learning"
    assert "text learning" in judge(both, text=BAR, image=0.7).headline


def test_steps_of_all_starts_are_read_each_as_last_done(tmp_path: Path) -> None:
    traces = tmp_path / "traces"

    def record(start: str, steps: range, since: int, loss: float) -> None:
        table = [
            {"run": start, "step": step, "end_ns": since + step, "loss_text": loss}
            for step in steps
        ]
        synthetic.table(
            traces / "steps" / f"segment-{start}-0.parquet", table, synthetic.STEP_COLUMNS
        )

    record("start-000", range(10), 0, 3.0)
    record("start-001", range(6, 8), 1000, 2.0)
    found = recorded_steps(traces)
    assert [(row["step"], row["loss_text"]) for row in found] == [
        *((step, 3.0) for step in range(6)),
        *((step, 2.0) for step in (6, 7)),
    ]
    assert recorded_steps(tmp_path) == []
