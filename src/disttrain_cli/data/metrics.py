"""Scores of held-out answers: exact match, and what installed packages add (group
disttrain.metrics)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from disttrain_cli.errors import SpecError
from disttrain_cli.spec.plugins import with_plugins
from disttrain_cli.spec.samples import Answer

#: Score of an answer: `prompt`, `text`, and `recorded`, which the data say.
Metric = Callable[[Answer], float]


def exact_match(answer: Answer) -> float:
    """1 where the model says what the data say, word for word."""
    return float(answer.text == answer.recorded)


def metrics_named(names: Sequence[str]) -> dict[str, Metric]:
    """The metrics of these names, and exact match.

    Raises:
        SpecError: there is none of a name, or one cannot be loaded.
    """
    known: dict[str, Metric] = with_plugins("disttrain.metrics", {"exact_match": exact_match})
    for name in names:
        if name not in known:
            raise SpecError(
                f"samples.metrics: there is no metric {name!r}",
                f"installed: {', '.join(known)}",
                "Correct the name, or install the package that has it as an entry point of the"
                " group disttrain.metrics.",
            )
    return {name: known[name] for name in dict.fromkeys(["exact_match", *names])}


def scored(answers: Sequence[Answer], names: Sequence[str]) -> list[Answer]:
    """The answers with their scores; None where a metric fails at one, which the log says."""
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
    except Exception as error:  # of another package: training is over, and its answers are kept
        print(f"warning: the metric {name} failed: {type(error).__name__}: {error}", flush=True)
        return None
    return score if math.isfinite(score) else None
