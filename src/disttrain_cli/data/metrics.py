"""Scores of answers and drawn images: exact match, a judge of digits, and plugins.

Installed packages add metrics and judges (entry point groups disttrain.metrics and
disttrain.judges).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.util import find_spec
from typing import Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from disttrain_cli.data.digits import DigitJudge
from disttrain_cli.errors import DataError, SpecError
from disttrain_cli.spec.extras import install_command
from disttrain_cli.spec.plugins import with_plugins
from disttrain_cli.spec.runfile.samples import SampleSpec
from disttrain_cli.spec.samples import Answer, Drawn, Judge, Samples

T = TypeVar("T")

#: Score of an answer: `prompt`, `text`, and `recorded`, the answer in the data.
Metric = Callable[[Answer], float]


class ImageJudge(Protocol):
    """Recognises what an image shows, knowing nothing of the model. Made once without arguments."""

    name: str
    accuracy: float | None  # share of real images about which it is right, where that is known

    def recognise(self, images: Sequence[NDArray[np.uint8]]) -> Sequence[str]:
        """A label for each image [H, W, C]."""
        ...

    def named(self, text: str) -> str | None:
        """The label that a text asks for or names; None where it names none."""
        ...


def exact_match(answer: Answer) -> float:
    """Return 1 if the model's answer equals the recorded one, word for word."""
    return float(answer.text == answer.recorded)


def metrics_named(names: Sequence[str]) -> dict[str, Metric]:
    """Return the metrics of these names, and exact match.

    Raises:
        SpecError: there is no metric of a name, or one cannot be loaded.
    """
    known: dict[str, Metric] = {"exact_match": exact_match}
    return _chosen("samples.metrics", "disttrain.metrics", known, ["exact_match", *names])


def judge_named(name: str) -> Callable[[], ImageJudge]:
    """Make the judge of this name.

    Raises:
        SpecError: there is none of the name, or it cannot be loaded.
        DataError: that of digits lacks scikit-learn.
    """
    if name == "digits" and find_spec("sklearn") is None:
        raise DataError(
            "samples.judge needs scikit-learn, which is not installed",
            next_step=f"Install it with: {install_command('demo')}; or leave samples.judge out.",
        )
    known: dict[str, Callable[[], ImageJudge]] = {"digits": DigitJudge}
    return _chosen("samples.judge", "disttrain.judges", known, [name])[name]


def check_scores(spec: SampleSpec) -> None:
    """Raise what `metrics_named` and `judge_named` raise, before training."""
    metrics_named(spec.metrics)
    if spec.judge is not None:
        judge_named(spec.judge)


def _chosen(field: str, group: str, built_in: dict[str, T], names: Iterable[str]) -> dict[str, T]:
    known = with_plugins(group, built_in)
    for name in names:
        if name not in known:
            raise SpecError(
                f"{field}: there is none called {name!r}",
                f"installed: {', '.join(known)}",
                "Correct the name, or install the package that has it as an entry point of the"
                f" group {group}.",
            )
    return {name: known[name] for name in dict.fromkeys(names)}


def scored(answers: Sequence[Answer], names: Sequence[str]) -> list[Answer]:
    """Return the answers with their scores; None if a metric fails, which is logged."""
    metrics = metrics_named(names)
    return [
        one.model_copy(
            update={"scores": {name: _score(name, metrics[name], one) for name in metrics}}
        )
        for one in answers
    ]


def _score(name: str, metric: Metric, answer: Answer) -> float | None:
    try:
        score = float(metric(answer))
    except Exception as error:  # a plugin's: finished answers must not be lost
        print(f"warning: the metric {name} failed: {type(error).__name__}: {error}", flush=True)
        return None
    return score if math.isfinite(score) else None


def judged(
    samples: Samples, images: Mapping[str, Sequence[NDArray[np.uint8]]], name: str | None
) -> Samples:
    """The samples with what the judge of a name says of them; without it where the judge fails,
    which the log says.

    Args:
        images: those that were drawn, by generator, in the order of `samples.drawn`.
    """
    if name is None:
        return samples
    try:
        judge = judge_named(name)()
        seen = [label for pictures in images.values() for label in judge.recognise(pictures)]
        drawn = [
            Drawn.model_validate(
                one.model_dump() | {"asked": judge.named(one.prompt), "recognised": label}
            )
            for one, label in zip(samples.drawn, seen, strict=True)
        ]
        written = [
            one
            if one.recorded is None
            else one.model_copy(
                update={
                    "names_it": (shown := judge.named(one.recorded)) is not None
                    and judge.named(one.text) == shown
                }
            )
            for one in samples.written
        ]
        about = Judge(name=judge.name, accuracy=judge.accuracy)
    except Exception as error:  # of another package: training is over, and its samples are kept
        print(f"warning: the judge {name} failed: {type(error).__name__}: {error}", flush=True)
        return samples
    return samples.model_copy(update={"drawn": drawn, "written": written, "judge": about})
